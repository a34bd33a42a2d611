//! Tests of which files of a definitions directory are read, and how much of them.

use std::os::unix::fs::symlink;

use rustix::fs::{CWD, FileType, mknodat};

use super::*;

#[test]
fn firmware_comes_from_sources_with_templates_that_copy_it() {
    let image =
        |firmware: &str| replaced(IMAGE, &[("  vars:", &format!("  firmware: [{firmware}]\n  vars:"))]);
    let own = "{source: mstflint, path: fw/a.bin, to: acme}, {source: mstflint}";
    let definitions = load_files(&[("images/m.yaml", &image(own))]).unwrap();
    let found = &definitions.images[&name("mstflint")];
    let target = serde_json::from_value(serde_json::json!({
        "os": "debian", "osVersion": "12", "release": "6.1.0-1-amd64", "arch": "amd64"
    }));
    let context = found.template_context("toolchain", "1.0", &target.unwrap());
    assert!(context.sources.is_empty(), "a source without `path` is firmware alone");
    let dockerfile =
        farrier_core::template::render("kbuild", &definitions.templates["kbuild"], &context).unwrap();
    let copies: Vec<&str> = dockerfile.lines().filter(|line| line.contains("/out/lib/firmware")).collect();
    let wanted =
        ["sources/mstflint/fw/a.bin /out/lib/firmware/acme/", "sources/mstflint/ /out/lib/firmware/"];
    assert_eq!(copies, wanted.map(|words| format!("COPY {words}")));
    let told = |firmware: &str, template: &str| {
        let text = replaced(&image(firmware), &[("template: kbuild", &format!("template: {template}"))]);
        mistakes(&[("images/m.yaml", &text), ("templates/own.Dockerfile.hbs", "FROM {{toolchain}}\n")])
    };
    for (firmware, template, words) in [
        ("{source: other}", "kbuild", "\"other\" is not among `sources`"),
        ("{source: mstflint}", "own", "template own copies no firmware: add `{{#each firmware}}`"),
        ("{source: mstflint, path: ../key}", "kbuild", "is not a relative path of letters, digits"),
        ("{source: mstflint, to: \"a b\"}", "kbuild", "is not a relative path of letters, digits"),
    ] {
        let error = told(firmware, template);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_family_file_replaces_the_shipped_one_of_its_name() {
    let shipped = load(None).unwrap().families.len();
    let definitions = load_files(&[("kernels/10-debian-12.yaml", FAMILY)]).unwrap();
    assert_eq!(definitions.families.len(), shipped);
    assert!(!definitions.families.iter().any(|family| family.metadata.name == name("debian-12")));
}

#[test]
fn what_is_no_regular_file_is_told_and_not_waited_for() {
    for name in ["images/m.yaml", "kernels/k.yaml", "templates/x.Dockerfile.hbs", "site.yaml"] {
        let directory = written(&[("images/a.yaml", IMAGE)]);
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        mknodat(CWD, &path, FileType::Fifo, 0o644.into(), 0).unwrap();
        let told = load(Some(directory.path())).unwrap_err().render();
        assert!(
            told.starts_with(&format!("error: {name}: cannot be read: it is not a regular file")),
            "{told}"
        );
    }
}

/// An author of definitions must not gain access to files that only farrier may read.
#[test]
fn a_link_that_leads_out_is_refused_and_nothing_is_quoted() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("config.json");
    fs::write(&secret, "{\"auths\": {\"r.example\": {\"auth\": \"c2VjcmV0\"}}}\n").unwrap();
    for name in ["images/m.yaml", "kernels/k.yaml", "templates/x.Dockerfile.hbs", "site.yaml"] {
        let directory = written(&[("images/a.yaml", IMAGE)]);
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(&secret, &path).unwrap();
        let told = load(Some(directory.path())).unwrap_err().render();
        assert!(!told.contains("c2VjcmV0"), "{told}");
        let wanted = format!(
            "error: {name}: cannot be read: it is a symbolic link that leads out of the definitions directory"
        );
        assert!(told.starts_with(&wanted), "{told}");
    }
}

/// A ConfigMap is mounted with such links.
#[test]
fn a_link_inside_of_the_directory_is_followed() {
    let directory = written(&[("images/..2026/m.yaml", IMAGE)]);
    let images = directory.path().join("images");
    symlink("..2026", images.join("..data")).unwrap();
    symlink("..data/m.yaml", images.join("m.yaml")).unwrap();
    assert!(load(Some(directory.path())).unwrap().images.contains_key(&name("mstflint")));
}

/// The link must point to a definition.
#[test]
fn a_link_to_a_file_of_another_kind_quotes_nothing() {
    let directory = written(&[("images/a.yaml", IMAGE), ("keys/images.key", "k: [c2VjcmV0\n")]);
    symlink("../keys/images.key", directory.path().join("images/m.yaml")).unwrap();
    let told = load(Some(directory.path())).unwrap_err().render();
    assert!(
        !told.contains("c2VjcmV0") && told.starts_with("error: images/m.yaml: cannot be read: "),
        "{told}"
    );
}

#[test]
fn deeply_nested_definitions_are_refused_at_their_line() {
    let n = 20_000;
    let blocks = format!("FROM x\n{}{}", "{{#if arch}}\n".repeat(n), "{{/if}}".repeat(n));
    let told = mistakes(&[("images/m.yaml", IMAGE), ("templates/deep.Dockerfile.hbs", &blocks)]);
    assert!(
        told.starts_with("error: templates/deep.Dockerfile.hbs:66:1: blocks are nested more than 64 deep"),
        "{told}"
    );
    let words = format!("FROM x\nRUN {{{{#if {}arch{}}}}}y{{{{/if}}}}\n", "(not ".repeat(n), ")".repeat(n));
    let told = mistakes(&[("images/m.yaml", IMAGE), ("templates/deep.Dockerfile.hbs", &words)]);
    assert!(told.starts_with("error: templates/deep.Dockerfile.hbs:2:1: "), "{told}");
}

/// A definition may be disabled in this way, so it stays valid.
#[test]
fn files_that_define_nothing_are_warned_of() {
    let json = r#"{"apiVersion": "farrier.dev/v1alpha1", "kind": "DriverImage"}"#;
    for (path, text, words) in [
        ("images/team/b.yaml", IMAGE, "is not read: definitions are the files"),
        ("images/team/gpu/b.yml", IMAGE, "is not read"),
        ("images/b.json", json, "is not read"),
        ("kernels/own/a.yaml", FAMILY, "is not read"),
        ("images/b.yaml", "", "has no definition"),
        ("kernels/b.yaml", "# nothing\n", "has no definition"),
        ("announced/b.yaml", "---\n", "has no definition"),
    ] {
        let directory = written(&[("images/a.yaml", IMAGE), (path, text)]);
        load(Some(directory.path())).unwrap();
        let warnings = unused_files(directory.path());
        assert!(
            warnings.len() == 1 && warnings[0].starts_with(&format!("{path}: {words}")),
            "{path}: {warnings:?}"
        );
    }
    let directory = written(&[
        ("images/a.yaml", IMAGE),
        ("images/..data/b.yaml", IMAGE),
        ("images/notes/values.yaml", "a: b\n"),
        ("images/README.md", IMAGE),
        ("site.yaml", "# nothing\n"),
    ]);
    load(Some(directory.path())).unwrap();
    assert!(unused_files(directory.path()).is_empty());
}

/// Files beside the directories of definitions are ignored.
#[test]
fn other_files_beside_the_definitions_are_left_alone() {
    let directory = written(&[("images/a.yaml", IMAGE)]);
    mknodat(CWD, directory.path().join("pipe.yaml"), FileType::Fifo, 0o644.into(), 0).unwrap();
    symlink("/etc/passwd", directory.path().join("link.yaml")).unwrap();
    load(Some(directory.path())).unwrap();
}

#[tokio::test]
async fn a_patch_is_a_file_of_the_directory() {
    let directory = written(&[("images/a.yaml", IMAGE), ("patches/a.patch", "--- a\n")]);
    mknodat(CWD, directory.path().join("patches/pipe.patch"), FileType::Fifo, 0o644.into(), 0).unwrap();
    symlink("/etc/passwd", directory.path().join("patches/out.patch")).unwrap();
    let definitions = load(Some(directory.path())).unwrap();
    assert_eq!(read_patch(&definitions, Path::new("patches/a.patch")).await.unwrap(), b"--- a\n");
    for name in ["patches/pipe.patch", "patches/out.patch", "patches/none.patch"] {
        assert!(read_patch(&definitions, Path::new(name)).await.is_err(), "{name}");
    }
}

/// A commit of a branch after the first would otherwise conflict with the first one's tag.
#[test]
fn an_image_that_follows_a_branch_names_the_commit_in_its_tags() {
    let image = |git: &str, more: &str| {
        let apt = "{apt: {package: mstflint-dkms, suites: [sid]}}";
        let git = format!("{{git: {{url: \"https://git.example/m.git\", {git}}}}}");
        let version = ("{source: mstflint}", "\"1.0\"");
        replaced(IMAGE, &[version, (apt, &git), ("  modules:", &format!("{more}  modules:"))])
    };
    let load = |git: &str, more: &str| {
        let text = image(git, more);
        load_files(&[("images/m.yaml", &text)]).map(drop).map_err(|errors| errors.render())
    };
    let branch = "ref: refs/heads/main";
    let error = load(branch, "").unwrap_err();
    assert!(error.contains("source \"mstflint\" follows a branch"), "{error}");
    assert!(error.contains("add `{{sources.mstflint.commit}}` to it, or set `commit`"), "{error}");
    let both = "  tags: [\"1-{{ sources.mstflint.commit }}-{{kernel_label}}\", \"1-{{kernel_label}}\"]\n";
    let error = load(branch, both).unwrap_err();
    assert_eq!(error.matches("follows a branch").count(), 1, "{error}");
    load(branch, "  tags: [\"1-{{ sources.mstflint.commit }}-{{kernel_label}}\"]\n").unwrap();
    load(branch, "  onConflict: overwrite\n").unwrap();
    load("ref: refs/tags/v1", "").unwrap();
    load(&format!("{branch}, commit: {}", "01".repeat(20)), "").unwrap();
    let error = load("ref: refs/tags/v1", "  tags: [\"{{sources.other.commit}}\"]\n").unwrap_err();
    assert!(error.contains("\"other\" is not a `git` source of `sources`"), "{error}");
    let error = load("submodules: true", "").unwrap_err();
    assert!(error.contains("set `ref` (`refs/tags/v1.0`, `refs/heads/main`), `commit`, or both"), "{error}");
    let error = load("ref: main", "").unwrap_err();
    assert!(error.contains("the full name of a branch (`refs/heads/main`)"), "{error}");
}
