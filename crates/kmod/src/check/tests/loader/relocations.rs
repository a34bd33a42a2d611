//! Relocations, and the symbols that they refer to.

use super::*;

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
fn the_loader_relocates_the_symbol_table_and_its_names() {
    let mut file = relocated(&[0; 8], &[rela(0, 2, 0)]);
    file.defined.push("local");
    let file = file.build();
    let with_target = |kind| {
        let mut file = file.clone();
        let target = u32::try_from(section_of_type(&file, kind)).unwrap();
        let at = section_header(&file, section_of_type(&file, 4)) + 44;
        patch(&mut file, at, &target.to_le_bytes());
        findings(&kernel(&[], ""), &file)
    };
    let nonzero = "refused Relocation: invalid relocation target, existing value is nonzero for type 2";
    assert_eq!(with_target(3), [nonzero]);
    let changed =
        "unknown Relocation: a relocation of type 2 changes bytes that the loader has changed before";
    assert_eq!(with_target(2), [changed]);
    let mut file = ModuleFile::named("m");
    file.more.push((".rela.symtab", RELA, 0, ".symtab", rela(0, 257, 0)));
    assert_eq!(arm64(file).verdict, Verdict::Unknown, "later relocations use the changed symbols");
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
    for change in 0..4 {
        let mut file = good.clone();
        let table = file.more.last_mut().unwrap();
        match change {
            0 => table.1 = PROGBITS,
            1 => table.3 = ".modinfo",
            2 => table.4 = rela(0, 0, 0),
            _ => table.4.truncate(23),
        }
        assert_eq!(findings(&kernel(&[], ""), &file.build()), [sentence]);
    }
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
    // The loader enlarges the last .plt, and loads it whatever its flags are.
    for (first, last, expected) in
        [(ALLOC, ALLOC, Verdict::Refused), (ALLOC, 0, Verdict::Refused), (0, ALLOC, Verdict::Loads)]
    {
        let mut twice = call.clone();
        twice.more.push((".plt", PROGBITS, first, "", vec![0]));
        let report = check(&twice, &|bytes| {
            // .init.plt and the section names follow.
            let at = section_header(bytes, usize::from(bytes[60]) - 3) + 8;
            patch(bytes, at, &last.to_le_bytes());
        });
        assert_eq!(report.verdict, expected, "{first} {last}: {}", lines(&report));
    }
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
