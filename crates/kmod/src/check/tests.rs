mod licenses;
mod loader;
mod signatures;
mod unproven;

use std::fmt::Write;

use super::*;
use crate::{
    BtfBase, FactSource, InTree, KernelFacts, Known, Module, NeededTable, Signature, SymbolTable,
    testing::{self, ModuleFile, kernel, patch, section_header},
};

const PRINTK: &str = "0x00000001\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";

fn needed(image: &str, table: &str) -> NeededTable {
    NeededTable { image: image.to_owned(), symbols: SymbolTable::parse(table).unwrap(), proprietary: None }
}

fn run(kernel: &KernelFacts, needs: &[NeededTable], modules: &[PayloadModule]) -> CheckReport {
    check(&CheckRequest { kernel, needs, modules, required: &[], files: None })
}

/// Formats a report as text, with verdicts, rules, messages and remedies.
fn lines(report: &CheckReport) -> String {
    let mut text = format!("{}\n", report.verdict);
    let mut add = |indent: &str, finding: &Finding| {
        writeln!(text, "{indent}{} {:?}: {finding} -> {}", finding.verdict, finding.rule, finding.remedy)
            .unwrap();
    };
    report.findings.iter().for_each(|finding| add("", finding));
    for module in &report.modules {
        for finding in &module.findings {
            add(&format!("{} ({}): ", module.name, module.verdict), finding);
        }
    }
    text
}

#[test]
fn a_module_of_this_kernel_loads() {
    let modules = [ModuleFile::named("m").needs("printk", 1).payload()];
    let report = run(&kernel(&[], PRINTK), &[], &modules);
    assert_eq!((report.verdict, report.modules[0].findings.len()), (Verdict::Loads, 0));
    assert_eq!(report.load_order, ["m"]);
}

#[test]
fn versions_of_the_kernel_that_differ_are_refused() {
    let mut file = ModuleFile::named("m").needs("printk", 2);
    file.versions.as_mut().unwrap()[0].1 = 0xbbbb;
    insta::assert_snapshot!(lines(&run(&kernel(&[], PRINTK), &[], &[file.payload()])));
}

#[test]
fn versions_of_a_needed_image_and_of_the_payload_that_differ_are_refused() {
    let ofed = "0x00000005\tib_register_peer_memory_client\t/build/ofa_kernel/drivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let modules = [
        ModuleFile::named("nvidia").exports("nvidia_p2p_get_pages", 7).payload(),
        ModuleFile::named("nvidia_peermem")
            .needs("ib_register_peer_memory_client", 4)
            .needs("nvidia_p2p_get_pages", 8)
            .payload(),
    ];
    insta::assert_snapshot!(lines(&run(&kernel(&[], ""), &[needed("mofed", ofed)], &modules)));
}

#[test]
fn an_undefined_symbol_is_refused_unless_it_is_weak() {
    let mut file = ModuleFile::named("m").needs("pci_resize_everything", 1);
    file.undefined.push(("optional", true));
    insta::assert_snapshot!(lines(&run(&kernel(&[], ""), &[], &[file.payload()])));
}

#[test]
fn exports_whose_names_were_stripped_may_be_the_ones_that_a_module_needs() {
    let mut stripped = ModuleFile::named("acme").exports("acme_open", 1).build();
    let symbol = b"__ksymtab_acme_open";
    let at = stripped.windows(symbol.len()).position(|text| text == symbol).unwrap();
    patch(&mut stripped, at, b"x");
    let acme = PayloadModule { path: "lib/acme.ko".into(), module: Module::parse(&stripped[..]) };
    let user = ModuleFile::named("user").needs("acme_open", 1).payload();
    let sentence = "undefined-symbol]: nothing is known to export symbol acme_open, and the names of the exports of acme were \
                    stripped";
    for table in ["", "0x00000001\tacme_open\tdrivers/acme\tEXPORT_SYMBOL\t\n"] {
        let report = run(&kernel(&[], table), &[], &[acme.clone(), user.clone()]);
        assert_eq!(report.verdict, Verdict::Unknown);
        assert!(report.to_string().contains(sentence), "{report}");
    }
    assert_eq!(run(&kernel(&[], ""), &[], &[user]).verdict, Verdict::Refused);
}

