//! Steps of the loader beyond names and versions: sections, relocations, and kernels that load no such modules.

use super::*;
use crate::testing::{SH_OFFSET, SH_SIZE, SH_TYPE};

const ALLOC: u64 = 2;
const WRITE: u64 = 1;
const EXEC: u64 = 4;
const PROGBITS: u32 = 1;
const RELA: u32 = 4;
const REL: u32 = 9;

/// Entry of a relocation section.
fn rela(offset: u64, kind: u32, symbol: u32) -> Vec<u8> {
    let info = u64::from(symbol) << 32 | u64::from(kind);
    [offset, info, 0].map(u64::to_le_bytes).concat()
}

/// Module whose loaded section `.text` has these bytes and relocations.
fn relocated(text: &[u8], relocations: &[Vec<u8>]) -> ModuleFile {
    let mut file = ModuleFile::named("m");
    file.more.push((".text", PROGBITS, ALLOC | EXEC, "", text.to_vec()));
    file.more.push((".rela.text", RELA, 0, ".text", relocations.concat()));
    file
}

/// Verdict for the module on a kernel of this release with these options.
fn verdict_on(release: &str, options: &[&str], file: &ModuleFile) -> Verdict {
    let mut facts = kernel(options, PRINTK);
    facts.release = release.parse().unwrap();
    let magic = format!("{} ", facts.expected_vermagic());
    run(&facts, &[], &[file.clone().info("vermagic", &magic).payload()]).verdict
}

fn arm64(mut file: ModuleFile) -> CheckReport {
    let mut facts = kernel(&[], "");
    facts.arch = crate::Architecture::Arm64;
    file.machine = 183;
    run(&facts, &[], &[file.info("vermagic", &facts.expected_vermagic().to_string()).payload()])
}

#[test]
fn relocations_of_an_unknown_type_are_refused() {
    let types: Vec<_> =
        (0..).step_by(8).zip([1, 2, 4, 10, 11, 24]).map(|(at, kind)| rela(at, kind, 0)).collect();
    assert_eq!(findings(&kernel(&[], ""), &relocated(&[0; 48], &types).build()), [""; 0]);
    let got = relocated(&[0; 8], &[rela(0, 2, 0), rela(4, 42, 0)]);
    assert_eq!(
        findings(&kernel(&[], ""), &got.build()),
        ["refused Relocation: the loader does not support relocations of type 42"]
    );
    assert_eq!(verdict_on("7.2.1-amd64", &[], &got), Verdict::Refused);
}

#[test]
fn only_relocations_of_loaded_sections_count() {
    let mut file = ModuleFile::named("m");
    file.more.push((".debug_info", PROGBITS, 0, "", vec![1; 8]));
    file.more.push((".rela.debug_info", RELA, 0, ".debug_info", rela(0, 42, 0)));
    assert_eq!(findings(&kernel(&[], ""), &file.build()), [""; 0]);
    file.more.push((".text", PROGBITS, ALLOC, "", vec![0; 8]));
    file.more.push((".rel.text", REL, 0, ".text", Vec::new()));
    // Even an empty one.
    assert_eq!(
        findings(&kernel(&[], ""), &file.build()),
        ["refused Relocation: the loader does not support relocations without addends (SHT_REL)"]
    );
}

#[test]
fn bytes_under_a_relocation_are_zero() {
    let far = 70_000;
    let mut text = vec![0; far + 8];
    let places = [0, 8, far as u64].map(|at| rela(at, 1, 0));
    assert_eq!(findings(&kernel(&[], ""), &relocated(&text, &places).build()), [""; 0]);
    text[far + 7] = 1;
    let sentence = "refused Relocation: invalid relocation target, existing value is nonzero for type 1";
    assert_eq!(findings(&kernel(&[], ""), &relocated(&text, &places).build()), [sentence]);
    // Four bytes of eight.
    let four = [rela(far as u64, 2, 0)];
    assert_eq!(findings(&kernel(&[], ""), &relocated(&text, &four).build()), [""; 0]);
    assert_eq!(
        findings(&kernel(&[], ""), &relocated(&text, &[rela(far as u64 + 1, 1, 0)]).build()),
        [
            "unknown Relocation: a relocation of type 1 lies outside of its section, and the loader does not check that"
        ]
    );
}

