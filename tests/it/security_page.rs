//! Every claim in docs/security.md and docs/guarantees.md names its test, and a test of that name exists.

use std::{collections::BTreeSet, fs, path::Path};

use walkdir::WalkDir;

/// Returns the names of functions, modules, files and directories in the sources.
fn names() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = BTreeSet::new();
    for part in ["src", "crates", "tests/it", "tests/escape"] {
        for entry in WalkDir::new(root.join(part)).into_iter().map(Result::unwrap) {
            names.extend(entry.path().file_stem().map(|name| name.to_string_lossy().replace('-', "_")));
            if entry.path().extension().is_none_or(|end| end != "rs") {
                continue;
            }
            for line in fs::read_to_string(entry.path()).unwrap().lines() {
                let words: Vec<&str> = line.split([' ', '(', ';']).collect();
                let pairs = words.windows(2).filter(|pair| ["fn", "mod"].contains(&pair[0]));
                names.extend(pairs.map(|pair| pair[1].to_owned()));
            }
        }
    }
    names
}

#[test]
fn each_test_that_the_pages_name_exists() {
    let names = names();
    for (page, least) in [("security.md", 80), ("guarantees.md", 20)] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(page);
        let text = fs::read_to_string(path).unwrap();
        // Every second piece is between backticks.
        let claimed: Vec<&str> = text.split('`').skip(1).step_by(2).filter(is_test).collect();
        assert!(claimed.len() > least, "{page}: {claimed:?}");
        let exists = |part: &str| match part.strip_suffix("...") {
            Some(beginning) => names.iter().any(|name| name.starts_with(beginning)),
            None => names.contains(part),
        };
        let missing: Vec<_> = claimed.iter().filter(|name| !name.split("::").all(exists)).collect();
        assert!(missing.is_empty(), "{page}: {missing:?}");
    }
}

fn is_test(text: &&str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:.".contains(c);
    text.chars().all(plain) && (text.contains("::") || text.matches('_').count() > 2)
}