#[test]
fn a_weak_symbol_in_another_version_is_refused() {
    let mut file = ModuleFile::named("m").needs("printk", 2);
    file.undefined[0].1 = true;
    assert_eq!(run(&kernel(&[], PRINTK), &[], &[file.payload()]).verdict, Verdict::Refused);
}

#[test]
fn replaced_modules_are_not_taken_from_the_kernel() {
    let in_tree = "0x00000001\told_verb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n\
                   0x00000001\tib_verb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let user = ModuleFile::named("peer").needs("old_verb", 1).needs("ib_verb", 2).payload();
    let plain = run(&kernel(&[], in_tree), &[], std::slice::from_ref(&user));
    assert_eq!(plain.modules[0].findings.len(), 1, "only the version of ib_verb differs");
    let ofed = [needed("mofed", "0x00000002\tib_verb\text/ib_core\tEXPORT_SYMBOL\t\n")];
    insta::assert_snapshot!(lines(&run(&kernel(&[], in_tree), &ofed, &[user])));
}

#[test]
fn without_a_symbol_table_it_is_unknown() {
    let mut facts = kernel(&[], "");
    facts.symbols = None;
    insta::assert_snapshot!(lines(&run(&facts, &[], &[ModuleFile::named("m").needs("printk", 1).payload()])));
}

#[test]
fn another_vermagic_is_refused() {
    let release = ModuleFile::named("release").info("vermagic", "5.0.1 SMP preempt mod_unload modversions ");
    let flag = ModuleFile::named("flag").info("vermagic", "6.1.0-9-amd64 SMP mod_unload modversions ");
    let mut bare = ModuleFile::named("bare").info("vermagic", "5.0.1 SMP preempt mod_unload modversions ");
    bare.versions = None;
    let modules = [release, flag, bare].map(|file| file.payload());
    insta::assert_snapshot!(lines(&run(&kernel(&[], ""), &[], &modules)));
}

#[test]
fn extended_versions_alone_do_not_excuse_another_release() {
    let mut file =
        ModuleFile::named("m").info("vermagic", "6.1.0-8-amd64 SMP preempt mod_unload modversions ");
    file.extended = Some((vec![0xaaaa], b"module_layout\0".to_vec()));
    let verdict = |file: &ModuleFile| run(&kernel(&[], ""), &[], &[file.payload()]).verdict;
    assert_eq!(verdict(&file), Verdict::Loads);
    file.versions = None;
    assert_eq!(verdict(&file), Verdict::Refused);
}

#[test]
fn modules_that_need_a_forced_load_are_refused() {
    let mut file = ModuleFile::named("m");
    file.versions = None;
    file.info.retain(|(key, _)| *key != "vermagic");
    let modules = [file.payload()];
    assert_eq!(run(&kernel(&[], ""), &[], &modules).verdict, Verdict::Refused);
    let mut forces = kernel(&["MODULE_FORCE_LOAD"], "");
    assert_eq!(run(&forces, &[], &modules).verdict, Verdict::Unknown, "the size of struct module is unknown");
    forces.beyond_headers.module_size = Some(known(896));
    let report = run(&forces, &[], &modules);
    assert_eq!((report.verdict, report.unproven()), (Verdict::Loads, 2), "{}", lines(&report));
}

#[test]
fn a_kernel_without_symbol_versions_compares_none() {
    let mut facts = kernel(&[], PRINTK);
    facts.config = crate::KernelConfig::parse("CONFIG_MODULES=y\nCONFIG_SMP=y\n").unwrap();
    let mut file = ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP ").needs("printk", 9);
    file.versions = None;
    // Without symbol versions, only a source beyond the headers can confirm the size of `struct module`.
    assert_eq!(run(&facts, &[], &[file.payload()]).verdict, Verdict::Unknown);
    facts.beyond_headers.module_size = Some(known(896));
    let report = run(&facts, &[], &[file.payload()]);
    assert_eq!((report.verdict, report.unproven()), (Verdict::Loads, 1));
}

