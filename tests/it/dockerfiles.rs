//! The corpus of Dockerfiles: the in-place engine and the Docker engine produce the same /out.

use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use farrier_engines::{ContextEntry, EngineChoice};
use walkdir::WalkDir;

use crate::engine::Bench;

/// Lists a tree as text: mode, path, and the content of each file or the target of each link.
fn listing(tree: &Path) -> String {
    let mut out = String::new();
    for entry in WalkDir::new(tree).min_depth(1).sort_by_file_name() {
        let entry = entry.unwrap();
        let metadata = entry.path().symlink_metadata().unwrap();
        let path = entry.path().strip_prefix(tree).unwrap();
        let content = if metadata.is_symlink() {
            format!("-> {}", fs::read_link(entry.path()).unwrap().display())
        } else if metadata.is_file() {
            format!("{:?}", String::from_utf8_lossy(&fs::read(entry.path()).unwrap()))
        } else {
            String::new()
        };
        let slash = if metadata.is_dir() { "/" } else { "" };
        let line = format!("{:o} {}{slash} {content}", metadata.permissions().mode(), path.display());
        writeln!(out, "{}", line.trim_end()).unwrap();
    }
    out
}

/// Returns the cases whose directories have this extension. Every engine supports the cases without an extension.
fn cases(ending: Option<&str>) -> Vec<PathBuf> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dockerfiles");
    let mut found: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.extension().and_then(|ending| ending.to_str()) == ending);
    found.sort();
    found
}

/// Builds a case and returns the listing of its /out.
async fn out(bench: &Bench, case: &Path) -> String {
    let dockerfile = fs::read_to_string(case.join("Dockerfile")).unwrap();
    // The base's name occurs in FROM, in the argument that FROM uses, and at the start of a continuation line.
    let named = |line: &str| {
        let start = line.trim_start().to_ascii_lowercase();
        ["from ", "arg toolchain=", "base "].iter().any(|word| start.starts_with(word))
    };
    let rename = |line: &str| line.replacen("base", &bench.base, usize::from(named(line)));
    let dockerfile: String = dockerfile.split_inclusive('\n').map(rename).collect();
    let mut request = bench.request("modules", &dockerfile);
    let context = case.join("context");
    if context.is_dir() {
        let entries = fs::read_dir(context).unwrap().map(|entry| entry.unwrap());
        let entry = |entry: fs::DirEntry| ContextEntry {
            dest: entry.file_name().into_string().unwrap(),
            from: entry.path(),
        };
        request.context = entries.map(entry).collect();
        request.context.sort_by(|a, b| a.dest.cmp(&b.dest));
    }
    let tree = bench.payload(&request).await.unwrap_or_else(|error| panic!("{}: {error}", case.display()));
    listing(&tree)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_leaves_what_docker_leaves() {
    let docker = Bench::new(EngineChoice::Docker, "corpus").await;
    let sandbox = Bench::new(EngineChoice::Sandbox, "corpus").await;
    let cases = cases(None);
    assert!(cases.len() >= 25, "{}", cases.len());
    for case in cases {
        assert_eq!(out(&sandbox, &case).await, out(&docker, &case).await, "{}", case.display());
    }
}

/// The classic builder does not support these cases, so each has a file `expected` with the listing.
#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_leaves_what_newer_builders_leave() {
    let sandbox = Bench::new(EngineChoice::Sandbox, "newer").await;
    let cases = cases(Some("buildkit"));
    assert!(cases.len() >= 5, "{}", cases.len());
    for case in cases {
        let expected = fs::read_to_string(case.join("expected")).unwrap();
        assert_eq!(out(&sandbox, &case).await, expected, "{}", case.display());
    }
}
