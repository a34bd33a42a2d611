//! Warnings about protections that the kernel lacks, and advice for modules that agree with their headers.

use super::*;
use crate::{KernelConfig, VermagicHeaders};

const LOCKS_DOWN: [&str; 3] = ["MODULE_SIG", "SECURITY_LOCKDOWN_LSM", "LOCK_DOWN_IN_EFI_SECURE_BOOT"];

/// Kernel without symbol versions, and a module for it.
fn unversioned(options: &str) -> (KernelFacts, ModuleFile) {
    let mut facts = kernel(&[], PRINTK);
    let text = format!("CONFIG_MODULES=y\nCONFIG_SMP=y\n{options}");
    facts.config = KernelConfig::parse(&text).unwrap();
    facts.beyond_headers.module_size = Some(known(896));
    (facts, ModuleFile::named("m").info("vermagic", "6.1.0-9-amd64 SMP "))
}

fn remedies_of(facts: &KernelFacts, file: &ModuleFile) -> Vec<String> {
    run(facts, &[], &[file.payload()]).modules[0]
        .findings
        .iter()
        .map(|finding| finding.remedy.clone())
        .collect()
}

#[test]
fn type_information_of_both_sides_proves_that_a_module_fits() {
    let (mut facts, mut file) = unversioned("CONFIG_DEBUG_INFO_BTF_MODULES=y\n");
    file.btf = Some(testing::btf::split());
    facts.beyond_headers.btf_base = Some(Known { value: testing::btf::BASE, source: FactSource::Btf });
    let report = run(&facts, &[], &[file.payload()]);
    assert_eq!((report.verdict, report.unproven()), (Verdict::Loads, 0), "{}", lines(&report));
    file.btf = None;
    let report = run(&facts, &[], &[file.payload()]);
    assert_eq!((report.verdict, report.unproven()), (Verdict::Loads, 1), "{}", lines(&report));
    assert_eq!(report.short_summary(), "1 module: loads, unproven");
    assert!(report.to_string().contains("unproven[symbol-version]: "), "{report}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["modules"][0]["findings"][0]["unproven"], true);
}

#[test]
fn unproven_verdicts_can_be_denied() {
    let (facts, file) = unversioned("");
    let report = run(&facts, &[], &[file.payload()]).deny_unproven();
    assert_eq!((report.verdict, report.modules[0].verdict), (Verdict::Unknown, Verdict::Unknown));
    assert!(report.summary().starts_with("m: CONFIG_MODVERSIONS is off, so"), "{}", report.summary());
    let proven = run(&kernel(&[], ""), &[], &[ModuleFile::named("m").payload()]);
    assert_eq!(proven.clone().deny_unproven(), proven);
}

#[test]
fn under_secure_boot_an_unsigned_module_is_refused() {
    let facts = kernel(&LOCKS_DOWN, "");
    let object = ModuleFile::named("m").build();
    let by_hand = kernel(&LOCKS_DOWN[..2], "");
    assert_eq!(findings(&by_hand, &object), [""; 0], "only a boot parameter locks it down");
    let warning = "the kernel loads it and taints itself, but under Secure Boot it locks itself down and refuses the module";
    assert_eq!(findings(&facts, &object), [format!("loads Signature: the module is not signed: {warning}")]);
    let signed = |file: &ModuleFile| {
        let message = testing::signature::message("Build key", &[0x6a, 1], 1);
        testing::signature::signed(&file.build(), &message)
    };
    let by_key = signed(&ModuleFile::named("m"));
    assert_eq!(
        findings(&facts, &by_key),
        [format!("loads Signature: the kernel may lack the key of Build key: {warning}")]
    );
    assert_eq!(findings(&facts, &signed(&ModuleFile::named("m").info("intree", "Y"))), [""; 0]);
    let mut trusts = facts.clone();
    trusts.beyond_headers.trusted_keys.insert("6A:01".to_owned());
    assert_eq!(findings(&trusts, &by_key), [""; 0]);
    let mut open = facts;
    open.beyond_headers.enforces_signatures = Some(Known { value: false, source: FactSource::Host });
    assert_eq!(findings(&open, &object), [""; 0]);
    let ubuntu = kernel(&["MODULE_SIG", "SECURITY_LOCKDOWN_LSM", "LOCK_DOWN_IN_SECURE_BOOT"], "");
    assert_eq!(findings(&ubuntu, &object), [format!("loads Signature: the module is not signed: {warning}")]);
    let mut inactive = kernel(&LOCKS_DOWN, "");
    let options = "CONFIG_MODULES=y\nCONFIG_MODVERSIONS=y\nCONFIG_MODULE_SIG=y\nCONFIG_SECURITY_LOCKDOWN_LSM=y\n\
                   CONFIG_LOCK_DOWN_IN_EFI_SECURE_BOOT=y\nCONFIG_LSM=\"yama\"\n";
    inactive.config = KernelConfig::parse(options).unwrap();
    let file = ModuleFile::named("m").info("vermagic", &format!("{} ", inactive.expected_vermagic()));
    assert_eq!(findings(&inactive, &file.build()), [""; 0]);
}

#[test]
fn compressed_data_in_a_plain_file_is_named() {
    for (start, wanted) in [
        (&b"\xfd7zXZ\0..."[..], "refused Elf: the file is compressed with xz, which its name does not say"),
        (b"\x1f\x8b......", "refused Elf: the file is compressed with gzip, which its name does not say"),
        (
            b"\x28\xb5\x2f\xfd....",
            "refused Elf: the file is compressed with zstd, which its name does not say",
        ),
        (b"BZh.....", "refused Elf: the file is not an ELF object"),
    ] {
        assert_eq!(findings(&kernel(&[], ""), start), [wanted]);
    }
    assert!(Module::parse(&b"\xfd7zXZ\0..."[..]).unwrap_err().remedy().contains("xz -d"));
}

/// A module that agrees with the header set was built against it, so another build against it would not help.
#[test]
fn a_module_that_agrees_with_its_headers_needs_other_headers() {
    let other_headers = "install the headers of exactly this build of 6.1.0-9-amd64, and rebuild it";
    let mut facts = kernel(&[], PRINTK);
    let own = [("module_layout".to_owned(), 0xbbbb), ("printk".to_owned(), 2)].into();
    facts.beyond_headers.symbol_versions = Some(known(own));
    let file = ModuleFile::named("m").needs("printk", 1);
    let remedies = remedies_of(&facts, &file);
    assert_eq!(
        remedies.iter().filter(|remedy| remedy.starts_with(other_headers)).count(),
        2,
        "{remedies:#?}"
    );
    let mut older = file;
    older.versions.as_mut().unwrap()[0].1 = 0xcccc;
    assert!(remedies_of(&facts, &older).iter().all(|remedy| !remedy.starts_with(other_headers)));

    let mut facts = kernel(&[], "");
    facts.release = "6.12.1".parse().unwrap();
    facts.beyond_headers.module_size = Some(known(900));
    let file = ModuleFile::named("m").info("vermagic", "6.12.1 SMP preempt mod_unload modversions ");
    assert!(remedies_of(&facts, &file)[0].starts_with("install the headers of exactly this build of 6.12.1"));

    let mut facts = kernel(&[], "");
    facts.beyond_headers.vermagic =
        Some(known("6.1.0-9-amd64 SMP preempt mod_unload modversions vendor ".to_owned()));
    assert!(remedies_of(&facts, &ModuleFile::named("m"))[0].starts_with(other_headers));
}

#[test]
fn a_module_that_was_compiled_against_another_driver_is_advised_to_name_it() {
    let table = "0x00000001\tib_verb\tdrivers/infiniband/core/ib_core\tEXPORT_SYMBOL\t\n";
    let file = ModuleFile::named("peer").needs("ib_verb", 2);
    assert_eq!(
        remedies_of(&kernel(&[], table), &file),
        [
            "it was compiled against another ib_core: name the driver image that has it in `needs`, or rebuild without the \
             Module.symvers of that driver"
        ]
    );
    let older = file.info("vermagic", "6.1.0-8-amd64 SMP preempt mod_unload modversions ");
    assert_eq!(
        remedies_of(&kernel(&[], table), &older),
        ["rebuild it against the header set of 6.1.0-9-amd64"]
    );
}

#[test]
fn a_refusal_quotes_the_kernels_message() {
    let file = ModuleFile::named("m").needs("nobody", 1);
    let report = run(&kernel(&[], ""), &[], &[file.payload()]);
    let finding = &report.modules[0].findings[0];
    assert_eq!(
        (finding.kernel_message.as_deref(), finding.errno),
        (Some("Unknown symbol nobody (err -2)"), Some("ENOENT"))
    );
    assert_eq!(
        report.explain_hint("farrier check").as_deref(),
        Some("for more information: farrier check --explain undefined-symbol")
    );
    let accepted = run(&kernel(&[], ""), &[], &[ModuleFile::named("m").payload()]);
    assert_eq!(accepted.explain_hint("kmodcheck"), None);
}

#[test]
fn every_rule_is_explained() {
    use strum::VariantArray as _;
    for &rule in Rule::VARIANTS {
        let text = rule.explanation();
        assert!(text.len() > 150 && !text.contains("\n#"), "{rule}: {text:?}");
        assert_eq!(rule.as_str().parse(), Ok(rule));
        assert_eq!(serde_json::to_value(rule).unwrap(), rule.as_str());
    }
    let error = "vermagick".parse::<Rule>().unwrap_err().to_string();
    assert!(error.starts_with("\"vermagick\" is not a rule (elf, signature, "), "{error}");
}

#[test]
fn a_header_set_is_read_without_a_release_or_for_one() {
    let text = |name: &str| {
        Ok(Some(str::to_owned(match name {
            "include/generated/utsrelease.h" => "#define UTS_RELEASE \"6.1.0-9-arm64\"\n",
            "include/config/kernel.release" => "6.1.20\n",
            ".config" => "CONFIG_ARM64=y\nCONFIG_MODULES=y\n",
            "Module.symvers" => PRINTK,
            "include/linux/vermagic.h" | "arch/arm64/include/asm/vermagic.h" => "// text\n",
            _ => return Ok(None),
        })))
    };
    let facts = KernelFacts::of_headers(None, text, text).unwrap();
    assert_eq!((facts.release.as_str(), facts.arch), ("6.1.0-9-arm64", crate::Architecture::Arm64));
    assert!(facts.symbols.is_some());
    let headers = VermagicHeaders {
        vermagic: "// text\n".into(),
        arch: "// text\n".into(),
        layout_seed: String::new(),
    };
    assert_eq!(facts.vermagic_headers, Some(headers));
    let of = |release: &str, arch| {
        let release = release.parse().unwrap();
        KernelFacts::of_headers(Some((&release, arch)), text, text).unwrap_err().to_string()
    };
    assert!(of("6.1.0-8-arm64", crate::Architecture::Arm64).contains("\"6.1.0-9-arm64\""));
    assert!(of("6.1.0-9-arm64", crate::Architecture::Amd64).ends_with("another architecture"));
}
