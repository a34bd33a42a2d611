//! `farrier rollback` where there is nothing that it could roll back.
use std::process::Command;

#[test]
fn a_directory_of_manifests_has_its_own_history() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(["rollback", "kube-system/mft", "--cluster"])
        .arg(format!("dir:{}", dir.path().display()))
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
    assert!(said.contains("its history is version control (git revert)"), "{said}");
}