#[test]
fn a_missing_version_is_refused_by_some_kernels() {
    let mut file = ModuleFile::named("m").needs("printk", 1);
    file.versions.as_mut().unwrap().pop();
    let report = run(&kernel(&[], PRINTK), &[], &[file.payload()]);
    assert_eq!((report.verdict, report.modules[0].findings.len()), (Verdict::Unknown, 1));
    let asm = "0x00000000\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";
    let report = run(&kernel(&[], asm), &[], &[file.payload()]);
    assert_eq!((report.verdict, report.unproven()), (Verdict::Loads, 1), "{}", lines(&report));
    let mut debian = kernel(&[], PRINTK);
    let builder = "debian-kernel@lists.debian.org".to_owned();
    debian.beyond_headers.builder = Some(Known { value: builder, source: FactSource::KernelImage });
    assert_eq!(run(&debian, &[], &[file.payload()]).verdict, Verdict::Refused);
}

#[test]
fn gpl_symbols_are_for_gpl_modules_and_the_taint_is_inherited() {
    let gpl = "0x00000001\tgpl_only\tvmlinux\tEXPORT_SYMBOL_GPL\t\n";
    let modules = [
        ModuleFile::named("closed").info("license", "NVIDIA").exports("closed_api", 1).payload(),
        ModuleFile::named("direct").info("license", "NVIDIA").needs("gpl_only", 1).payload(),
        ModuleFile::named("glue").needs("closed_api", 1).exports("glue_api", 1).payload(),
        ModuleFile::named("open").needs("glue_api", 1).needs("gpl_only", 1).payload(),
    ];
    insta::assert_snapshot!(lines(&run(&kernel(&[], gpl), &[], &modules)));
    let mut old = kernel(&[], gpl);
    old.release = "5.4.0-1".parse().unwrap();
    let report = run(&old, &[], &modules);
    assert_eq!(report.modules.iter().map(|m| m.verdict).filter(|v| *v == Verdict::Refused).count(), 1);
}

#[test]
fn namespaces_must_be_imported() {
    let table = "0x00000001\tcxl_f\tvmlinux\tEXPORT_SYMBOL_GPL\tCXL\n\
                 0x00000001\tonly_f\tvmlinux\tEXPORT_SYMBOL_GPL\tmodule:kvm-intel,nv*\n";
    let file = |name| ModuleFile::named(name).needs("cxl_f", 1);
    let verdict =
        |file: ModuleFile, options: &[&str]| run(&kernel(options, table), &[], &[file.payload()]).verdict;
    assert_eq!(verdict(file("m"), &[]), Verdict::Refused);
    assert_eq!(verdict(file("m"), &["MODULE_ALLOW_MISSING_NAMESPACE_IMPORTS"]), Verdict::Loads);
    assert_eq!(verdict(file("m").info("import_ns", "CXL"), &[]), Verdict::Loads);
    // Before Linux 6.16 a namespace of modules is like any other.
    let of_modules = |release: &str, name, options: &[&str], import: &str| {
        let mut facts = kernel(options, table);
        facts.release = release.parse().unwrap();
        let file = ModuleFile::named(name).needs("only_f", 1).info("import_ns", import);
        let magic = format!("{} ", facts.expected_vermagic());
        run(&facts, &[], &[file.info("vermagic", &magic).payload()]).verdict
    };
    let (old, new) = ("6.12.1", "6.16.1");
    assert_eq!(of_modules(new, "kvm_intel", &[], "CXL"), Verdict::Loads);
    assert_eq!(of_modules(new, "nvidia", &[], "CXL"), Verdict::Loads);
    assert_eq!(of_modules(new, "kvm", &[], "CXL"), Verdict::Refused);
    assert_eq!(of_modules(new, "kvm", &["MODULE_ALLOW_MISSING_NAMESPACE_IMPORTS"], "CXL"), Verdict::Loads);
    assert_eq!(of_modules(old, "nvidia", &[], "CXL"), Verdict::Refused);
    assert_eq!(of_modules(old, "kvm", &[], "module:kvm-intel,nv*"), Verdict::Loads);
}

