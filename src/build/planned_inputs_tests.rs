//! What a build fetches is what its cell was planned with; else it is not the build of that cell.

use std::fs;

use serde_json::json;

use super::*;
use crate::build::{
    headers,
    testing::{Bench, K9, SYMBOLS},
};

fn refused<T>(outcome: Result<T, TargetError>) -> String {
    let error = outcome.err().expect("it is another input");
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
    let job = Job::of(&bench.parts, &cell).unwrap();
    headers::fetch(&job).await.unwrap();
    let work = tempfile::tempdir().unwrap();
    let context = || context(&job, work.path());
    context().await.unwrap();

    write("fix.patch", "another\n");
    assert_eq!(refused(context().await), "patch 001-fix.patch changed after the build was planned");
    write("tree/Makefile", "all: other\n");
    assert_eq!(refused(context().await), "source src changed after the build was planned");
    bench.headers_with(K9, SYMBOLS, "CONFIG_OTHER=y\n");
    assert_eq!(
        refused(headers::fetch(&job).await),
        "the kernel's headers changed after the build was planned"
    );
}
