use std::{
    fs,
    io::Read as _,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use super::*;

/// Makes a payload in the given order: `dir/`, `link -> target`, or `file`.
fn payload(entries: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for entry in entries {
        if let Some((link, target)) = entry.split_once(" -> ") {
            let place = root.path().join(link);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            symlink(target, place).unwrap();
        } else if entry.ends_with('/') {
            fs::create_dir_all(root.path().join(entry)).unwrap();
        } else {
            let place = root.path().join(entry);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(&place, entry).unwrap();
            fs::set_permissions(&place, fs::Permissions::from_mode(0o644)).unwrap();
        }
    }
    root
}

fn write(root: &tempfile::TempDir, usr_merged: bool) -> Result<(PayloadLayer, Vec<String>), PayloadError> {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("layer.tar.gz");
    let written = write_payload_layer(root.path(), usr_merged, &out)?;
    let bytes = fs::read(&out).unwrap();
    assert_eq!(written.layer.digest, Digest::of(&bytes));
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "a temporary file was left");
    let mut tar = Vec::new();
    LayerReader::new(&bytes[..]).unwrap().read_to_end(&mut tar).unwrap();
    let mut archive = tar::Archive::new(&tar[..]);
    let describe = |entry: io::Result<tar::Entry<'_, _>>| {
        let entry = entry.unwrap();
        let path = entry.path().unwrap().display().to_string();
        match entry.link_name().unwrap() {
            Some(target) => format!("{path} -> {}", target.display()),
            None => path,
        }
    };
    let entries = archive.entries().unwrap().map(describe).collect();
    Ok((written, entries))
}

const DRIVER: [&str; 4] = [
    "lib/modules/6.1.0/x.ko",
    "lib/modules/6.1.0/build -> ../../../usr/src/h",
    "usr/src/h/a.h",
    "etc/x.conf",
];

#[test]
fn the_order_of_making_does_not_matter() {
    let mut reversed = DRIVER;
    reversed.reverse();
    let first = write(&payload(&DRIVER), false).unwrap();
    let second = write(&payload(&reversed), false).unwrap();
    assert_eq!(first, second);
    assert_eq!(first.0.payload_digest, first.0.layer.diff_id);
}

#[test]
fn usr_merge_moves_modules_and_keeps_links_whole() {
    let (split, _) = write(&payload(&DRIVER), false).unwrap();
    let (merged, entries) = write(&payload(&DRIVER), true).unwrap();
    assert_eq!(merged.payload_digest, split.payload_digest);
    assert_ne!(merged.layer.digest, split.layer.digest);
    insta::assert_snapshot!(entries.join("\n"), @r"
    etc/
    etc/x.conf
    usr/
    usr/lib/
    usr/lib/modules/
    usr/lib/modules/6.1.0/
    usr/lib/modules/6.1.0/build -> ../../../../usr/src/h
    usr/lib/modules/6.1.0/x.ko
    usr/src/
    usr/src/h/
    usr/src/h/a.h
    ");
}

#[test]
fn links_that_stay_inside_are_not_touched() {
    for (link, target, deeper) in [
        ("lib/a/b", "../c", "../c"),
        ("lib/a/b", "../../etc/x", "../../../etc/x"),
        ("lib/b", "../etc/x", "../../etc/x"),
        ("lib/b", "c/../../etc", "c/../../../etc"),
        ("lib/b", "../../..", "../../../.."),
        ("lib/b", "/etc/x", "/etc/x"),
        ("lib/b", "./c", "./c"),
    ] {
        assert_eq!(
            one_level_deeper(Path::new(link), Path::new(target)),
            Path::new(deeper),
            "{link} {target}"
        );
    }
}

#[test]
fn a_payload_that_is_merged_itself_keeps_the_links_of_the_base() {
    let (_, entries) = write(&payload(&["lib -> usr/lib", "bin -> /usr/bin", "usr/lib/x"]), true).unwrap();
    assert_eq!(entries, ["usr/", "usr/lib/", "usr/lib/x"]);
}

#[test]
fn conflicts() {
    let error = |entries: &[&str]| write(&payload(entries), true).unwrap_err().to_string();
    insta::assert_snapshot!(error(&["lib/x", "usr/lib/x"]), @r#"payload entries "lib/x" and "usr/lib/x" have the same path "usr/lib/x" on the usr-merged base"#);
    insta::assert_snapshot!(error(&["lib -> elsewhere"]), @r#"payload entry "lib" would replace the link of the usr-merged base"#);
    insta::assert_snapshot!(error(&["lib/x", "usr -> other"]), @r#"payload entry "usr" would replace the link of the usr-merged base"#);
}

#[test]
fn special_files_and_whiteouts_are_refused() {
    let root = payload(&[]);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        root.path().join("fifo"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    assert!(matches!(write(&root, false), Err(PayloadError::Kind(_))));
    assert!(matches!(
        write(&payload(&["a/.wh.passwd"]), false),
        Err(PayloadError::Layer(LayerError::Whiteout(_)))
    ));
}

#[test]
fn usr_merged_bases() {
    let directory = tempfile::tempdir().unwrap();
    let layer = |name: &str, entries: &[&str]| {
        let out = directory.path().join(name);
        write_payload_layer(payload(entries).path(), false, &out).unwrap();
        out
    };
    let merged = layer("merged", &["lib -> usr/lib", "usr/lib/x"]);
    let split = layer("split", &["lib/x"]);
    let silent = layer("silent", &["usr/lib/y"]);
    assert!(is_usr_merged(&[merged.clone(), silent.clone()]).unwrap());
    assert!(!is_usr_merged(&[merged.clone(), split.clone()]).unwrap());
    assert!(is_usr_merged(&[split, merged]).unwrap());
    assert!(!is_usr_merged(&[silent]).unwrap());
    assert!(!is_usr_merged(&[]).unwrap());
}

#[test]
fn nothing_is_left_when_the_payload_cannot_be_read() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("layer");
    let error = write_payload_layer(&directory.path().join("absent"), false, &out).unwrap_err();
    assert!(matches!(error, PayloadError::Walk(_)), "{error}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

proptest::proptest! {
    #[test]
    fn same_tree_same_digest(
        mut names in proptest::collection::vec("[a-c]{1,2}/[a-z]{1,3}", 1..10),
        usr_merged: bool,
    ) {
        let first = write(&payload(&names.iter().map(String::as_str).collect::<Vec<_>>()), usr_merged).unwrap();
        names.reverse();
        let second = write(&payload(&names.iter().map(String::as_str).collect::<Vec<_>>()), usr_merged).unwrap();
        proptest::prop_assert_eq!(first, second);
    }
}