#[test]
fn an_export_of_the_kernel_itself_is_taken() {
    let report = run(&kernel(&[], PRINTK), &[], &[ModuleFile::named("m").exports("printk", 1).payload()]);
    assert_eq!(report.modules[0].findings[0].rule, Rule::DuplicateExport);
    let in_tree = "0x00000001\tprintk\tdrivers/m\tEXPORT_SYMBOL\t\n";
    let report = run(&kernel(&[], in_tree), &[], &[ModuleFile::named("m").exports("printk", 1).payload()]);
    assert_eq!(report.verdict, Verdict::Loads);
}

#[test]
fn dependents_of_a_refused_module_are_refused() {
    let mut modules = vec![
        ModuleFile::named("a_user").needs("b_f", 1).payload(),
        ModuleFile::named("b").needs("c_f", 1).exports("b_f", 1).payload(),
        ModuleFile::named("c").needs("nobody", 1).exports("c_f", 1).payload(),
    ];
    let report = run(&kernel(&[], ""), &[], &modules);
    assert_eq!(report.load_order, ["c", "b", "a_user"]);
    insta::assert_snapshot!(lines(&report));
    modules[2] = ModuleFile::named("c").needs("b_f", 1).exports("c_f", 1).payload();
    insta::assert_snapshot!("circle", lines(&run(&kernel(&[], ""), &[], &modules)));
}

#[test]
fn missing_and_unreadable_modules_are_reported() {
    let kernel = kernel(&[], "");
    let broken = PayloadModule { path: "lib/nvidia-drm.ko".into(), module: Err(crate::elf::no_symbols()) };
    let mut twin = ModuleFile::named("m").payload();
    twin.path = "lib/updates/m.ko".into();
    let modules = [ModuleFile::named("m").payload(), broken, twin];
    let required = ["nvidia-drm", "nvidia-uvm", "m"].map(str::to_owned);
    let report = check(&CheckRequest {
        kernel: &kernel,
        needs: &[],
        modules: &modules,
        required: &required,
        files: None,
    });
    insta::assert_snapshot!(lines(&report));
}

#[test]
fn another_machine_is_refused() {
    let mut file = ModuleFile::named("m");
    file.machine = 183;
    let report = run(&kernel(&[], ""), &[], &[file.payload()]);
    assert_eq!(
        report.modules[0].findings[0].to_string(),
        "the object is for another processor: found aarch64, wanted x86_64"
    );
}

#[test]
fn the_report_is_json_with_stable_names() {
    let modules = [ModuleFile::named("m").needs("printk", 2).payload()];
    insta::assert_snapshot!(serde_json::to_string_pretty(&run(&kernel(&[], PRINTK), &[], &modules)).unwrap());
}

/// Checks one module file on a kernel; returns verdict, rule and message of each finding.
fn findings(facts: &KernelFacts, file: &[u8]) -> Vec<String> {
    let modules = [PayloadModule { path: "lib/m.ko".into(), module: Module::parse(file) }];
    let report = run(facts, &[], &modules);
    report.modules[0]
        .findings
        .iter()
        .map(|finding| {
            assert!(!finding.remedy.is_empty(), "{finding}");
            format!("{} {:?}: {finding}", finding.verdict, finding.rule)
        })
        .collect()
}

fn known<T>(value: T) -> Known<T> {
    Known { value, source: FactSource::InTreeModule("ext4".to_owned()) }
}

#[test]
fn a_structure_of_another_size_is_refused_where_the_kernel_compares() {
    let mut facts = kernel(&[], "");
    facts.beyond_headers.module_size = Some(known(896));
    let mut file = ModuleFile::named("m");
    assert_eq!(findings(&facts, &file.build()), [""; 0]);
    file.size = 960;
    assert_eq!(findings(&facts, &file.build()), [""; 0], "the version of module_layout is the kernel's");
    file.size = 832;
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "unknown ModuleSize: struct module differs in size from the kernel's, according to the kernel's own ext4; before \
          Linux 6.4 the kernel does not compare the sizes, and misreads the structure: found 832 bytes, wanted 896 bytes"
        ]
    );
    facts.release = "6.12.115+deb12-amd64".parse().unwrap();
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "refused ModuleSize: struct module differs in size from the kernel's, according to the kernel's own ext4: found \
          832 bytes, wanted 896 bytes"
        ]
    );
}

