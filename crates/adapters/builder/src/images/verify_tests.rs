use farrier_core::image::Digest;
use kmod::Verdict;
use serde_json::json;

use super::*;
use crate::testing::Bench;

fn fits(verdict: Verdict, said: &str, allows_unknown: bool) -> Outcome {
    let repository = "registry.test/hello".parse().unwrap();
    let facts = ImageFacts {
        kernel_release: Some("6.1.0-18-amd64".parse().unwrap()),
        verdict: Some(verdict),
        check_summary: Some("1 unknown".to_owned()),
        ..ImageFacts::default()
    };
    let (bench, digest) = (Bench::new(&json!({})), Digest::of(b"image"));
    let image = StoredImage { services: &bench.services, repository: &repository, digest: &digest };
    let subject = Subject { image, facts, allows_unknown, signers: None, statements: Vec::new() };
    check_report(&json!({"report": {"kernel": "6.1.0-18-amd64", "verdict": said}}), &subject)
}

#[test]
fn unknown_passes_where_the_definition_allows_it() {
    let said = fits(Verdict::Unknown, "unknown", true).unwrap_or_else(|failed| panic!("{}", failed.why));
    assert_eq!(said, "unknown on 6.1.0-18-amd64, which the definition allows (1 unknown)");
    let failed = fits(Verdict::Unknown, "unknown", false).unwrap_err();
    assert_eq!(failed.why, "verdict unknown, which no definition allows");
    assert_eq!(failed.hint, ALLOW);
}

#[test]
fn what_report_and_annotation_say_must_be_the_same_and_load() {
    assert!(fits(Verdict::Loads, "loads", false).is_ok());
    for (noted, said) in
        [(Verdict::Loads, "unknown"), (Verdict::Unknown, "loads"), (Verdict::Refused, "refused")]
    {
        assert!(fits(noted, said, true).is_err(), "{noted:?} {said}");
    }
}
