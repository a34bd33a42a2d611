//! Tests of mistakes in a site's definition and in other definitions.

use super::*;

/// Definitions are stored in the registry and packed into bundles, and their mistakes appear in logs and status objects.
#[test]
fn passwords_in_addresses_are_refused_and_not_repeated() {
    let site = r#"apiVersion: farrier.dev/v1alpha1
kind: Site
metadata: {name: here}
spec:
  proxy: {http: "http://me:secret@proxy.example:3128", https: http://secret@proxy.example}
"#;
    let digest = "0".repeat(64);
    let url = format!("{{url: {{url: \"https://me:secret@h.example/x.tgz\", sha256: \"{digest}\"}}}}");
    let image = replaced(IMAGE, &[("{apt: {package: mstflint-dkms, suites: [sid]}}", &url)]);
    let suites = "suites: [bookworm, bookworm-security]";
    let family =
        replaced(FAMILY, &[(suites, &format!("{suites}, mirror: \"https://secret@h.example/debian\""))]);
    let told = mistakes(&[
        ("site.yaml", site),
        ("images/m.yaml", image.as_str()),
        ("kernels/a.yaml", family.as_str()),
    ]);
    assert!(!told.contains("secret") && told.contains("4 mistakes"), "{told}");
    for what in ["a proxy's address", "a download's address", "an archive's address"] {
        assert!(told.contains(what), "{told}");
    }
}

#[test]
fn what_anyone_published_is_signed_only_by_an_explicit_word_where_signatures_count() {
    let site = |signing: &str, policy: &str| {
        let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: here}\nspec:\n";
        format!(
            "{head}  imageSigning: {{key: {{file: k}}{signing}}}\n  policy: {{requireSigned: [{policy}]}}\n"
        )
    };
    for (signing, policy) in [
        ("", "p.pem"),
        (", existing: leave", "p.pem"),
        (", existing: sign", ""),
        (", existing: sign, trustRegistryWriters: true", "p.pem"),
    ] {
        load_files(&[("site.yaml", &site(signing, policy))]).unwrap();
    }
    let told = mistakes(&[("site.yaml", &site(", existing: sign", "p.pem"))]);
    assert!(told.contains("site.yaml:5:44: farrier would sign any image under a tag"), "{told}");
}

#[test]
fn numbers_are_read_and_what_is_none_is_told() {
    let site = |spec: &str| {
        let head = "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: here}\nspec:\n";
        format!("{head}  {spec}\n")
    };
    let load = |spec: &str| load_files(&[("site.yaml", &site(spec))]).unwrap().site;
    let limits = load("kernelLimits: {perNode: 8, within: 1h, distinct: 40}").kernel_limits;
    assert_eq!((limits.per_node.get(), limits.distinct.get()), (8, 40));
    let signed = load("policy: {requireSigned: {atLeast: 2, keys: [a.pem, b.pem]}}").policy.require_signed;
    assert_eq!((signed.at_least(), signed.keys().len()), (2, 2));
    assert_eq!(load("check: {unproven: deny}").check.unproven, farrier_core::site::UnprovenPolicy::Deny);
    let told = |spec: &str| mistakes(&[("site.yaml", &site(spec))]);
    for (spec, expected) in [
        ("kernelLimits: {perNode: many}", "site.yaml:5:27: expected a number, found \"many\""),
        ("kernelLimits: {perNode: 0}", "site.yaml:5:27: "),
        ("revoked: [{since: 2026-01-02T03:04:05Z}]", "site.yaml:5:13: set either `key` or `fingerprint`"),
        ("revoked: [{key: a.pem, since: yesterday}]", "site.yaml:5:"),
        ("policy: {requireSigned: {atLeast: 3, keys: [a.pem]}}", "3 keys must have signed, but 1 are named"),
    ] {
        assert!(told(spec).contains(expected), "{}", told(spec));
    }
}