#[test]
fn without_a_source_the_version_of_module_layout_speaks_for_the_size() {
    let facts = kernel(&[], "");
    assert_eq!(findings(&facts, &ModuleFile::named("m").build()), [""; 0]);
    let mut file = ModuleFile::named("m");
    file.versions = Some(Vec::new());
    assert_eq!(
        findings(&facts, &file.build()),
        [
            "unknown ModuleSize: no source has the size of the kernel's struct module, and no symbol version \
             covers it: found 896 bytes",
            "unknown SymbolVersion: no symbol version for module_layout, the kernel's structure of modules: Debian's \
             kernels refuse it, others warn and load it: wanted 0x0000aaaa"
        ]
    );
}

#[test]
fn duplicate_sections_are_refused_since_linux_6_4() {
    let mut facts = kernel(&[], "");
    let mut file = ModuleFile::named("m");
    file.twice = true;
    let sentence = "Elf: the module has more than one section .modinfo: wanted one";
    assert_eq!(findings(&facts, &file.build()), [format!("loads {sentence}")]);
    facts.release = "6.12.115+deb12-amd64".parse().unwrap();
    assert_eq!(findings(&facts, &file.build()), [format!("refused {sentence}")]);
}

#[test]
fn btf_type_ids_must_continue_after_the_kernels() {
    let mut file = ModuleFile::named("m");
    file.btf = Some(testing::btf::split());
    let (fits, mut other) = (file.build(), file.clone());
    other.btf = Some(b"no type information".to_vec());
    let other = other.build();
    let with = |options: &[&str], base: Option<BtfBase>| {
        let mut facts = kernel(options, "");
        facts.beyond_headers.btf_base = base.map(|value| Known { value, source: FactSource::Btf });
        facts
    };
    let base = testing::btf::BASE;
    let shifted = BtfBase { strings: base.strings - 100, ..base };
    let strict = ["DEBUG_INFO_BTF_MODULES"];
    let lax = ["DEBUG_INFO_BTF_MODULES", "MODULE_ALLOW_BTF_MISMATCH"];
    for facts in [with(&[], None), with(&lax, None), with(&lax, Some(base)), with(&strict, Some(base))] {
        assert_eq!(findings(&facts, &fits), [""; 0]);
    }
    assert_eq!(
        findings(&with(&strict, None), &fits),
        [
            "unknown Btf: no source has the kernel's own type information, which the module's type information continues"
        ]
    );
    let sentence = "Btf: the type information refers to names beyond its own strings and the kernel's";
    assert_eq!(findings(&with(&strict, Some(shifted)), &fits), [format!("refused {sentence}")]);
    assert_eq!(
        findings(&with(&lax, Some(shifted)), &fits),
        [format!("loads {sentence}: the kernel loads the module without its type information")]
    );
    assert_eq!(
        findings(&with(&strict, None), &other),
        ["refused Btf: the type information does not start with the magic number of BTF"]
    );
    let doubtful = BtfBase { strings: base.strings + 1, ..base };
    assert_eq!(
        findings(&with(&strict, Some(doubtful)), &fits),
        ["unknown Btf: the type information was built for another kernel image"]
    );
}

#[test]
fn the_kernels_own_vermagic_must_match_exactly() {
    let mut facts = kernel(&["RANDSTRUCT"], "");
    let exact = "6.1.0-9-amd64 SMP preempt mod_unload modversions RANDSTRUCT_abc";
    facts.beyond_headers.vermagic = Some(known(exact.to_owned()));
    let file = |hash: &str| {
        let magic = format!("6.1.0-9-amd64 SMP preempt mod_unload modversions RANDSTRUCT_{hash}");
        ModuleFile::named("m").info("vermagic", &magic).build()
    };
    assert_eq!(findings(&facts, &file("abc")), [""; 0]);
    assert_eq!(findings(&facts, &file("def")).len(), 1);
    facts.beyond_headers.vermagic = None;
    assert!(findings(&facts, &file("abc"))[0].starts_with("unknown Vermagic: "));
}

