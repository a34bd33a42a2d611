use std::{
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
};

use farrier_core::image::SourceSpec;
use farrier_local::cache::Cache;
use farrier_net::{Net, NetOptions};
use farrier_store::{
    Store,
    registry::{self, RegistryLocation, RegistryOptions},
};

use super::*;
use crate::{FetchOptions, FetchedSource};

/// A repository with other people's content, and a fetcher with an empty cache.
struct Scene {
    dir: tempfile::TempDir,
    fetcher: Fetcher,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["definitions", "driver"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let scene = Self { fetcher: fetcher(dir.path(), "cache"), dir };
        scene.git(&["init", "--quiet", "--initial-branch", "main", "."]);
        scene
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join(inside)
    }

    fn url(&self) -> String {
        format!("file://{}", self.path("driver").display())
    }

    fn git(&self, arguments: &[&str]) -> String {
        self.git_with(arguments, b"")
    }

    /// Runs git in the repository without a user's configuration.
    fn git_with(&self, arguments: &[&str], input: &[u8]) -> String {
        let mut child = Command::new("git")
            .args(["-c", "user.name=a person", "-c", "user.email=person@example.org"])
            .args(arguments)
            .current_dir(self.path("driver"))
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GNUPGHOME", self.path("gnupg"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "git {arguments:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn write(&self, path: &str, content: &[u8]) {
        let path = self.path("driver").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Commits the files with git's own attributes switched off and returns the commit.
    fn commit(&self, files: &[(&str, &[u8])], how: &[&str]) -> String {
        for (path, content) in files {
            self.write(path, content);
        }
        self.write("../driver/.git/info/attributes", b"* -text -filter -ident -working-tree-encoding\n");
        self.git(&["add", "--force", "--all"]);
        self.git(&[how, &["commit", "--quiet", "--message", "a change"]].concat());
        self.git(&["rev-parse", "HEAD"])
    }

    /// Commits a tree as `git mktree` reads it, which no working tree can hold.
    fn commit_tree(&self, entries: &str) -> String {
        let tree = self.git_with(&["mktree", "--missing"], entries.as_bytes());
        let commit = self.git(&["commit-tree", "-m", "a tree", &tree]);
        self.git(&["update-ref", "refs/heads/main", &commit]);
        commit
    }

    fn blob(&self, content: &[u8]) -> String {
        self.git_with(&["hash-object", "-w", "--stdin"], content)
    }

    fn spec(&self, fields: &str) -> SourceSpec {
        let git = format!(r#"{{"url": "{}", {fields}}}"#, self.url());
        serde_json::from_str(&format!(r#"{{"name": "driver", "from": {{"git": {git}}}}}"#)).unwrap()
    }

    async fn fetch(&self, fields: &str) -> Result<FetchedSource> {
        self.fetcher.sources().fetch(&self.spec(fields)).await
    }

    async fn fetch_commit(&self, commit: &str) -> Result<FetchedSource> {
        self.fetch(&format!(r#""commit": "{commit}""#)).await
    }

    /// Returns the permanent error of a fetch.
    async fn refused(&self, fields: &str) -> String {
        let error = self.fetch(fields).await.unwrap_err();
        assert!(!error.is_transient(), "{error:?}");
        error.to_string()
    }

    fn archive(&self, cache: &str) -> Vec<u8> {
        let places = fs::read_dir(self.path(cache).join(KIND)).unwrap();
        let [place] = places.collect::<Vec<_>>().try_into().unwrap();
        fs::read(place.unwrap().path().join(ARCHIVE)).unwrap()
    }
}

fn fetcher(dir: &Path, cache: &str) -> Fetcher {
    let options = FetchOptions { apt_dir: dir.join("apt"), ..FetchOptions::default() };
    Fetcher::new(Cache::open(dir.join(cache)).unwrap(), options).with_definitions(dir.join("definitions"))
}

#[tokio::test]
async fn a_branch_and_a_tag_are_their_commits_and_a_commit_needs_no_server() {
    let scene = Scene::new();
    let first = scene.commit(&[("driver.c", b"one")], &[]);
    scene.git(&["tag", "--annotate", "--message", "v1", "v1"]);
    let second = scene.commit(&[("driver.c", b"two")], &[]);
    for (name, commit) in [("refs/heads/main", &second), ("refs/tags/v1", &first)] {
        let fields = format!(r#""ref": "{name}""#);
        let identity = scene.fetcher.sources().identity(&scene.spec(&fields)).await.unwrap();
        assert_eq!(identity.identity, format!("git:{commit}"));
        assert_eq!(scene.fetch(&fields).await.unwrap().origin, identity.identity);
    }
    let error = scene.refused(r#""ref": "refs/heads/v1""#).await;
    assert!(error.ends_with("the repository has no such branch or tag"), "{error}");
    assert!(scene.refused(&format!(r#""commit": "{}""#, "01".repeat(20))).await.contains("fetch 0101"));

    fs::rename(scene.path("driver"), scene.path("gone")).unwrap();
    let root = scene.fetch_commit(&first).await.unwrap().root;
    assert_eq!(fs::read_to_string(root.join("driver.c")).unwrap(), "one");
    let error = scene.fetch(r#""ref": "refs/heads/main""#).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot look up refs/heads/main of file://"), "{error}");
}

/// Content that git would change in a checkout or in `git archive`.
#[tokio::test]
async fn attributes_and_programs_of_a_repository_change_nothing() {
    let scene = Scene::new();
    let attributes = b"* text eol=crlf\n*.c filter=evil ident export-subst\nsecret export-ignore\n\
        *.txt working-tree-encoding=UTF-16\n";
    let files: [(&str, &[u8]); 4] = [
        (".gitattributes", attributes),
        ("driver.c", b"$Id$ $Format:%H$\n"),
        ("secret", b"\r\n\n"),
        ("sub dir/a.txt", "\u{e4}\n".as_bytes()),
    ];
    let commit = scene.commit(&files, &[]);
    let marker = scene.path("executed");
    let script = scene.path("evil");
    fs::write(&script, format!("#!/bin/sh\ntouch '{}'\nexec cat\n", marker.display())).unwrap();
    fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = script.to_str().unwrap();
    for setting in [
        "core.fsmonitor",
        "filter.evil.smudge",
        "filter.evil.clean",
        "core.sshCommand",
        "uploadpack.packObjectsHook",
    ] {
        scene.git(&["config", setting, program]);
    }
    for hook in ["post-checkout", "reference-transaction", "post-update", "pre-auto-gc"] {
        fs::create_dir_all(scene.path("driver/.git/hooks")).unwrap();
        fs::copy(&script, scene.path("driver/.git/hooks").join(hook)).unwrap();
    }
    let root = scene.fetch_commit(&commit).await.unwrap().root;
    for (path, content) in files {
        assert_eq!(fs::read(root.join(path)).unwrap(), content, "{path}");
    }
    assert!(!root.join(".git").exists() && !marker.exists());

    let other = fetcher(scene.dir.path(), "other");
    other.sources().fetch(&scene.spec(r#""ref": "refs/heads/main""#)).await.unwrap();
    assert_eq!(scene.archive("cache"), scene.archive("other"), "the same commit gives the same archive");
}

#[tokio::test]
async fn modes_and_links_are_kept_and_nothing_is_read_through_a_link() {
    let scene = Scene::new();
    scene.write("configure", b"#!/bin/sh\n");
    fs::set_permissions(scene.path("driver/configure"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("/etc", scene.path("driver/out")).unwrap();
    let commit = scene.commit(&[("a", b"")], &[]);
    let root = scene.fetch_commit(&commit).await.unwrap().root;
    let mode = |path: &str| fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("configure"), mode("a")), (0o755, 0o644));
    assert_eq!(fs::read_link(root.join("out")).unwrap(), Path::new("/etc"));
    let mut spec = scene.spec(&format!(r#""commit": "{commit}""#));
    spec.subdir = Some("out".parse().unwrap());
    assert!(
        scene.fetcher.sources().fetch(&spec).await.unwrap_err().to_string().contains("\"out\" in the source")
    );
}

#[tokio::test]
async fn names_that_leave_the_tree_are_refused() {
    let scene = Scene::new();
    let blob = scene.blob(b"x");
    let inner = scene.git_with(&["mktree"], format!("100644 blob {blob}\tconfig\n").as_bytes());
    for (mode, kind, name) in [
        ("040000", "tree", ".."),
        ("040000", "tree", ".git"),
        ("040000", "tree", ".GiT"),
        ("100644", "blob", "."),
    ] {
        let id = if kind == "tree" { &inner } else { &blob };
        let commit = scene.commit_tree(&format!("{mode} {kind} {id}\t{name}\n"));
        let error = scene.refused(&format!(r#""commit": "{commit}""#)).await;
        assert!(error.contains("fsck error") || error.contains("no source can have"), "{name}: {error}");
    }
    let line = |path: &str| format!("100644 blob {blob}\t{path}\0");
    for path in ["../x", "/x", "a/../x", "a//x", "./x", "a/.GIT/config", "a/."] {
        let error = archive::entries(line(path).as_bytes(), "x").unwrap_err().to_string();
        assert!(error.contains("has an invalid path"), "{path}: {error}");
    }
}

/// A few small trees that contain each other: git visits ten billion directories and prints nothing.
#[tokio::test]
async fn listing_a_tree_ends_with_the_fetch() {
    let scene = Scene::new();
    let mut tree = scene.git_with(&["mktree"], b"");
    for _ in 0..10 {
        let level: Vec<String> = (0..10).map(|number| format!("040000 tree {tree}\t{number}\n")).collect();
        tree = scene.git_with(&["mktree"], level.concat().as_bytes());
    }
    let commit = scene.git(&["commit-tree", "-m", "a tree", &tree]);
    scene.git(&["update-ref", "refs/heads/main", &commit]);
    let listing = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let arguments = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
        arguments.into_iter().any(|words| {
            String::from_utf8_lossy(&words).contains(&format!("ls-tree\0-r\0-z\0--full-tree\0{commit}"))
        })
    };
    tokio::select! {
        ended = scene.fetch_commit(&commit) => panic!("{:?}", ended.map(drop)),
        () = async { while !listing() { tokio::time::sleep(Duration::from_millis(20)).await } } => {}
    }
    while listing() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// libcurl reads `~/.netrc`, and ssh offers the keys in `~/.ssh`, also to hosts that an untrusted repository names.
#[tokio::test]
async fn git_uses_no_login_of_a_user() {
    let dir = tempfile::tempdir().unwrap();
    let environment = environment(&GitAccess::default(), dir.path(), "https", &[]).unwrap();
    let value = |name: &str| environment.iter().find(|(found, _)| found == name).unwrap().1.to_string();
    let scratch = dir.path().display().to_string();
    assert_eq!([value("HOME"), value("XDG_CONFIG_HOME")], [scratch.clone(), scratch]);
    let ssh = value("GIT_SSH_COMMAND");
    assert!(ssh.contains("-o IdentityAgent=none") && ssh.ends_with("-o IdentityFile=none"), "{ssh}");
}

#[test]
fn the_entries_of_all_trees_of_a_source_count() {
    let most = farrier_local::archive::Limits::default().entries;
    archive::check_weight(most, "x").unwrap();
    let error = archive::check_weight(most + 1, "x").unwrap_err().to_string();
    assert_eq!(error, format!("cannot archive x: more than {most} entries"));
    assert_eq!([255, 256, 4096].map(archive::weight), [1, 2, 17], "long names count as several entries");
}

#[tokio::test]
async fn a_file_in_lfs_is_named() {
    let scene = Scene::new();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    let commit = scene.commit(&[("a.c", b""), ("firmware/b.bin", pointer), ("z.bin", pointer)], &[]);
    let error = scene.refused(&format!(r#""commit": "{commit}""#)).await;
    assert!(error.ends_with(": firmware/b.bin is in Git LFS, which farrier does not fetch"), "{error}");
}

#[tokio::test]
async fn submodules_are_explicit_and_name_nothing_of_this_machine() {
    let scene = Scene::new();
    let module = scene.commit(&[("inner.c", b"")], &[]);
    for url in [
        "ext::sh -c id",
        "file:///srv/other.git",
        "/srv/other.git",
        "../other",
        "--upload-pack=id",
        "-u./x",
        "ssh://-oProxyCommand=id/x",
        "git://git.example/x",
        "http://git.example/x",
        "git.example:x",
    ] {
        let declared = scene.blob(format!("[submodule \"m\"]\n\tpath = m\n\turl = {url}\n").as_bytes());
        let tree = format!("100644 blob {declared}\t.gitmodules\n160000 commit {module}\tm\n");
        let commit = scene.commit_tree(&tree);
        let error = scene.refused(&format!(r#""commit": "{commit}", "submodules": true"#)).await;
        let is_named = error.contains("submodule m of file://") || error.contains("fsck error");
        assert!(is_named, "{url}: {error}");
        if !error.contains("fsck error") {
            let root = scene.fetch_commit(&commit).await.unwrap().root;
            assert_eq!(fs::read_dir(root.join("m")).unwrap().count(), 0, "{url}");
        }
    }
    let commit = scene.commit_tree(&format!("160000 commit {module}\tm\n"));
    let error = scene.refused(&format!(r#""commit": "{commit}", "submodules": true"#)).await;
    assert!(error.contains(".gitmodules"), "{error}");
    // Their number is limited before farrier looks for their addresses.
    let many: Vec<String> = (0..=200).map(|number| format!("160000 commit {module}\tm{number}\n")).collect();
    let commit = scene.commit_tree(&many.concat());
    let error = scene.refused(&format!(r#""commit": "{commit}", "submodules": true"#)).await;
    assert!(error.ends_with(": more than 200 submodules"), "{error}");
}

#[test]
fn addresses_of_submodules() {
    let listed = "submodule.a.path\nlibs/a\0submodule.a.url\n../../other/a.git\0submodule.b.c.path\nb\0\
        submodule.b.c.url\nhttps://else.example/b\0core.x\ny\0submodule.s.path\ns\0submodule.s.url\nssh://git@g.example/s\0";
    let declared = submodules::parse(listed);
    let top: Url = "https://g.example/team/driver.git".parse().unwrap();
    let address = |path: &str, top: &Url| submodules::address(&declared, Path::new(path), top, top);
    assert_eq!(address("libs/a", &top).unwrap().as_str(), "https://g.example/other/a.git");
    assert_eq!(address("b", &top).unwrap().as_str(), "https://else.example/b");
    let error = address("s", &top).unwrap_err().to_string();
    assert!(error.ends_with("so it must be `https://`"), "{error}");
    let top: Url = "ssh://git@g.example/team/driver.git".parse().unwrap();
    assert_eq!(address("s", &top).unwrap().as_str(), "ssh://git@g.example/s");
    let error = address("unknown", &top).unwrap_err().to_string();
    assert!(error.ends_with(".gitmodules does not declare it"), "{error}");
}

#[tokio::test]
async fn plain_http_needs_permission() {
    let scene = Scene::new();
    let mut spec = scene.spec(r#""ref": "refs/heads/main""#);
    let farrier_core::image::SourceOrigin::Git(source) = &mut spec.from else { panic!("another origin") };
    source.url = "http://git.example/x".parse().unwrap();
    let error = scene.fetcher.sources().identity(&spec).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot fetch http://git.example/x: plain HTTP to git.example:80 is not allowed"
    );
    assert!(error.hint().unwrap().contains("plainHttp"));
}

/// Creates an SSH key and an allowed-signers file with it in the definitions; returns git's arguments for signing.
fn ssh_key(scene: &Scene, name: &str) -> [String; 4] {
    let key = scene.path(name);
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key).status();
    assert!(made.unwrap().success());
    let public = fs::read_to_string(key.with_extension("pub")).unwrap();
    fs::write(scene.path("definitions").join(name), format!("person@example.org {public}")).unwrap();
    let key = format!("user.signingKey={}", key.display());
    ["-c".to_owned(), "gpg.format=ssh".to_owned(), "-c".to_owned(), key]
}

#[tokio::test]
async fn a_tag_or_a_commit_is_signed_with_a_given_key() {
    let scene = Scene::new();
    let (ours, others) = (ssh_key(&scene, "ours"), ssh_key(&scene, "others"));
    let [ours, others] = [&ours, &others].map(|key| key.each_ref().map(String::as_str));
    let plain = scene.commit(&[("a", b"1")], &[]);
    scene.git(&[&ours[..], &["tag", "--sign", "--message", "v1", "v1"]].concat());
    scene.git(&[&others[..], &["tag", "--sign", "--message", "v2", "v2"]].concat());
    scene.git(&["tag", "light"]);
    // The signed tag under another name.
    scene.git(&["update-ref", "refs/tags/v3", "refs/tags/v1"]);
    let signed = scene.commit(&[("a", b"2")], &[&ours[..], &["-c", "commit.gpgSign=true"]].concat());

    let by = r#""signedBy": "ours""#;
    for fields in
        ["\"ref\": \"refs/tags/v1\"", "\"ref\": \"refs/heads/main\"", &format!("\"commit\": \"{signed}\"")]
    {
        scene.fetch(&format!("{fields}, {by}")).await.unwrap();
    }
    // A cached tree is verified again with other keys.
    scene.fetch_commit(&plain).await.unwrap();
    for (fields, reason) in [
        ("\"ref\": \"refs/tags/v2\"".to_owned(), "No principal matched"),
        ("\"ref\": \"refs/tags/light\"".to_owned(), "it is not a tag object"),
        ("\"ref\": \"refs/tags/v3\"".to_owned(), "it was signed as \"v1\""),
        (format!("\"commit\": \"{plain}\""), "commit: it is not signed"),
        (
            format!(
                "\"ref\": \"refs/tags/v1\", \"commit\": \"{}\"",
                scene.git(&["commit-tree", "-m", "x", "main^{tree}"])
            ),
            "",
        ),
    ] {
        let error = scene.refused(&format!("{fields}, {by}")).await;
        assert!(error.contains(reason), "{fields}: {error}");
    }
    let error = scene.refused(&format!(r#""commit": "{plain}", {by}"#)).await;
    assert!(error.starts_with(&format!("cannot verify the signature of {plain} of file://")), "{error}");
    let error = scene.fetch(r#""ref": "refs/tags/v1", "signedBy": "absent""#).await.unwrap_err();
    assert!(matches!(error, FetchError::Absent(_)), "{error:?}");
}

#[tokio::test]
async fn openpgp_keys_vouch_too() {
    let scene = Scene::new();
    let home = scene.path("gnupg");
    fs::create_dir(&home).unwrap();
    fs::set_permissions(&home, std::fs::Permissions::from_mode(0o700)).unwrap();
    let gpg = |arguments: &[&str]| {
        let mut gpg = Command::new("gpg");
        gpg.args(["--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", "--homedir"]);
        let output = gpg.arg(&home).args(arguments).output().unwrap();
        assert!(output.status.success(), "gpg {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    for name in ["person@example.org", "other@example.org"] {
        gpg(&["--quick-generate-key", name, "ed25519", "sign", "never"]);
        fs::write(scene.path("definitions").join(name), gpg(&["--armor", "--export", name])).unwrap();
    }
    fs::write(scene.path("definitions/binary.gpg"), gpg(&["--export", "person@example.org"])).unwrap();
    let sign = ["-c", "commit.gpgSign=true", "-c", "user.signingKey=person@example.org"];
    let commit = scene.commit(&[("a", b"1")], &sign);
    Command::new("gpgconf").arg("--homedir").arg(&home).args(["--kill", "all"]).status().unwrap();
    for keys in ["person@example.org", "binary.gpg"] {
        scene.fetch(&format!(r#""commit": "{commit}", "signedBy": "{keys}""#)).await.unwrap();
    }
    let error = scene.refused(&format!(r#""commit": "{commit}", "signedBy": "other@example.org""#)).await;
    assert!(error.contains("Can't check signature: No public key"), "{error}");
}

/// A site without the repository finds the commit by the definition, or by its digits.
#[tokio::test]
async fn a_stored_commit_needs_no_repository() {
    let scene = Scene::new();
    let keys = ssh_key(&scene, "ours");
    let keys = keys.each_ref().map(String::as_str);
    let commit = scene.commit(&[("src/a.c", b"1")], &[&keys[..], &["-c", "commit.gpgSign=true"]].concat());
    let site = |cache: &str, offline: bool| {
        let location = RegistryLocation::Layout(scene.path("layout"));
        let registry = registry::connect(&location, &RegistryOptions::default());
        let net = Net::new(NetOptions { offline, ..NetOptions::default() }).unwrap();
        fetcher(scene.dir.path(), cache).with_net(net).with_store(Store::new(location, registry))
    };
    let by_ref = r#""ref": "refs/heads/main", "signedBy": "ours""#;
    let by_commit = format!(r#""commit": "{commit}""#);
    let here = site("here", false);
    for fields in [by_ref, &by_commit] {
        let mut spec = scene.spec(fields);
        spec.subdir = Some("src".parse().unwrap());
        assert!(here.sources().keep(&spec).await.unwrap().new, "{fields}");
        assert!(!here.sources().keep(&spec).await.unwrap().new, "{fields}");
    }
    fs::rename(scene.path("driver"), scene.path("gone")).unwrap();
    let there = site("there", true);
    for fields in [by_ref, &by_commit] {
        let mut spec = scene.spec(fields);
        spec.subdir = Some("src".parse().unwrap());
        let identity = there.sources().identity(&spec).await.unwrap().identity;
        assert_eq!(identity, format!("git:{commit} subdir=src"));
        let found = there.sources().fetch(&spec).await.unwrap();
        assert_eq!(found.origin, identity);
        assert_eq!(fs::read_to_string(found.root.join("a.c")).unwrap(), "1");
    }
    // With other keys, the stored copy is one of another definition.
    ssh_key(&scene, "others");
    fs::rename(scene.path("definitions/others"), scene.path("definitions/ours")).unwrap();
    let mut spec = scene.spec(by_ref);
    spec.subdir = Some("src".parse().unwrap());
    let error = there.sources().fetch(&spec).await.unwrap_err().to_string();
    assert!(error.contains("does not match the definition"), "{error}");
}
