//! Tests that a build fails if a fetched input is not the planned one.

use std::fs;

use serde_json::json;

use super::*;
use crate::{
    headers,
    testing::{Bench, K9, SYMBOLS},
};

fn refused<T>(outcome: Result<T, BuildError>) -> String {
    let error = outcome.err().expect("another input must be refused");
    assert!(!error.is_permanent());
    error.to_string()
}

#[tokio::test]
async fn another_source_patch_or_header_set_than_the_planned_one_is_refused() {
    let bench = Bench::new(&json!({
        "sources": [{"name": "src", "from": {"path": {"path": "tree"}}}], "patches": [{"path": "fix.patch"}],
    }));
    let write = |file: &str, text: &str| fs::write(bench.root().join(file), text).unwrap();
    fs::create_dir(bench.root().join("tree")).unwrap();
    write("tree/Makefile", "all:\n");
    write("fix.patch", "one\n");
    let cell = bench.cell(K9).await;
    let build = CellBuild::of(&bench.services, &cell).unwrap();
    headers::fetch(&build).await.unwrap();
    let work = tempfile::tempdir().unwrap();
    let context = || build_context(&build, work.path());
    context().await.unwrap();

    write("fix.patch", "another\n");
    assert_eq!(refused(context().await), "patch 001-fix.patch changed after the build was planned");
    write("tree/Makefile", "all: other\n");
    assert_eq!(refused(context().await), "source src changed after the build was planned");
    bench.headers_with(K9, SYMBOLS, "CONFIG_OTHER=y\n");
    assert_eq!(
        refused(headers::fetch(&build).await),
        "the kernel's headers changed after the build was planned"
    );
}

/// A plan reports credentials in directories. A build reports those in archives, which are opened only then.
#[tokio::test]
async fn credentials_in_sources_are_told_and_version_control_data_is_not_there() {
    let bench = Bench::new(&json!({"sources": [
        {"name": "tree", "from": {"path": {"path": "tree"}}}, {"name": "packed", "from": {"path": {"path": "d.tar"}}},
    ]}));
    fs::create_dir_all(bench.root().join("tree/.git")).unwrap();
    fs::write(bench.root().join("tree/.git/config"), "url = https://x:token@r.example\n").unwrap();
    fs::write(bench.root().join("tree/Makefile"), "all:\n").unwrap();
    let mut archive = tar::Builder::new(fs::File::create(bench.root().join("d.tar")).unwrap());
    archive.append_dir_all("d", bench.root().join("tree")).unwrap();
    archive.finish().unwrap();
    let plain = bench.cell(K9).await;
    assert!(bench.heard().iter().all(|line| !line.contains("credentials")));

    fs::write(bench.root().join("tree/.git/packed-refs"), "x\n").unwrap();
    assert_eq!(bench.cell(K9).await.input_hash, plain.input_hash);
    fs::write(bench.root().join("tree/id_rsa"), "x\n").unwrap();
    let cell = bench.cell(K9).await;
    let told = bench.heard();
    let told: Vec<_> = told.iter().filter(|line| line.contains("credentials")).collect();
    assert!(
        matches!(told[..], [line] if line.contains("source tree") && line.contains("id_rsa (a private key)")),
        "{told:?}"
    );

    let build = CellBuild::of(&bench.services, &cell).unwrap();
    let work = tempfile::tempdir().unwrap();
    build_context(&build, work.path()).await.unwrap();
    let told = bench.heard();
    let told: Vec<_> = told.iter().filter(|line| line.contains("credentials")).collect();
    assert!(
        matches!(told[..], [line] if line.contains("source packed") && line.contains("d/.git")),
        "{told:?}"
    );
}
