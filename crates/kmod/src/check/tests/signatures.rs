use super::*;

#[test]
fn signatures_count_as_the_kernel_is_configured() {
    let object = ModuleFile::named("m").build();
    let good = testing::signature::signed(&object, &testing::signature::message("Build key", &[0x6a, 1], 1));
    let mut trailing_byte = good.clone();
    trailing_byte.extend(b"\n");
    let broken = testing::signature::signed(&object, b"no message");
    let mut kind = good.clone();
    let at = kind.len() - 28 - 12 + 2;
    kind[at] = 1;

    let ignores = kernel(&[], "");
    for file in [&object, &good, &trailing_byte, &broken, &kind] {
        assert_eq!(findings(&ignores, file), [""; 0]);
    }

    let knows = kernel(&["MODULE_SIG"], "");
    let taints = "the kernel loads it and taints itself, unless it is started with module.sig_enforce";
    assert_eq!(findings(&knows, &good), [""; 0]);
    assert_eq!(findings(&knows, &object), [""; 0]);
    assert_eq!(
        findings(&knows, &trailing_byte),
        [format!(
            "loads Signature: 1 byte follows the signature, so the kernel treats the module as unsigned: {taints}"
        )]
    );
    let fatal = "refused Signature: the signature is not a PKCS#7 message that the kernel accepts: the kernel refuses it, \
         whether or not it enforces signatures";
    assert_eq!(findings(&knows, &broken), [fatal]);
    assert_eq!(
        findings(&knows, &kind),
        [format!(
            "loads Signature: the signature is not in PKCS#7 form (ENOPKG): {taints}: found kind 1, wanted kind 2"
        )]
    );

    let enforces = kernel(&["MODULE_SIG", "MODULE_SIG_FORCE"], "");
    let rejects =
        "the kernel rejects it, because it enforces signatures, according to CONFIG_MODULE_SIG_FORCE";
    assert_eq!(
        findings(&enforces, &object),
        [format!("refused Signature: the module is not signed: {rejects}")]
    );
    assert_eq!(
        findings(&enforces, &good),
        ["unknown Signature: the signature is well-formed, and only the kernel's keys can tell whether it \
             is valid (signed by Build key)"]
    );
    assert_eq!(findings(&enforces, &broken), [fatal]);
    assert_eq!(
        findings(&enforces, &trailing_byte),
        [format!(
            "refused Signature: 1 byte follows the signature, so the kernel treats the module as unsigned: {rejects}"
        )]
    );

    let mut lenient = kernel(&["MODULE_SIG"], "");
    lenient.beyond_headers.enforces_signatures = Some(Known { value: false, source: FactSource::Host });
    assert_eq!(findings(&lenient, &object), [""; 0]);
    let trailing = "1 byte follows the signature, so the kernel treats the module as unsigned";
    assert_eq!(
        findings(&lenient, &trailing_byte),
        [format!("loads Signature: {trailing}: the kernel loads it and taints itself")]
    );
    assert!(matches!(Module::parse(&good[..]).unwrap().signature, Signature::By(_)));
}

#[test]
fn a_section_that_reaches_into_the_signature_is_outside() {
    let mut object = ModuleFile::named("m").build();
    let header = section_header(&object, 2);
    let length = object.len() as u64;
    patch(&mut object, header + testing::SH_OFFSET, &length.to_le_bytes());
    patch(&mut object, header + testing::SH_SIZE, &8_u64.to_le_bytes());
    let file = testing::signature::signed(&object, &testing::signature::message("k", &[1], 1));
    let error = Module::parse(&file[..]).unwrap_err();
    assert!(error.to_string().starts_with("section .modinfo lies outside the file: "), "{error}");
}

#[test]
fn kernels_before_5_4_refuse_without_a_message() {
    let finding = |release: &str, option: &str| {
        let mut facts = kernel(&["MODULE_SIG", option], "");
        facts.release = release.parse().unwrap();
        let magic = format!("{} ", facts.expected_vermagic());
        let report = run(&facts, &[], &[ModuleFile::named("m").info("vermagic", &magic).payload()]);
        let finding = report.modules[0].findings[0].clone();
        (finding.verdict, finding.errno, finding.message)
    };
    let message = |option: &str| {
        format!(
            "the module is not signed: the kernel rejects it, because it enforces signatures, according to CONFIG_{option}"
        )
    };
    let rhel = "4.18.0-553.66.1.el8_10";
    for (release, option, errno) in [
        (rhel, "MODULE_SIG_FORCE", None),
        (rhel, "LOCK_DOWN_MANDATORY", None),
        ("5.4.0", "MODULE_SIG_FORCE", Some("EKEYREJECTED")),
    ] {
        assert_eq!(finding(release, option), (Verdict::Refused, errno, message(option)), "{release}");
    }
}
