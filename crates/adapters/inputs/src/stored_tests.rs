use std::os::unix::fs::{PermissionsExt, symlink};

use farrier_local::{cache::Cache, machine::native};
use farrier_net::{Net, NetOptions};
use farrier_store::registry::{self, RegistryLocation, RegistryOptions};

use super::*;
use crate::{FetchOptions, FetchedSource, SourceIdentity};

/// Two sites with one cache each, and one registry.
struct Sites {
    dir: tempfile::TempDir,
}

impl Sites {
    fn new() -> Self {
        let sites = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(sites.here().join("driver")).unwrap();
        fs::create_dir_all(sites.there()).unwrap();
        fs::write(sites.here().join("driver/Kbuild"), "obj-m += x.o\n").unwrap();
        fs::write(sites.here().join("driver/configure"), "#!/bin/sh\n").unwrap();
        let executable = std::fs::Permissions::from_mode(0o755);
        fs::set_permissions(sites.here().join("driver/configure"), executable).unwrap();
        symlink("Kbuild", sites.here().join("driver/Makefile")).unwrap();
        sites
    }

    fn here(&self) -> PathBuf {
        self.dir.path().join("here")
    }

    fn there(&self) -> PathBuf {
        self.dir.path().join("there")
    }

    fn fetcher(&self, cache: &str, offline: bool) -> Fetcher {
        let location = RegistryLocation::Layout(self.dir.path().join("layout"));
        let registry = registry::connect(&location, &RegistryOptions::default());
        let apt_dir = self.dir.path().join("no-apt");
        let options = FetchOptions { apt_dir, ..FetchOptions::default() };
        let net = Net::new(NetOptions { offline, ..NetOptions::default() }).unwrap();
        Fetcher::new(Cache::open(self.dir.path().join(cache)).unwrap(), options)
            .with_net(net)
            .with_definitions(if cache == "cache" { self.here() } else { self.there() })
            .with_store(Store::new(location, registry))
    }

    /// Packs the driver like its publisher, and returns the file with its SHA-256.
    fn archive(&self) -> (PathBuf, String) {
        let path = self.dir.path().join("driver.tar");
        let mut tar = tar::Builder::new(fs::File::create(&path).unwrap());
        tar.append_dir_all(".", self.here().join("driver")).unwrap();
        tar.finish().unwrap();
        let sha256 = Digest::of(&fs::read(&path).unwrap()).hex().to_owned();
        (path, sha256)
    }

    /// Stores a file as the source of a definition, under its tags and with this identity. A connected site does this, and so can
    /// anyone with write access to the registry.
    async fn keep_as(
        &self,
        spec: &SourceSpec,
        file: &Path,
        identity: &str,
        version: Option<&str>,
    ) -> StoredUnder {
        let fetcher = self.fetcher("cache", false);
        let input = Input {
            kind: InputKind::Source,
            what: "x".to_owned(),
            tag: store::key_tag(&content_key(identity)).unwrap(),
            declared: Some(source_tag(spec).unwrap()),
        };
        let identity = Some(identity.to_owned());
        let notes = [(annotations::IDENTITY, identity), (annotations::VERSION, version.map(str::to_owned))];
        let bytes = fs::read(file).unwrap();
        let packed = Packed::original(file.to_owned(), Digest::of(&bytes).hex(), bytes.len() as u64).unwrap();
        fetcher.put(input, packed.with_annotations(notes)).await.unwrap()
    }
}

