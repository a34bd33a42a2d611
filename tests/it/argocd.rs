//! Tests the DriverBuild health script for Argo CD with Lua 5.1, the language version of Argo CD's engine.

use std::{path::Path, process::Command};

use farrier_core::plan::Phase;
use strum::VariantArray as _;

/// Returns the health status and the message that the script reports for an object.
fn health(object: &str) -> (String, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/argocd/driverbuild-health.lua");
    let program = format!(
        "obj = {object}\nlocal found = dofile('{}')\nio.write(found.status, '\\n', found.message or '')",
        script.display()
    );
    let output = Command::new("lua5.1").args(["-e", &program]).output();
    let output = output.expect("run lua5.1 (Debian package lua5.1)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).unwrap();
    let (status, message) = said.split_once('\n').unwrap();
    (status.to_owned(), message.to_owned())
}

#[test]
fn every_phase_has_a_health() {
    let table: Vec<String> = Phase::VARIANTS
        .iter()
        .map(|phase| {
            let phase = phase.as_str();
            let (health, message) = health(&format!("{{status = {{phase = '{phase}'}}}}"));
            assert_eq!(message, phase);
            format!("{phase}: {health}")
        })
        .collect();
    insta::assert_snapshot!(table.join("\n"), @r"
    published: Healthy
    building: Progressing
    queued: Progressing
    retrying: Progressing
    missing: Progressing
    waiting: Progressing
    failed: Degraded
    conflict: Degraded
    unknown: Unknown
    skipped: Healthy
    own-driver: Healthy
    ");
}

#[test]
fn what_it_says_comes_along() {
    let object = "{status = {phase = 'failed', message = 'main.c:1: no such member'}}";
    assert_eq!(health(object), ("Degraded".to_owned(), "failed: main.c:1: no such member".to_owned()));
    assert_eq!(health("{}").0, "Progressing");
    assert_eq!(health("{status = {phase = 'new'}}").0, "Unknown");
}
