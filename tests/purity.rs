//! The architecture: pure modules know no adapter, no runtime, no clock, no environment and no file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

const PURE: &[&str] = &["kernel", "image", "template", "plan", "kmod", "oci", "provenance", "site"];

const ADAPTERS: &[&str] = &[
    "archive",
    "boot",
    "bundle",
    "cache",
    "cli",
    "cluster",
    "controller",
    "definitions",
    "engine",
    "headers",
    "machine",
    "jitter",
    "net",
    "payload",
    "registry",
    "runtime",
    "signing",
    "store",
];

const OUTSIDE: &[&str] = &[
    "tokio",
    "reqwest",
    "bollard",
    "tempfile",
    "walkdir",
    "rustix",
    "std::fs",
    "std::env",
    "std::net",
    "std::process",
    "std::thread",
    "std::time::SystemTime",
    "SystemTime::now",
    "std::time::Instant",
    "Instant::now",
    "Timestamp::now",
    "Zoned::now",
];

/// What a file says about the outside, in its code: comments and tests may name what they like.
fn violations(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let code: String =
        code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let words: Vec<String> = paths(&code);
    let mut found: Vec<String> = Vec::new();
    for path in &words {
        let of_adapter = |adapter: &&&str| is_below(path, &format!("crate::{adapter}"));
        found.extend(ADAPTERS.iter().filter(of_adapter).map(|adapter| format!("crate::{adapter}")));
        let of_outside = |outside: &&&str| is_below(path, outside) || path.ends_with(&format!("::{outside}"));
        found.extend(OUTSIDE.iter().filter(of_outside).map(ToString::to_string));
    }
    found.sort();
    found.dedup();
    found
}

fn is_below(path: &str, module: &str) -> bool {
    path == module || path.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
}

/// All paths of the code, with the braces of `use` declarations multiplied out.
fn paths(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    let mut prefixes: Vec<String> = Vec::new();
    let mut current = String::new();
    for c in code.chars() {
        match c {
            c if c.is_alphanumeric() || c == '_' || c == ':' => current.push(c),
            '{' => prefixes.push(std::mem::take(&mut current)),
            _ => {
                if !current.is_empty() {
                    let prefix: String =
                        prefixes.iter().filter(|prefix| prefix.ends_with("::")).cloned().collect();
                    let open = prefixes.last().is_some_and(|prefix| prefix.ends_with("::"));
                    let path = std::mem::take(&mut current);
                    paths.push(if open { format!("{prefix}{path}") } else { path });
                }
                if c == '}' {
                    prefixes.pop();
                }
            }
        }
    }
    paths
}

fn rust_files(dir: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// Files that exist for tests alone (`#[cfg(test)] mod tests;` stands in their parent).
fn is_for_tests(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests" || stem == "testing" || stem == "fixtures")
}

#[test]
fn pure_modules_touch_nothing_outside() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for module in PURE {
        let mut files = Vec::new();
        rust_files(&source.join(module), &mut files);
        assert!(!files.is_empty(), "src/{module} holds no Rust file");
        for path in files.iter().filter(|path| !is_for_tests(path)) {
            for violation in violations(&fs::read_to_string(path).unwrap()) {
                wrong.push(format!("{}: {violation}", path.strip_prefix(&source).unwrap().display()));
            }
        }
    }
    wrong.sort();
    assert!(wrong.is_empty(), "pure modules name what they must not:\n{}", wrong.join("\n"));
}

#[test]
fn the_search_finds_what_it_is_for() {
    for (code, expected) in [
        ("use crate::engine::Engine;\n", "crate::engine"),
        ("use crate::{\n    image::Tag,\n    registry::{self, Registry},\n};\n", "crate::registry"),
        ("use std::{collections::BTreeMap, fs};\n", "std::fs"),
        ("use std::{env::{self, var}, fmt};\n", "std::env"),
        ("fn f() { std::process::Command::new(\"x\"); }\n", "std::process"),
        ("use std::time::{Duration, Instant};\n", "std::time::Instant"),
        ("fn f() -> Timestamp { jiff::Timestamp::now() }\n", "Timestamp::now"),
        ("async fn f() { tokio::time::sleep(x).await }\n", "tokio"),
    ] {
        assert_eq!(violations(code), [expected], "{code}");
    }
    for code in [
        "// std::fs\nuse std::time::Duration;\n",
        "use crate::{image::Tag, kernel};\nfn engine() {}\n",
        "fn f() {}\n\n#[cfg(test)]\nmod tests { use std::fs; }\n",
        "struct Registry { engine: crate::kernel::Engine }\n",
    ] {
        assert!(violations(code).is_empty(), "{code}: {:?}", violations(code));
    }
}
