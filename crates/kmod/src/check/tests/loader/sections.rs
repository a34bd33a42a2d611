//! Sections and their fields, names and string tables.

use super::*;

#[test]
fn arm64_needs_its_plt_sections() {
    let file = ModuleFile::named("m");
    let report = arm64(file.clone());
    assert_eq!(report.verdict, Verdict::Loads, "6.1 without CONFIG_ARM64_MODULE_PLTS: {}", lines(&report));
    let mut facts = kernel(&["ARM64_MODULE_PLTS"], "");
    facts.arch = crate::Architecture::Arm64;
    let check = |file: &ModuleFile| {
        let mut file = file.clone().info("vermagic", &facts.expected_vermagic().to_string());
        file.machine = 183;
        run(&facts, &[], &[file.payload()])
    };
    let mut file = file;
    assert_eq!(check(&file).verdict, Verdict::Refused);
    file.more.push((".plt", PROGBITS, 0, "", vec![0]));
    assert_eq!(check(&file).verdict, Verdict::Refused);
    file.more.push((".init.plt", PROGBITS, 0, "", vec![0]));
    assert_eq!(check(&file).verdict, Verdict::Loads);
}

#[test]
fn a_section_that_is_writable_and_executable_is_refused() {
    let mut file = ModuleFile::named("m");
    file.more.push((".both", PROGBITS, WRITE | EXEC, "", vec![0]));
    assert_eq!(findings(&kernel(&[], ""), &file.build()), [""; 0]);
    assert_eq!(
        findings(&kernel(&["STRICT_MODULE_RWX"], ""), &file.build()),
        ["refused Elf: section .both has invalid WRITE|EXEC flags"]
    );
    assert_eq!(verdict_on("5.7.1", &["STRICT_MODULE_RWX"], &file), Verdict::Loads);
}

#[test]
fn per_cpu_data_fits_into_the_reserve_of_all_modules() {
    let with = |size: usize| {
        let mut file = ModuleFile::named("m");
        file.more.push((".data..percpu", PROGBITS, ALLOC | WRITE, "", vec![0; size]));
        file.build()
    };
    let facts = kernel(&[], "");
    assert_eq!(findings(&facts, &with(4096)), [""; 0]);
    assert_eq!(
        findings(&facts, &with(8192)),
        [
            "loads PerCpu: takes most of the 8192 bytes of per-CPU data that all modules share: found 8192 bytes"
        ]
    );
    assert_eq!(
        findings(&facts, &with(8193)),
        [
            "refused PerCpu: Could not allocate 8193 bytes percpu data: the kernel reserves 8192 for all modules: found \
             8193 bytes"
        ]
    );
}

#[test]
fn profiling_kernels_had_a_larger_reserve() {
    let mut file = ModuleFile::named("m");
    file.more.push((".data..percpu", PROGBITS, ALLOC | WRITE, "", vec![0; 32 << 10]));
    assert_eq!(verdict_on("6.12.1", &["MEM_ALLOC_PROFILING"], &file), Verdict::Loads);
    for (release, options) in
        [("6.12.1", &[][..]), ("6.9.1", &["MEM_ALLOC_PROFILING"]), ("7.2.1", &["MEM_ALLOC_PROFILING"])]
    {
        assert_eq!(verdict_on(release, options, &file), Verdict::Refused, "{release} {options:?}");
    }
    let mut single = kernel(&[], "");
    single.config = crate::KernelConfig::parse("CONFIG_MODULES=y\nCONFIG_MODVERSIONS=y\n").unwrap();
    let magic = format!("{} ", single.expected_vermagic());
    assert_eq!(
        run(&single, &[], &[file.info("vermagic", &magic).payload()]).verdict,
        Verdict::Loads,
        "without SMP"
    );
}

#[test]
fn loaded_sections_have_different_names() {
    let options = ["KALLSYMS", "SYSFS"];
    let mut file = ModuleFile::named("m");
    file.more.push((".data", PROGBITS, ALLOC, "", vec![0; 8]));
    file.more.push((".data", PROGBITS, ALLOC, "", Vec::new()));
    file.more.push((".data", PROGBITS, 0, "", vec![0; 8]));
    assert_eq!(
        verdict_on("6.12.1", &options, &file),
        Verdict::Loads,
        "sysfs shows neither empty nor unloaded ones"
    );
    file.more.push((".data", PROGBITS, ALLOC, "", vec![0; 8]));
    assert_eq!(verdict_on("6.12.1", &options, &file), Verdict::Refused);
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("6.1.1", &options, &file), Verdict::Loads);
}

#[test]
fn fields_that_the_loader_does_not_check_give_an_unknown_verdict() {
    let file = ModuleFile::named("m").build();
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = file.clone();
        patch(&mut file, at, bytes);
        findings(&kernel(&["STRICT_MODULE_RWX"], ""), &file)
    };
    let this_module = section_header(&file, 1);
    assert_eq!(
        changed(this_module + 8, &2_u64.to_le_bytes()),
        [
            "refused Elf: struct module is in a section that is not writable, and the kernel faults when it writes to it"
        ]
    );
    let place =
        usize::try_from(u64::from_le_bytes(file[this_module + 24..][..8].try_into().unwrap())).unwrap();
    assert_eq!(
        changed(place + 200, &[1]),
        [
            "unknown Elf: struct module contains more than the module's name, and the kernel uses these values as its own"
        ]
    );
    let impossible = "unknown Elf: section .gnu.linkonce.this_module has an impossible alignment, and the loader does not check that";
    for (align, expected) in
        [(u64::MAX, 1), (1 << 32, 1), (1 << 30, 1), (1 << 20, 0), (1 << 40 | 8, 0), (0x0060_0001, 0)]
    {
        assert_eq!(changed(this_module + 48, &align.to_le_bytes()), vec![impossible; expected], "{align:#x}");
    }
    assert_eq!(
        changed(section_header(&file, 2) + 48, &u64::MAX.to_le_bytes()),
        [""; 0],
        "the loader drops .modinfo"
    );
    assert_eq!(
        changed(place + 24, &[0]),
        [
            "refused Elf: struct module has no name, and the kernel cannot make its directory in sysfs (EINVAL)"
        ]
    );
}