#[test]
fn an_address_of_32_unsigned_bits_overflows() {
    let overflow =
        "refused Relocation: overflow in relocation type 10: likely not compiled with -mcmodel=kernel";
    let facts = kernel(&[], PRINTK);
    let file = relocated(&[0; 8], &[rela(0, 10, 1)]);
    let mut local = file.clone();
    local.defined.push("local");
    assert_eq!(findings(&facts, &local.build()), [overflow]);
    assert_eq!(findings(&facts, &file.clone().needs("printk", 1).build()), [overflow]);
    // Without an exporter, the value of a weak symbol is zero.
    let mut weak = file;
    weak.undefined.push(("optional", true));
    assert_eq!(findings(&facts, &weak.build()), [""; 0]);
}

/// Builds a module with a section that refers to `.modinfo`, which the loader drops.
fn refers_to_dropped_section(section: &'static str, kind: u32) -> Vec<u8> {
    let mut file = ModuleFile::named("m");
    file.defined.push("local");
    file.more.push((section, PROGBITS, ALLOC, "", vec![0; 8]));
    file.more.push((".rela.tested", RELA, 0, section, rela(0, kind, 1)));
    let mut bytes = file.build();
    let symbols =
        (1..32).map(|index| section_header(&bytes, index)).find(|at| bytes[at + SH_TYPE] == 2).unwrap();
    let symbols = u64::from_le_bytes(bytes[symbols + SH_OFFSET..][..8].try_into().unwrap());
    // The section number of the first symbol.
    patch(&mut bytes, usize::try_from(symbols).unwrap() + 24 + 6, &[2, 0]);
    bytes
}