fn spec(from: &str) -> SourceSpec {
    serde_json::from_str(&format!(r#"{{"name": "driver", "from": {from}}}"#)).unwrap()
}

const FLOATING: &str = r#"{"apt": {"package": "driver-dkms", "suites": ["sid"]}}"#;
const FIXED: &str = r#"{"apt": {"package": "driver-dkms", "version": "1.2-3", "suites": ["sid"]}}"#;

#[tokio::test]
async fn a_source_that_lies_elsewhere_comes_from_the_store() {
    let sites = Sites::new();
    let spec = spec(r#"{"path": {"path": "driver"}}"#);
    let here = sites.fetcher("cache", false);
    let kept = here.sources().keep(&spec).await.unwrap();
    assert!(kept.new);
    assert!(!here.sources().keep(&spec).await.unwrap().new);

    let there = sites.fetcher("other-cache", true);
    let identity = here.sources().identity(&spec).await.unwrap();
    assert_eq!(there.sources().identity(&spec).await.unwrap(), identity);
    let FetchedSource { root, origin } = there.sources().fetch(&spec).await.unwrap();
    assert_eq!(origin, identity.identity);
    assert_eq!(fs::read_link(root.join("Makefile")).unwrap(), Path::new("Kbuild"));
    assert_eq!(fs::read_to_string(root.join("Kbuild")).unwrap(), "obj-m += x.o\n");
    assert_ne!(fs::metadata(root.join("configure")).unwrap().permissions().mode() & 0o111, 0);

    // Changed content has its own immutable tag, and the definition's tag moves to it.
    fs::write(sites.here().join("driver/Kbuild"), "obj-m += y.o\n").unwrap();
    let newer = here.sources().keep(&spec).await.unwrap();
    assert!(newer.new && newer.stored.digest != kept.stored.digest);
    let store = there.store().unwrap();
    let tags = store.tags(InputKind::Source).await.unwrap();
    assert_eq!(tags.len(), 3, "{tags:?}");
    assert_eq!(
        store.find(InputKind::Source, &kept.tags[0]).await.unwrap().unwrap().digest,
        kept.stored.digest
    );
    let newest = there.sources().identity(&spec).await.unwrap();
    assert_ne!(newest.identity, identity.identity);
}

/// A clone's remote may contain a token, and `git gc` does not change a source.
#[tokio::test]
async fn version_control_data_is_not_stored() {
    let sites = Sites::new();
    let spec = spec(r#"{"path": {"path": "driver"}}"#);
    let here = sites.fetcher("cache", false);
    let plain = here.sources().identity(&spec).await.unwrap();
    fs::create_dir(sites.here().join("driver/.git")).unwrap();
    fs::write(sites.here().join("driver/.git/config"), "url = https://x:token@r.example\n").unwrap();
    assert_eq!(here.sources().identity(&spec).await.unwrap(), plain);
    here.sources().keep(&spec).await.unwrap();
    let there = sites.fetcher("other-cache", true);
    let FetchedSource { root, origin } = there.sources().fetch(&spec).await.unwrap();
    assert_eq!(origin, plain.identity);
    assert!(root.join("Kbuild").is_file() && !root.join(".git").exists());
}

/// A tree stored by an older version, or by anyone with write access to the registry: no digest covers version-control data.
#[tokio::test]
async fn a_stored_tree_with_version_control_data_is_refused() {
    let sites = Sites::new();
    let spec = spec(r#"{"path": {"path": "driver"}}"#);
    let identity = sites.fetcher("cache", false).sources().identity(&spec).await.unwrap().identity;
    fs::create_dir(sites.here().join("driver/.git")).unwrap();
    fs::write(sites.here().join("driver/.git/x.tar"), "x").unwrap();
    sites.keep_as(&spec, &sites.archive().0, &identity, None).await;
    let error = sites.fetcher("other-cache", true).sources().fetch(&spec).await.unwrap_err();
    let said = oci::error_chain(&error);
    assert!(said.contains("it has version-control data (.git)"), "{said}");
}

#[tokio::test]
async fn a_package_that_may_be_newer_is_asked_upstream_but_offline() {
    let sites = Sites::new();
    let spec = spec(FLOATING);
    let (archive, sha256) = sites.archive();
    let identity = format!("driver-dkms=1.2-3 sha256:{sha256}");
    sites.keep_as(&spec, &archive, &identity, Some("1.2")).await;
    let offline = sites.fetcher("other-cache", true);
    let found = offline.sources().identity(&spec).await.unwrap();
    assert_eq!(found, SourceIdentity { identity, version: Some("1.2".to_owned()) });
    assert!(offline.sources().fetch(&spec).await.unwrap().root.join("Kbuild").is_file());
    // There is no apt configuration for a lookup.
    let asked = sites.fetcher("other-cache", false).sources().identity(&spec).await;
    assert!(matches!(asked, Err(FetchError::NoAptSource(_))), "{asked:?}");
}

#[tokio::test]
async fn a_fixed_version_comes_from_the_store_in_any_case() {
    let sites = Sites::new();
    let spec = spec(FIXED);
    let (archive, sha256) = sites.archive();
    sites.keep_as(&spec, &archive, &format!("driver-dkms=1.2-3 sha256:{sha256}"), Some("1.2")).await;
    let online = sites.fetcher("other-cache", false);
    assert!(online.sources().fetch(&spec).await.unwrap().root.join("Kbuild").is_file());
}

#[tokio::test]
async fn a_download_is_found_by_its_digest_and_verified_by_it() {
    let sites = Sites::new();
    let (archive, sha256) = sites.archive();
    let spec = |url: &str| spec(&format!(r#"{{"url": {{"url": "{url}", "sha256": "{sha256}"}}}}"#));
    let identity = format!("sha256:{sha256}");
    sites.keep_as(&spec("http://one.test/x.tar"), &archive, &identity, None).await;
    // The address does not matter; no server listens there.
    let elsewhere = spec("http://127.0.0.1:1/x.tar");
    let online = sites.fetcher("other-cache", false);
    let found = online.sources().fetch(&elsewhere).await.unwrap();
    assert!(found.root.join("Kbuild").is_file());
}

/// A writer to the registry can store any content under the right tags, with the right annotations.
#[tokio::test]
async fn a_stored_source_of_other_content_is_refused() {
    let good = Sites::new().archive().1;
    let pinned_url = format!(r#"{{"url": {{"url": "http://127.0.0.1:1/x.tar", "sha256": "{good}"}}}}"#);
    let pinned_path = format!(r#"{{"path": {{"path": "x.tar", "sha256": "{good}"}}}}"#);
    let (file, package, tree) =
        (format!("sha256:{good}"), format!("driver-dkms=1.2-3 sha256:{good}"), format!("tree sha256:{good}"));
    for (from, identity) in [
        (pinned_url.as_str(), file.as_str()),
        (pinned_path.as_str(), file.as_str()),
        (FIXED, package.as_str()),
        (FLOATING, package.as_str()),
        (r#"{"path": {"path": "driver"}}"#, tree.as_str()),
    ] {
        let (sites, spec) = (Sites::new(), spec(from));
        fs::write(sites.here().join("driver/Kbuild"), "obj-m += evil.o\n").unwrap();
        sites.keep_as(&spec, &sites.archive().0, identity, Some("1.2")).await;
        let there = sites.fetcher("other-cache", true);
        let error = there.sources().fetch(&spec).await.unwrap_err();
        assert!(matches!(&error, FetchError::Store(_)), "{from}: {error:?}");
        assert!(
            !sites
                .dir
                .path()
                .join("other-cache/sources")
                .read_dir()
                .is_ok_and(|mut left| left.next().is_some())
        );
    }

    // A stored source that itself claims another identity is refused too.
    for (from, identity) in [
        (pinned_path.as_str(), format!("sha256:{}", "ab".repeat(32))),
        (FIXED, format!("driver-dkms=1.2-2 sha256:{good}")),
        (FLOATING, format!("other=1.2-3 sha256:{good}")),
    ] {
        let (sites, spec) = (Sites::new(), spec(from));
        sites.keep_as(&spec, &sites.archive().0, &identity, Some("1.2")).await;
        let there = sites.fetcher("other-cache", true);
        let error = there.sources().identity(&spec).await.unwrap_err();
        assert!(oci::error_chain(&error).contains("which does not match the definition"), "{error}");
    }
}

/// A directory has no publisher's digest: the packed tree must match the identity.
#[tokio::test]
async fn a_stored_tree_of_other_content_is_refused() {
    let sites = Sites::new();
    let spec = spec(r#"{"path": {"path": "driver"}}"#);
    let here = sites.fetcher("cache", false);
    let identity = here.sources().identity(&spec).await.unwrap().identity;
    fs::write(sites.here().join("driver/Kbuild"), "obj-m += evil.o\n").unwrap();
    let input = Input {
        kind: InputKind::Source,
        what: "x".to_owned(),
        tag: store::key_tag(&content_key(&identity)).unwrap(),
        declared: Some(source_tag(&spec).unwrap()),
    };
    let packed = here.pack(sites.here().join("driver")).await.unwrap();
    here.put(input, packed.with_annotations([(annotations::IDENTITY, Some(identity))])).await.unwrap();
    let there = sites.fetcher("other-cache", true);
    let error = there.sources().fetch(&spec).await.unwrap_err();
    let said = oci::error_chain(&error);
    assert!(
        said.contains("it has a tree with the digest") && said.contains("the definition requires"),
        "{said}"
    );
}

#[test]
fn every_part_of_a_definition_counts() {
    let tags = [
        FLOATING,
        FIXED,
        r#"{"apt": {"package": "driver-dkms", "suites": ["bookworm"]}}"#,
        r#"{"path": {"path": "driver"}}"#,
        r#"{"path": {"path": "driver2"}}"#,
        r#"{"git": {"url": "https://g.test/a", "ref": "refs/tags/v1"}}"#,
        r#"{"git": {"url": "https://g.test/b", "ref": "refs/tags/v1"}}"#,
        r#"{"git": {"url": "https://g.test/a", "ref": "refs/tags/v2"}}"#,
        r#"{"git": {"url": "https://g.test/a", "ref": "refs/tags/v1", "submodules": true}}"#,
        r#"{"git": {"url": "https://g.test/a", "ref": "refs/tags/v1", "signedBy": "keys"}}"#,
        r#"{"git": {"url": "https://g.test/a", "commit": "0101010101010101010101010101010101010101"}}"#,
    ];
    let mut tags: Vec<Tag> = tags.iter().map(|from| source_tag(&spec(from)).unwrap()).collect();
    let subdir = SourceSpec { subdir: Some("x".parse().unwrap()), ..spec(FLOATING) };
    let unpack = SourceSpec { unpack: Some("x".parse().unwrap()), ..spec(FLOATING) };
    tags.extend([source_tag(&subdir).unwrap(), source_tag(&unpack).unwrap()]);
    tags.sort();
    let all = tags.len();
    tags.dedup();
    assert_eq!(tags.len(), all);
    // Packages have separate tags per architecture; the tags of amd64 packages are unchanged from earlier versions.
    let package = spec(r#"{"apt": {"package": "driver-dkms", "suites": ["bookworm"]}}"#);
    let [amd64, arm64] = [Architecture::Amd64, Architecture::Arm64]
        .map(|arch| source_tag(&package.for_architecture(arch)).unwrap());
    assert_eq!(amd64.as_str(), "declared-29f1d0d41bc00511c37b4cfdad92a32709f43904e1b115a9f3744c7571dddbc4");
    assert_ne!(amd64, arm64);
    assert_eq!(source_tag(&package).unwrap(), if native() == Architecture::Amd64 { amd64 } else { arm64 });
    // The source's name in an image does not count.
    let named = SourceSpec { name: "x".parse().unwrap(), ..spec(FLOATING) };
    assert_eq!(source_tag(&named).unwrap(), source_tag(&spec(FLOATING)).unwrap());
}
