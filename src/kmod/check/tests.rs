use std::fmt::Write;

use super::*;
use crate::kmod::testing::{ModuleFile, kernel};

const PRINTK: &str = "0x00000001\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";

fn needed(image: &str, table: &str) -> NeededTable {
    NeededTable { image: image.to_owned(), symbols: SymbolTable::parse(table).unwrap() }
}

fn run(kernel: &KernelFacts, needs: &[NeededTable], modules: &[PayloadModule]) -> CheckReport {
    check(&CheckRequest { kernel, needs, modules, required: &[], files: None })
}

/// A report as a short text: verdicts, rules and whole sentences.
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
fn a_symbol_that_nobody_exports_is_refused_unless_it_is_weak() {
    let mut file = ModuleFile::named("m").needs("pci_resize_everything", 1);
    file.undefined.push(("optional", true));
    insta::assert_snapshot!(lines(&run(&kernel(&[], ""), &[], &[file.payload()])));
}

#[test]
fn a_weak_symbol_in_another_version_is_refused() {
    let mut file = ModuleFile::named("m").needs("printk", 2);
    file.undefined[0].1 = true;
    assert_eq!(run(&kernel(&[], PRINTK), &[], &[file.payload()]).verdict, Verdict::Refused);
}

#[test]
fn what_the_image_replaces_is_not_taken_from_the_kernel() {
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
fn what_only_force_would_load_is_not_fine() {
    let mut file = ModuleFile::named("m");
    file.versions = None;
    file.info.retain(|(key, _)| *key != "vermagic");
    let modules = [file.payload()];
    assert_eq!(run(&kernel(&[], ""), &[], &modules).verdict, Verdict::Refused);
    assert_eq!(run(&kernel(&["MODULE_FORCE_LOAD"], ""), &[], &modules).verdict, Verdict::Unknown);
}

#[test]
fn a_kernel_without_symbol_versions_compares_none() {
    let mut facts = kernel(&[], PRINTK);
    facts.config = crate::kmod::KernelConfig::parse("CONFIG_SMP=y\n").unwrap();
    let mut file = ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP ").needs("printk", 9);
    file.versions = None;
    assert_eq!(run(&facts, &[], &[file.payload()]).verdict, Verdict::Loads);
}

#[test]
fn a_missing_version_is_a_warning() {
    let mut file = ModuleFile::named("m").needs("printk", 1);
    file.versions.as_mut().unwrap().pop();
    let report = run(&kernel(&[], PRINTK), &[], &[file.payload()]);
    assert_eq!((report.verdict, report.modules[0].findings.len()), (Verdict::Loads, 1));
    let asm = "0x00000000\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n";
    assert!(run(&kernel(&[], asm), &[], &[file.payload()]).modules[0].findings.is_empty());
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
    assert_eq!(verdict(ModuleFile::named("kvm_intel").needs("only_f", 1), &[]), Verdict::Loads);
    assert_eq!(verdict(ModuleFile::named("nvidia").needs("only_f", 1), &[]), Verdict::Loads);
    assert_eq!(verdict(ModuleFile::named("kvm").needs("only_f", 1), &[]), Verdict::Refused);
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
fn what_needs_a_refused_module_is_refused() {
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
fn the_set_must_be_whole_and_readable() {
    let kernel = kernel(&[], "");
    let broken = PayloadModule { path: "lib/nvidia-drm.ko".into(), module: Err(ModuleError::NoSymbols) };
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