#[test]
fn an_address_in_a_dropped_section_matters_where_the_kernel_follows_it() {
    let facts = kernel(&[], "");
    let got = |section, kind| findings(&facts, &refers_to_dropped_section(section, kind));
    for kind in [1, 2, 4, 24] {
        assert_eq!(got(".data.of_module", kind), [""; 0]);
        let sentence = format!(
            "unknown Relocation: a relocation of type {kind}, which the kernel follows, refers to a section that the loader drops"
        );
        assert_eq!(got("__bug_table", kind), [""; 0], "the kernel reads it, and does not trust it");
        assert_eq!(got("__param", kind), [sentence]);
    }
    for kind in [10, 11] {
        let sentence = format!(
            "refused Relocation: overflow in relocation type {kind}: likely not compiled with -mcmodel=kernel"
        );
        assert_eq!(got(".data.of_module", kind), [sentence]);
    }
}

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
fn arm64_has_its_own_types() {
    let types = |kinds: &[u32]| {
        let relocations: Vec<_> = kinds.iter().map(|&kind| rela(0, kind, 0)).collect();
        arm64(relocated(&[1; 8], &relocations)).verdict
    };
    assert_eq!(types(&[0, 256, 257, 258, 260, 277, 283, 286, 299]), Verdict::Loads);
    let of_x86 = relocated(&[0; 8], &[rela(0, 2, 0)]).payload();
    let mut facts = kernel(&[], "");
    facts.arch = crate::Architecture::Arm64;
    let report = run(&facts, &[], &[of_x86]);
    assert!(
        report.modules[0].findings.iter().all(|finding| finding.rule != Rule::Relocation),
        "{}",
        lines(&report)
    );
    for kind in [311, 312, 1, 314] {
        assert_eq!(types(&[kind]), Verdict::Refused, "{kind}");
    }
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
fn two_modules_export_one_name() {
    let modules = ["a", "b"].map(|name| ModuleFile::named(name).exports("shared", 1).payload());
    let report = run(&kernel(&[], ""), &[], &modules);
    assert_eq!(lines(&report).lines().count(), 2, "{}", lines(&report));
    assert!(
        lines(&report)
            .contains("b (refused): refused DuplicateExport: exports symbol shared, which a of this payload")
    );
    // `z` is loaded first, because `a` needs it.
    let needed = ModuleFile::named("z").exports("shared", 1).exports("base", 2);
    let modules = [ModuleFile::named("a").needs("base", 2).exports("shared", 1).payload(), needed.payload()];
    assert!(lines(&run(&kernel(&[], ""), &[], &modules)).contains("a (refused): refused DuplicateExport"));
}

#[test]
fn a_module_exports_a_name_of_a_module_that_it_needs() {
    let table = "0x00000001\tverb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n\
                 0x00000001\tother\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let file = ModuleFile::named("m").exports("verb", 1);
    assert_eq!(findings(&kernel(&[], table), &file.build()), [""; 0], "ib_core need not be loaded");
    assert_eq!(
        findings(&kernel(&[], table), &file.needs("other", 1).build()),
        ["refused DuplicateExport: exports symbol verb, which the kernel's ib_core exports, too"]
    );
}

#[test]
fn a_kernel_that_is_locked_down_enforces_signatures() {
    let file = ModuleFile::named("m");
    let forced = ["MODULE_SIG", "LOCK_DOWN_KERNEL_FORCE_INTEGRITY", "SECURITY_LOCKDOWN_LSM"];
    assert_eq!(verdict_on("6.1.1", &forced, &file), Verdict::Refused);
    let mut facts = kernel(&forced, PRINTK);
    assert!(
        lines(&run(&facts, &[], &[file.payload()])).contains("according to CONFIG_LOCK_DOWN_KERNEL_FORCE_*")
    );
    // Without `lockdown` in the list, the option has no effect.
    let text = "CONFIG_MODULES=y\nCONFIG_MODULE_SIG=y\nCONFIG_LOCK_DOWN_KERNEL_FORCE_INTEGRITY=y\nCONFIG_LSM=\"yama,bpf\"\n";
    facts.config = crate::KernelConfig::parse(text).unwrap();
    assert_eq!(facts.enforces_signatures(), None);
}

#[test]
fn kernels_that_load_no_such_module() {
    let livepatch = ModuleFile::named("m").info("livepatch", "Y");
    assert_eq!(verdict_on("6.1.1", &[], &livepatch), Verdict::Refused);
    assert_eq!(verdict_on("6.1.1", &["LIVEPATCH"], &livepatch), Verdict::Loads);
    let pinned = ["SECURITY_LOADPIN", "SECURITY_LOADPIN_ENFORCE"];
    assert_eq!(verdict_on("6.1.1", &pinned, &ModuleFile::named("m")), Verdict::Unknown);
    let mut facts = kernel(&[], "");
    facts.config = crate::KernelConfig::parse("CONFIG_SMP=y\n").unwrap();
    facts.beyond_headers.module_size = Some(known(896));
    let file = ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP ");
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "refused Kernel: the kernel loads no modules: its configuration lacks CONFIG_MODULES",
            "loads SymbolVersion: the kernel compares no symbol versions (CONFIG_MODVERSIONS is off): it loads a module \
             that was compiled with other structures, too"
        ]
    );
}

#[test]
fn a_module_without_control_flow_integrity_panics_a_kernel_that_has_it() {
    let mut file = ModuleFile::named("m");
    file.defined.push("init_module");
    assert_eq!(verdict_on("6.1.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG"], &file), Verdict::Refused);
    assert_eq!(verdict_on("6.18.1", &["CFI"], &file), Verdict::Refused);
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG", "CFI_PERMISSIVE"], &file), Verdict::Loads);
    file.defined.push("__cfi_start");
    assert_eq!(verdict_on("6.1.1", &["CFI_CLANG"], &file), Verdict::Loads);
}

#[test]
fn namespaces_of_modules_are_not_imported() {
    let file = ModuleFile::named("m").info("import_ns", "module:kvm");
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
}