#[test]
fn names_outside_of_their_tables_are_refused_since_6_14() {
    let mut file = ModuleFile::named("m");
    file.more.push((".comment", PROGBITS, 0, "", vec![0]));
    // The section headers follow the names.
    let inside = u32::try_from(names_size(&file.build()) + 8).unwrap();
    for (release, name, verdict) in [
        ("6.1.0-9-amd64", inside, Verdict::Loads),
        ("6.1.0-9-amd64", 1 << 20, Verdict::Unknown),
        ("6.1.0-9-amd64", u32::MAX, Verdict::Refused),
        ("6.12.1", inside, Verdict::Unknown),
        ("6.12.117", inside, Verdict::Refused),
        ("6.14.0", inside, Verdict::Refused),
    ] {
        let mut facts = kernel(&[], "");
        facts.release = release.parse().unwrap();
        let magic = format!("{} ", facts.expected_vermagic());
        let mut file = file.clone().info("vermagic", &magic).build();
        let at = (2..30)
            .map(|index| section_header(&file, index))
            .find(|&at| file[at + 8] == 0 && file[at + 4] == 1);
        patch(&mut file, at.unwrap(), &name.to_le_bytes());
        let payload = PayloadModule { path: "m.ko".to_owned(), module: Module::parse(&file[..]) };
        assert_eq!(run(&facts, &[], &[payload]).verdict, verdict, "{release} {name}");
    }
}

/// Size of the section names, which are in the last section.
fn names_size(file: &[u8]) -> usize {
    field(file, usize::from(file[60]) - 1, SH_SIZE)
}

/// Builds a module whose first symbol has a name at this offset, and returns its findings on Linux 6.1.
fn named_at(file: &ModuleFile, offset: u32) -> Vec<String> {
    let mut bytes = file.build();
    let symbols = field(&bytes, section_of_type(&bytes, 2), SH_OFFSET);
    patch(&mut bytes, symbols + 24, &offset.to_le_bytes());
    findings(&kernel(&[], PRINTK), &bytes)
}

#[test]
fn old_kernels_read_the_names_of_symbols_anywhere_in_the_file() {
    let beyond = "Elf: the name of a symbol does not end in the file, and the loader reads on";
    let mut file = ModuleFile::named("m");
    file.undefined.push(("printk", false));
    file.versions.as_mut().unwrap().push(("printk", 1));
    assert_eq!(named_at(&file, 1), [""; 0]);
    let bytes = file.build();
    let names = field(&bytes, section_of_type(&bytes, 3), SH_OFFSET);
    let symbol_after = bytes.windows(7).skip(names).position(|text| text == b".symtab").unwrap();
    let found = named_at(&file, u32::try_from(symbol_after).unwrap());
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("refused UndefinedSymbol") && found[0].contains(".symtab"), "{found:?}");
    assert!(named_at(&file, 1 << 20).contains(&format!("unknown {beyond}")));
    let mut local = ModuleFile::named("m");
    local.defined.push("local");
    assert_eq!(named_at(&local, 1 << 30), [format!("refused {beyond}")]);
}

#[test]
fn a_section_of_more_than_all_memory_for_modules_is_refused() {
    let mut file = ModuleFile::named("m");
    file.more.push((".bss", 8, ALLOC | WRITE, "", vec![0; 8]));
    let bytes = file.build();
    for (size, expected) in [(8_u64, 0), (1 << 40 | 8, 0), (1 << 30, 1), (0x7b34_57cf_e795_2e83, 1)] {
        let mut bytes = bytes.clone();
        let section = section_of_type(&bytes, 8);
        let at = section_header(&bytes, section) + SH_SIZE;
        patch(&mut bytes, at, &size.to_le_bytes());
        let sentence = "refused Elf: section .bss is larger than the kernel's memory for modules (ENOMEM)";
        assert_eq!(findings(&kernel(&[], ""), &bytes), vec![sentence; expected], "{size:#x}");
    }
}

#[test]
fn fields_in_a_section_that_is_not_loaded_count_since_linux_6_4() {
    for (release, options, verdict) in [
        ("6.1.1", &[][..], Verdict::Refused),
        ("6.1.1", &["MODULE_FORCE_LOAD"][..], Verdict::Unknown),
        ("6.12.117", &[][..], Verdict::Loads),
    ] {
        let mut facts = kernel(options, "");
        facts.release = release.parse().unwrap();
        let magic = format!("{} ", facts.expected_vermagic());
        let mut bytes = ModuleFile::named("m").info("vermagic", &magic).build();
        let at = section_header(&bytes, 2) + 8;
        patch(&mut bytes, at, &0_u64.to_le_bytes());
        let payload = PayloadModule { path: "m.ko".to_owned(), module: Module::parse(&bytes[..]) };
        assert_eq!(run(&facts, &[], &[payload]).verdict, verdict, "{release} {options:?}");
    }
}

#[test]
fn the_last_field_ends_after_its_section() {
    let mut bytes = ModuleFile::named("m").build();
    let at = section_header(&bytes, 2) + SH_SIZE;
    // Within `license=GPL`.
    patch(&mut bytes, at, &9_u64.to_le_bytes());
    let module = Module::parse(&bytes[..]).unwrap();
    assert_eq!(module.info, [("license".to_owned(), "GPL".to_owned())]);
}