#[test]
fn a_system_map_proves_only_that_a_symbol_exists() {
    let mut facts = kernel(&[], "");
    facts.symbols = None;
    facts.beyond_headers.module_size = Some(known(896));
    facts.beyond_headers.exports =
        Some(Known { value: ["printk".to_owned()].into(), source: FactSource::SystemMap });
    let file = ModuleFile::named("m").needs("printk", 1).needs("of_a_module", 1).build();
    assert_eq!(
        findings(&facts, &file),
        [
            "unknown UndefinedSymbol: the header set has no Module.symvers to find the exporters of needed symbols (1)",
            "unknown SymbolVersion: no source has the versions of symbols of the kernel that the module needs: printk"
        ]
    );
    facts.config = crate::KernelConfig::parse("CONFIG_MODULES=y\nCONFIG_SMP=y\n").unwrap();
    let plain = ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP ").needs("printk", 1);
    let unproven = "loads SymbolVersion: CONFIG_MODVERSIONS is off, so the kernel also loads modules that were compiled with \
                    different structure layouts";
    assert_eq!(findings(&facts, &plain.build()), [unproven]);
    assert_eq!(
        findings(&facts, &plain.info("license", "NVIDIA").build()),
        [
            unproven,
            "unknown License: no source shows which of the symbols that the module needs are for GPL modules only (1)"
        ]
    );
}

#[test]
fn a_name_that_is_built_in_and_one_that_is_in_tree() {
    let mut facts = kernel(&[], "");
    facts.beyond_headers.in_tree = Some(Known {
        value: InTree {
            modules: [("m".to_owned(), "kernel/drivers/m.ko".to_owned())].into(),
            builtin: ["loop".to_owned()].into(),
        },
        source: FactSource::ModuleIndex,
    });
    let report = run(&facts, &[], &[ModuleFile::named("loop").payload(), ModuleFile::named("m").payload()]);
    assert_eq!(report.modules[1].about.shadows.as_deref(), Some("kernel/drivers/m.ko"));
    assert_eq!(report.modules[1].verdict, Verdict::Loads);
    let finding = &report.modules[0].findings[0];
    assert_eq!((finding.rule, finding.verdict), (Rule::BuiltIn, Verdict::Unknown));
    assert_eq!(
        finding.message,
        "6.1.0-9-amd64 has loop built in: modprobe does not load the module, and the kernel refuses the module if /sys/module/loop \
         exists"
    );
}

#[test]
fn the_report_describes_each_module() {
    let mut file = ModuleFile::named("nvidia").info("license", "NVIDIA").info("version", "550.1");
    for (key, value) in [
        ("srcversion", "ABC"),
        ("staging", "Y"),
        ("depends", "drm,i2c-core"),
        ("alias", "pci:v000010DEd*"),
        ("alias", "char-major-195-*"),
        ("firmware", "nvidia/550.1/gsp_tu10x.bin"),
        ("firmware", "nvidia/550.1/gsp_ga10x.bin"),
        ("firmware", "nvidia/*/other-?.bin"),
    ] {
        file.info.push((key, value.to_owned()));
    }
    let object = file.build();
    let signed =
        testing::signature::signed(&object, &testing::signature::message("Build key", &[0x6a, 1], 3));
    let facts = kernel(&["MODULE_SIG"], "");
    let payload = |bytes: &[u8]| [PayloadModule { path: "nvidia.ko".into(), module: Module::parse(bytes) }];
    let files = ["usr/lib/firmware/updates/nvidia/550.1/gsp_tu10x.bin.zst".to_owned()];
    let about = |bytes: &[u8], files| {
        let modules = payload(bytes);
        let request = CheckRequest { kernel: &facts, needs: &[], modules: &modules, required: &[], files };
        check(&request).modules[0].about.clone()
    };
    insta::assert_snapshot!(serde_json::to_string_pretty(&about(&signed, Some(&files))).unwrap());
    let unsigned = about(&object, None);
    let letters: String = unsigned.taints.iter().map(|taint| taint.letter()).collect();
    assert_eq!((letters.as_str(), unsigned.signed_by), ("POEC", None));
    assert_eq!((unsigned.firmware.len(), unsigned.missing_firmware.len()), (3, 0));
}