#[test]
fn extended_versions_count_since_linux_6_14() {
    let mut file = ModuleFile::named("m").needs("printk", 1);
    file.extended = Some((vec![0xaaaa, 2], b"module_layout\0printk\0".to_vec()));
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads, "the basic table is right");
    assert_eq!(verdict_on("6.14.1", &[], &file), Verdict::Refused, "the extended one is not");
    file.extended = Some((vec![0xaaaa, 1], b"module_layout\0printk\0".to_vec()));
    file.versions = None;
    assert_eq!(verdict_on("6.14.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Refused);
    file.extended = Some((vec![0xaaaa, 1], b"module_layout\0".to_vec()));
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
}

#[test]
fn exports_without_versions_are_refused() {
    let mut file = ModuleFile::named("m").exports("mine", 1);
    assert_eq!(findings(&kernel(&[], ""), &file.build()), [""; 0]);
    file.no_crcs = true;
    assert_eq!(
        findings(&kernel(&[], ""), &file.build()),
        ["refused SymbolVersion: no versions for exported symbols: the kernel refuses it"]
    );
    assert_eq!(
        findings(&kernel(&["MODULE_FORCE_LOAD"], ""), &file.build()),
        [
            "loads SymbolVersion: no versions for exported symbols: the kernel skips the check and taints itself \
             (CONFIG_MODULE_FORCE_LOAD)"
        ]
    );
}

#[test]
fn headers_of_another_build_prove_nothing() {
    let mut facts = kernel(&[], PRINTK);
    let own = |layout: u32| {
        let value = [("module_layout".to_owned(), layout)].into();
        Some(Known { value, source: FactSource::InTreeModule("ext4".to_owned()) })
    };
    let file = ModuleFile::named("m").needs("printk", 1).build();
    facts.beyond_headers.symbol_versions = own(0xaaaa);
    assert_eq!(findings(&facts, &file), [""; 0]);
    facts.beyond_headers.symbol_versions = own(0xbbbb);
    assert_eq!(
        findings(&facts, &file),
        [
            "refused SymbolVersion: disagrees about version of symbol module_layout, the kernel's structure of modules: \
             found 0x0000aaaa, wanted 0x0000bbbb",
            "unknown SymbolVersion: the header set belongs to another build of the kernel: its version of module_layout \
             differs from that in the kernel's own ext4: found 0x0000aaaa, wanted 0x0000bbbb"
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
fn exports_have_flags_since_linux_7_2() {
    let mut file = ModuleFile::named("m").exports("mine", 1);
    assert_eq!(verdict_on("6.12.1", &[], &file), Verdict::Loads);
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Refused);
    file.flags = Some("__kflagstab");
    assert_eq!(verdict_on("7.2.1", &[], &file), Verdict::Loads);
}

#[test]
fn overlapping_relocations_are_reported() {
    let facts = kernel(&[], PRINTK);
    // The upper half of an address in the kernel is not zero.
    let file = relocated(&[0; 16], &[rela(0, 1, 1), rela(4, 2, 1)]).needs("printk", 1);
    let sentence = "refused Relocation: invalid relocation target, existing value is nonzero for type 2";
    assert_eq!(findings(&facts, &file.build()), [sentence]);
    let file = relocated(&[0; 16], &[rela(0, 2, 1), rela(2, 2, 1)]).needs("printk", 1);
    assert_eq!(run(&facts, &[], &[file.payload()]).verdict, Verdict::Unknown);
}

#[test]
fn relocation_sections_apply_to_the_section_they_name() {
    let mut good = ModuleFile::named("m");
    good.more.push(("__param", PROGBITS, ALLOC, "", vec![0; 8]));
    good.more.push((".rela__param", RELA, 0, "__param", rela(0, 2, 0)));
    assert_eq!(findings(&kernel(&[], ""), &good.build()), [""; 0]);
    let mut code = relocated(&[0; 8], &[rela(0, 2, 0)]);
    code.more.last_mut().unwrap().1 = PROGBITS;
    assert_eq!(findings(&kernel(&[], ""), &code.build()), [""; 0], "the kernel tolerates it in code");
    let sentence = "unknown Relocation: the relocations of this section are missing, are incomplete, or belong to another section";
    for change in 0..3 {
        let mut file = good.clone();
        let table = file.more.last_mut().unwrap();
        match change {
            0 => table.1 = PROGBITS,
            1 => table.3 = ".modinfo",
            _ => table.4.truncate(23),
        }
        assert_eq!(findings(&kernel(&[], ""), &file.build()), [sentence]);
    }
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

/// Number of the first section of a type.
fn section_of_type(file: &[u8], kind: u8) -> usize {
    (1..32).find(|&index| file[section_header(file, index) + SH_TYPE] == kind).unwrap()
}

fn field(file: &[u8], section: usize, offset: usize) -> usize {
    usize::try_from(u64::from_le_bytes(
        file[section_header(file, section) + offset..][..8].try_into().unwrap(),
    ))
    .unwrap()
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
fn livepatch_relocations_name_their_object() {
    let mut file = ModuleFile::named("m");
    file.more.push((".text", PROGBITS, ALLOC | EXEC, "", vec![0; 8]));
    for (name, verdict) in [(".rela.text", Verdict::Refused), (".klp.rela.vmlinux..text", Verdict::Loads)] {
        let mut file = file.clone();
        file.more.push((name, RELA, 0x0010_0000, ".text", Vec::new()));
        assert_eq!(verdict_on("6.1.1", &["LIVEPATCH"], &file), verdict, "{name}");
        assert_eq!(verdict_on("6.1.1", &[], &file), Verdict::Loads, "{name}");
    }
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

#[test]
fn a_relocation_names_a_symbol_of_the_table() {
    let facts = kernel(&[], "");
    let got = |symbol| findings(&facts, &relocated(&[0; 8], &[rela(0, 2, symbol)]).build());
    assert_eq!(got(0), [""; 0]);
    assert_eq!(
        got(1),
        [
            "unknown Relocation: a relocation of type 2 refers to a symbol that does not exist, and the loader does not check that"
        ]
    );
    assert_eq!(
        got(1 << 20),
        [
            "refused Relocation: a relocation of type 2 refers to a symbol far beyond the table: the loader faults"
        ]
    );
    assert_eq!(arm64(relocated(&[0; 8], &[rela(0, 257, 1)])).verdict, Verdict::Unknown);
}

#[test]
fn a_symbol_far_from_its_section_overflows() {
    let mut file = relocated(&[0; 8], &[rela(0, 11, 1)]);
    file.defined.push("local");
    let mut arm_file = relocated(&[0; 8], &[rela(0, 275, 1)]);
    arm_file.defined.push("local");
    arm_file.machine = 183;
    for (value, verdict) in [(0_u64, Verdict::Loads), (1 << 20, Verdict::Loads), (1 << 40, Verdict::Refused)]
    {
        let check = |facts: &KernelFacts, file: &ModuleFile| {
            let file =
                file.clone().info("vermagic", &format!("{} ", facts.expected_vermagic()).replace("  ", " "));
            let mut bytes = file.build();
            let symbols = field(&bytes, section_of_type(&bytes, 2), SH_OFFSET);
            patch(&mut bytes, symbols + 24 + 8, &value.to_le_bytes());
            let payload = PayloadModule { path: "m.ko".to_owned(), module: Module::parse(&bytes[..]) };
            run(facts, &[], &[payload])
        };
        let report = check(&kernel(&[], ""), &file);
        assert_eq!(report.verdict, verdict, "{value:#x}: {}", lines(&report));
        let mut facts = kernel(&[], "");
        facts.arch = crate::Architecture::Arm64;
        let report = check(&facts, &arm_file);
        let is_refused = report.modules[0].findings.iter().any(|finding| finding.rule == Rule::Relocation);
        assert_eq!(is_refused, verdict == Verdict::Refused, "{value:#x}: {}", lines(&report));
    }
}

#[test]
fn short_distances_on_arm64_depend_on_the_symbol() {
    let verdict = |kind, symbol, local: bool| {
        let mut file = relocated(&[0; 8], &[rela(0, kind, symbol)]);
        file.defined = if local { vec!["other_section"] } else { Vec::new() };
        arm64(file).verdict
    };
    assert_eq!(verdict(261, 0, false), Verdict::Refused, "the null symbol is 0");
    assert_eq!(verdict(257, 0, false), Verdict::Loads);
    assert_eq!(verdict(261, 1, true), Verdict::Loads);
    assert_eq!(verdict(262, 1, true), Verdict::Unknown, "16 bits");
}

#[test]
fn relocations_overlap_in_any_order() {
    let facts = kernel(&[], PRINTK);
    let file = |offsets: [u64; 3]| relocated(&[0; 16], &offsets.map(|at| rela(at, 2, 1))).needs("printk", 1);
    assert_eq!(run(&facts, &[], &[file([8, 0, 4]).payload()]).verdict, Verdict::Loads);
    assert_eq!(run(&facts, &[], &[file([0, 8, 2]).payload()]).verdict, Verdict::Unknown);
    let mut twice = file([0, 4, 8]);
    twice.more.push((".rela.text", RELA, 0, ".text", rela(12, 2, 1)));
    assert_eq!(run(&facts, &[], &[twice.payload()]).verdict, Verdict::Unknown);
}

#[test]
fn a_static_call_belongs_to_a_static_call() {
    let facts = kernel(&[], PRINTK);
    let mut file = ModuleFile::named("m").needs("printk", 1);
    file.more.push((".static_call_sites", PROGBITS, ALLOC | WRITE, "", vec![0; 8]));
    let calls = |offset| {
        let mut file = file.clone();
        file.more.push((".rela.static_call_sites", RELA, 0, ".static_call_sites", rela(offset, 2, 1)));
        findings(&facts, &file.build())
    };
    assert_eq!(calls(0), [""; 0]);
    assert_eq!(
        calls(4),
        ["unknown Relocation: a static call refers to a kernel symbol that is no static call"]
    );
}

#[test]
fn the_loader_for_arm64_trusts_the_targets_of_relocations() {
    let mut facts = kernel(&["ARM64_MODULE_PLTS", "KALLSYMS", "SYSFS"], PRINTK);
    facts.arch = crate::Architecture::Arm64;
    facts.release = "6.12.117".parse().unwrap();
    let check = |file: &ModuleFile, change: &dyn Fn(&mut Vec<u8>)| {
        let mut file =
            file.clone().info("vermagic", &facts.expected_vermagic().to_string()).needs("printk", 1);
        file.machine = 183;
        for name in [".plt", ".init.plt"] {
            file.more.push((name, PROGBITS, ALLOC | EXEC, "", vec![0]));
        }
        let mut bytes = file.build();
        change(&mut bytes);
        let payload = PayloadModule { path: "m.ko".to_owned(), module: Module::parse(&bytes[..]) };
        run(&facts, &[], &[payload])
    };
    let call = relocated(&[0; 8], &[rela(0, 283, 1)]);
    assert_eq!(check(&call, &|_| {}).verdict, Verdict::Loads);
    let mut data = call.clone();
    data.more[0].2 = ALLOC;
    assert_eq!(check(&data, &|_| {}).verdict, Verdict::Unknown, "no jump is reserved");
    let mut twice = call.clone();
    twice.more.push((".plt", PROGBITS, ALLOC, "", Vec::new()));
    assert_eq!(check(&twice, &|_| {}).verdict, Verdict::Refused, "the loader enlarges .plt");
    let report = check(&call, &|bytes| {
        let table = section_of_type(bytes, 4);
        let at = section_header(bytes, table) + 44;
        patch(bytes, at, &u32::MAX.to_le_bytes());
    });
    assert_eq!(report.verdict, Verdict::Refused, "{}", lines(&report));
}

#[test]
fn per_cpu_data_that_is_not_loaded_has_no_address() {
    let mut file = relocated(&[0; 8], &[rela(0, 11, 1)]);
    file.more.insert(0, (".data..percpu", PROGBITS, WRITE, "", vec![0; 8]));
    file.defined.push("variable");
    let mut bytes = file.build();
    let section = (1..32).find(|&index| field(&bytes, index, 8) == 1).unwrap();
    let symbols = field(&bytes, section_of_type(&bytes, 2), SH_OFFSET);
    patch(&mut bytes, symbols + 24 + 6, &[u8::try_from(section).unwrap(), 0]);
    assert_eq!(
        findings(&kernel(&[], ""), &bytes),
        ["refused Relocation: overflow in relocation type 11: likely not compiled with -mcmodel=kernel"]
    );
}
