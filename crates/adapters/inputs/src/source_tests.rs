use std::ffi::OsString;

use farrier_core::image::checked::InnerPattern;
use farrier_local::cache::Cache;
use fs_err::os::unix::fs::symlink;

use super::*;
use crate::{FetchOptions, digest, files::names_in};

struct Scene {
    dir: tempfile::TempDir,
    fetcher: Fetcher,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        // An apt directory without sources: no test here may use the network.
        let options = FetchOptions { apt_dir: dir.path().join("apt"), ..FetchOptions::default() };
        Self { dir, fetcher: Fetcher::new(cache, options).with_definitions(root) }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn write(&self, path: &str, content: &[u8]) {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Writes a tarball of `files` at `path`.
    fn tarball(&self, path: &str, files: &[(&str, &[u8])]) {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        self.write(path, &builder.into_inner().unwrap());
    }

    async fn source(&self, yaml: &str) -> Result<FetchedSource, FetchError> {
        self.fetcher.sources().fetch(&spec(yaml)).await
    }
}

fn spec(json: &str) -> SourceSpec {
    serde_json::from_str(&format!(r#"{{"name": "driver", {json}}}"#)).unwrap()
}

/// Templates copy a file by its name.
#[tokio::test]
async fn a_tree_of_one_file_has_the_name_in_its_definition() {
    let scene = Scene::new();
    for name in ["a.c", "b.c"] {
        scene.write(name, b"int x;\n");
        let tree = scene.source(&format!(r#""from": {{"path": {{"path": "{name}"}}}}"#)).await.unwrap();
        assert_eq!(names_in(&tree.root).unwrap(), [name]);
    }
}

#[tokio::test]
async fn an_archive_with_its_part() {
    let scene = Scene::new();
    scene.tarball("d.tar", &[("driver-1.2/src/a.c", b"a"), ("driver-1.2/README", b"r"), ("other/x", b"x")]);
    let found = scene.source(r#""from": {"path": {"path": "d.tar"}}, "subdir": "driver-*""#).await.unwrap();
    assert_eq!(fs::read(found.root.join("src/a.c")).unwrap(), b"a");
    assert!(found.origin.starts_with("sha256:") && found.origin.ends_with(" subdir=driver-*"));
    // Only the part is kept.
    let entry = found.root.parent().unwrap();
    assert_eq!(names_in(entry).unwrap(), ["tree"]);

    let several = scene.source(r#""from": {"path": {"path": "d.tar"}}, "subdir": "*""#).await.unwrap_err();
    insta::assert_snapshot!(several, @r#"cannot find one directory "*" in the source: several match among driver-1.2, other"#);
    let none =
        scene.source(r#""from": {"path": {"path": "d.tar"}}, "subdir": "driver-2*""#).await.unwrap_err();
    insta::assert_snapshot!(none, @r#"cannot find "driver-2*" in the source: there is driver-1.2, other"#);
}

/// Publishers add a link `current` to the directory of the newest version.
#[tokio::test]
async fn a_part_that_is_a_link_is_the_directory_that_it_names() {
    let scene = Scene::new();
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    header.set_mode(0o644);
    builder.append_data(&mut header, "driver-1.2/src/a.c", &b"a"[..]).unwrap();
    header.set_size(0);
    header.set_entry_type(tar::EntryType::Symlink);
    builder.append_link(&mut header, "current", "driver-1.2").unwrap();
    scene.write("d.tar", &builder.into_inner().unwrap());
    let json = r#""from": {"path": {"path": "d.tar"}}, "subdir": "current""#;
    let tree = scene.source(json).await.unwrap().root;
    assert_eq!(fs::read(tree.join("src/a.c")).unwrap(), b"a");
    assert_eq!(names_in(tree.parent().unwrap()).unwrap(), ["tree"]);
    // An entry that an older farrier left is made again.
    fs::remove_dir_all(&tree).unwrap();
    symlink("driver-1.2", &tree).unwrap();
    let again = scene.source(json).await.unwrap().root;
    assert_eq!(fs::read(again.join("src/a.c")).unwrap(), b"a");
}

#[tokio::test]
async fn an_archive_inside_an_archive() {
    let scene = Scene::new();
    scene.tarball("inner.tar", &[("kernel-open/Kbuild", b"k")]);
    let inner = fs::read(scene.root().join("inner.tar")).unwrap();
    scene.tarball("outer.tar", &[("usr/src/inner.tar", &inner)]);
    let json =
        r#""from": {"path": {"path": "outer.tar"}}, "unpack": "usr/src/inner.tar", "subdir": "kernel-open""#;
    let found = scene.source(json).await.unwrap();
    assert_eq!(fs::read(found.root.join("Kbuild")).unwrap(), b"k");
    let error =
        scene.source(r#""from": {"path": {"path": "outer.tar"}}, "unpack": "absent.tar""#).await.unwrap_err();
    insta::assert_snapshot!(error, @r#"cannot find "absent.tar" in the source: there is usr"#);
}

/// Like the kernel tree in OFED's source tarball: the name of the inner archive contains a version.
#[tokio::test]
async fn an_archive_inside_an_archive_by_a_pattern() {
    let scene = Scene::new();
    scene.tarball("inner.tar", &[("ofed-1.0/configure", b"c")]);
    let inner = fs::read(scene.root().join("inner.tar")).unwrap();
    scene.tarball(
        "outer.tar",
        &[("SOURCES/ofed_1.0.orig.tar.gz", &inner), ("SOURCES/other_2.tar.gz", &inner)],
    );
    let json = |unpack: &str| {
        format!(r#""from": {{"path": {{"path": "outer.tar"}}}}, "unpack": "{unpack}", "subdir": "ofed-*""#)
    };
    let found = scene.source(&json("SOURCES/ofed_*.orig.tar.gz")).await.unwrap();
    assert_eq!(fs::read(found.root.join("configure")).unwrap(), b"c");
    let several = scene.source(&json("SOURCES/*.tar.gz")).await.unwrap_err();
    insta::assert_snapshot!(several, @r#"cannot find one file "SOURCES/*.tar.gz" in the source: several match among ofed_1.0.orig.tar.gz, other_2.tar.gz"#);
    let none = scene.source(&json("SOURCES/mlnx*")).await.unwrap_err();
    insta::assert_snapshot!(none, @r#"cannot find "SOURCES/mlnx*" in the source: there is ofed_1.0.orig.tar.gz, other_2.tar.gz"#);
}

/// Malicious names, which `Scene::tarball` would not write.
#[tokio::test]
async fn an_archive_that_reaches_outside_is_refused_with_what_to_do() {
    let scene = Scene::new();
    for name in ["../escaped", "/escaped", "a/../../escaped"] {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(0);
        header.set_mode(0o644);
        header.set_cksum();
        let mut builder = tar::Builder::new(Vec::new());
        builder.append(&header, &[][..]).unwrap();
        scene.write("d.tar", &builder.into_inner().unwrap());
        let error = scene.source(r#""from": {"path": {"path": "d.tar"}}"#).await.unwrap_err();
        let text = oci::error_chain(&error);
        assert!(text.contains(&format!("entry {name:?} is outside the archive's root")), "{text}");
        assert!(error.hint().unwrap().contains("check the archive's origin"));
        assert_eq!(names_in(&scene.dir.path().join("cache/sources")).unwrap(), Vec::<OsString>::new());
    }
}

#[tokio::test]
async fn a_directory_is_used_where_it_lies() {
    let scene = Scene::new();
    scene.write("tree/drivers/net/a.c", b"a");
    let json = r#""from": {"path": {"path": "tree"}}, "subdir": "drivers/net""#;
    let found = scene.source(json).await.unwrap();
    assert_eq!(found.root, scene.root().join("tree/drivers/net"));
    let before = scene.fetcher.sources().identity(&spec(json)).await.unwrap();
    assert_eq!(before.identity, found.origin);
    scene.write("tree/drivers/net/a.c", b"b");
    let after = scene.fetcher.sources().identity(&spec(json)).await.unwrap();
    assert_ne!(before, after);
    // An archive inside the user's tree is unpacked in the cache, never next to the archive.
    scene.tarball("tree/x.tar", &[("x.c", b"x")]);
    let found = scene.source(r#""from": {"path": {"path": "tree"}}, "unpack": "x.tar""#).await.unwrap();
    assert!(found.root.join("x.c").is_file());
    assert!(found.root.starts_with(scene.dir.path().join("cache")));
    assert_eq!(names_in(&scene.root().join("tree")).unwrap(), ["drivers", "x.tar"]);
}

#[tokio::test]
async fn a_plain_file_is_a_tree_of_one() {
    let scene = Scene::new();
    scene.write("module.c", b"int x;");
    let found = scene.source(r#""from": {"path": {"path": "module.c"}}"#).await.unwrap();
    assert_eq!(names_in(&found.root).unwrap(), ["module.c"]);
}

#[tokio::test]
async fn digests_are_verified() {
    let scene = Scene::new();
    scene.write("module.c", b"int x;");
    let good = digest::of_file(&scene.root().join("module.c"), &AtomicBool::new(false)).unwrap();
    let with = |sha256: &str| format!(r#""from": {{"path": {{"path": "module.c", "sha256": "{sha256}"}}}}"#);
    scene.source(&with(&good)).await.unwrap();
    let error = scene.source(&with(&"0".repeat(64))).await.unwrap_err();
    assert!(error.to_string().contains(&good) && error.to_string().contains(&"0".repeat(64)), "{error}");
    assert!(!error.is_transient() && error.hint().is_some());
}

#[tokio::test]
async fn a_file_that_changes_while_it_is_read_is_refused() {
    let scene = Scene::new();
    scene.write("module.c", b"int x;");
    let (sources, spec) = (scene.fetcher.sources(), spec(r#""from": {"path": {"path": "module.c"}}"#));
    let content = sources.content(&spec.from).await.unwrap();
    scene.write("module.c", b"int longer;");
    let error = sources.fetch_content(&spec, content).await.unwrap_err();
    assert!(matches!(error, FetchError::Checksum { .. }), "{error:?}");
    let fetched = sources.fetch(&spec).await.unwrap();
    assert_eq!(fs::read(fetched.root.join("module.c")).unwrap(), b"int longer;");
}

#[tokio::test]
async fn nothing_outside_a_source_is_reached() {
    let scene = Scene::new();
    scene.write("secret/x.tar", b"");
    scene.write("tree/file", b"");
    symlink(scene.root().join("secret"), scene.root().join("tree/link")).unwrap();
    for part in [r#""subdir": "link""#, r#""subdir": "li*""#, r#""unpack": "link/x.tar""#] {
        let error = scene.source(&format!(r#""from": {{"path": {{"path": "tree"}}}}, {part}"#)).await;
        assert!(error.is_err(), "{part}");
    }
    // A pattern that leaves the source is rejected by the parser.
    for outside in ["../secret", "/etc", "link/.."] {
        assert!(outside.parse::<InnerPattern>().is_err(), "{outside}");
    }
}

/// No digest covers version-control data, so a definition that names a part of it would not notice a change.
#[tokio::test]
async fn version_control_data_is_no_source() {
    let scene = Scene::new();
    scene.write("tree/driver-1.2/a.c", b"a");
    scene.write("tree/.git/hooks/x", b"x");
    scene.tarball("tree/.git/x.tar", &[("x.c", b"x")]);
    symlink(".git/hooks", scene.root().join("tree/link")).unwrap();
    for part in [
        r#""subdir": ".git""#,
        r#""subdir": ".git/hooks""#,
        r#""subdir": "link""#,
        r#""unpack": ".git/x.tar""#,
    ] {
        let found = scene.source(&format!(r#""from": {{"path": {{"path": "tree"}}}}, {part}"#)).await;
        assert!(found.is_err(), "{part}: {found:?}");
    }
    for path in ["tree/.git", "tree/.git/x.tar"] {
        let error = scene.source(&format!(r#""from": {{"path": {{"path": "{path}"}}}}"#)).await.unwrap_err();
        assert!(error.to_string().contains("version-control data is not a source"), "{error}");
    }
    // The only other directory.
    fs::remove_file(scene.root().join("tree/link")).unwrap();
    let found = scene.source(r#""from": {"path": {"path": "tree"}}, "subdir": "*""#).await.unwrap();
    assert_eq!(found.root, scene.root().join("tree/driver-1.2"));
}

#[tokio::test]
async fn a_warning_names_credentials() {
    let scene = Scene::new();
    let warnings = async |path: &str| {
        let spec = spec(&format!(r#""from": {{"path": {{"path": "{path}"}}}}"#));
        let sources = scene.fetcher.sources();
        (sources.warning(&spec).await.unwrap(), sources.archive_warning(&spec).await.unwrap())
    };
    scene.write("tree/a.c", b"a");
    scene.write("tree/.git/config", b"-----BEGIN PRIVATE KEY-----\n");
    assert_eq!(warnings("tree").await, (None, None));
    assert_eq!(warnings("absent").await, (None, None));
    scene.write("tree/.netrc", b"machine x\n");
    let (told, archive) = warnings("tree").await;
    insta::assert_snapshot!(told.unwrap(), @"warning: source driver has files that look like credentials: .netrc (logins) (remove them: builds can read them, and registries that store the source contain them)");
    assert_eq!(archive, None);
    // An archive is stored unchanged, with everything in it.
    scene.tarball("d.tar", &[("d/.git/config", b"x"), ("d/id_rsa", b"x"), ("d/a.c", b"a")]);
    let (told, archive) = warnings("d.tar").await;
    assert_eq!(told, None);
    let archive = archive.unwrap();
    insta::assert_snapshot!(archive, @"warning: source driver has files that look like credentials: d/.git (version-control data), d/id_rsa (a private key) (pack the archive without them: registries store it unchanged)");
    // A build has already unpacked the archive and recorded the same suspects.
    scene.tarball("e.tar", &[("e/.npmrc", b"_auth=x\n"), ("e/src/a.c", b"a")]);
    scene.source(r#""from": {"path": {"path": "e.tar"}}, "subdir": "e/src""#).await.unwrap();
    let (_, archive) = warnings("e.tar").await;
    assert!(archive.unwrap().contains("e/.npmrc (credentials of a package registry)"));
}

#[tokio::test]
async fn a_truncated_archive_leaves_nothing() {
    let scene = Scene::new();
    scene.tarball("d.tar", &[("a", &[0; 5000])]);
    let bytes = fs::read(scene.root().join("d.tar")).unwrap();
    scene.write("d.tar", &bytes[..3000]);
    let error = scene.source(r#""from": {"path": {"path": "d.tar"}}"#).await.unwrap_err();
    assert!(matches!(error, FetchError::Unpack(..)));
    assert!(error.hint().unwrap().contains("incomplete"));
    assert_eq!(names_in(&scene.dir.path().join("cache/sources")).unwrap(), Vec::<OsString>::new());
}

#[tokio::test]
async fn without_an_apt_source_it_says_so() {
    let scene = Scene::new();
    let json = r#""from": {"apt": {"package": "mstflint-dkms", "suites": ["sid"]}}"#;
    let error = scene.source(json).await.unwrap_err();
    insta::assert_snapshot!(error, @"cannot find an apt source for suite sid: the host has no entry for it");
}
