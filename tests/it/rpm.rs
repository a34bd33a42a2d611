//! Signed RPM repositories behind TLS with client certificates: stand-in packages in the distributions' layouts, and a real
//! kernel's packages from `make binrpm-pkg`.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use farrier_core::kernel::{Architecture, HeaderSource, KernelFamily, KernelTarget};
use farrier_inputs::{FetchError, FetchOptions, Fetcher, HeaderLookup, KernelImageLookup, Lookup};
use farrier_local::cache::Cache;
use farrier_net::{Net, NetOptions};
use oci::error_chain;
use serde_json::{Value, json};

use crate::{
    rpm_toolchain::COMPILER,
    support::{
        certificates::{Authority, LATER},
        kept,
        own_kernel::{OwnKernel, own_kernel},
        packages::run,
        rpm_repository::{SigningKey, StandIn, index, tiny_headers},
        site::Site,
        tls_archive::TlsServer,
        virtual_machine::entrypoint,
    },
};

pub const ROCKY: &str = "5.14.0-503.11.1.el9_5.x86_64";
const ROCKY_RT: &str = "5.14.0-503.11.1.el9_5.x86_64+rt";
const NEWER: &str = "5.14.0-503.15.1.el9_5.x86_64";
const EUS: &str = "5.14.0-427.50.1.el9_4.x86_64";

/// A distribution's repositories at `https://acme.invalid/`, on a server that requires a client certificate.
pub struct World {
    pub key: SigningKey,
    authority: Authority,
    server: TlsServer,
    directory: tempfile::TempDir,
}

impl World {
    /// Starts the server on an empty directory.
    pub fn new() -> Self {
        let (directory, authority) = (tempfile::tempdir().unwrap(), Authority::new());
        authority.issue("server", "IP:127.0.0.1", LATER);
        authority.issue("client", "DNS:farrier.test", LATER);
        let served = directory.path().join("served");
        fs::create_dir_all(&served).unwrap();
        fs::create_dir(directory.path().join("definitions")).unwrap();
        let world = Self {
            key: SigningKey::new("acme"),
            server: TlsServer::start(&authority, &served),
            authority,
            directory,
        };
        world.define("acme.asc", &world.key.armored());
        world
    }

    pub fn served(&self, path: &str) -> PathBuf {
        self.directory.path().join("served").join(path)
    }

    pub fn definitions(&self) -> PathBuf {
        self.directory.path().join("definitions")
    }

    pub fn define(&self, file: &str, text: &str) {
        let file = self.definitions().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    /// Adds a signed kernel-devel in RHEL's layout to a repository, and indexes the repository.
    fn add(&self, repository: &str, name: &str, release: &str) -> PathBuf {
        let package = self.add_unsigned(repository, name, release);
        self.key.sign_package(&package);
        index(&self.served(repository), "gz", "sha256");
        package
    }

    fn add_unsigned(&self, repository: &str, name: &str, release: &str) -> PathBuf {
        let (version, rest) = release.split_once('-').unwrap();
        let package = StandIn {
            name,
            version,
            release: rest.split(".x86_64").next().unwrap(),
            provides: &format!("kernel-devel-uname-r = {release}"),
            requires: "",
            files: tiny_headers(&format!("usr/src/kernels/{release}"), release),
        };
        let package = package.build(&self.served(repository).join("Packages"));
        index(&self.served(repository), "gz", "sha256");
        package
    }

    /// Adds the packages from a script as a signed repository. The script builds them once for all tests and runs.
    pub fn add_made(&self, script: &str, place: &str, repository: &str) {
        let made = run(Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(script)).arg(kept(place)));
        let packages = self.served(repository).join("Packages");
        fs::create_dir_all(&packages).unwrap();
        let copied = fs::read_dir(made.trim_end()).unwrap().map(|package| {
            let package = package.unwrap();
            let copy = packages.join(package.file_name());
            fs::copy(package.path(), &copy).unwrap();
            copy
        });
        self.key.sign_packages(&copied.collect::<Vec<_>>());
        index(&self.served(repository), "gz", "sha256");
    }

    /// Returns the server's entries in `site.yaml`.
    pub fn site(&self) -> Value {
        let file = |name: &str| self.authority.path(name).display().to_string();
        json!({
            "mirrors": [{"from": "https://acme.invalid/", "to": [format!("https://{}/", self.server.host)]}],
            "hosts": [{
                "host": self.server.host, "caFile": file("ca.pem"), "clientCertificate": file("client.pem"),
                "clientKey": {"file": file("client.key")},
            }],
        })
    }

    pub fn fetcher(&self) -> Fetcher {
        self.fetcher_of(&self.site())
    }

    /// Returns a fetcher with a new, separate cache.
    pub fn fetcher_of(&self, site: &Value) -> Fetcher {
        self.fetcher_with(site, FetchOptions::default())
    }

    /// Returns a fetcher that contacts the repositories each time.
    pub fn asking_fetcher(&self) -> Fetcher {
        self.fetcher_with(&self.site(), FetchOptions { refresh: Duration::ZERO, ..FetchOptions::default() })
    }

    fn fetcher_with(&self, site: &Value, options: FetchOptions) -> Fetcher {
        let cache = tempfile::TempDir::with_prefix_in("cache-", self.directory.path()).unwrap().keep();
        let net = NetOptions {
            site: serde_json::from_value(site.clone()).unwrap(),
            root: self.definitions(),
            ..NetOptions::default()
        };
        Fetcher::new(Cache::open(cache).unwrap(), options)
            .with_net(Net::new(net).unwrap())
            .with_definitions(self.definitions())
    }

    pub async fn find(&self, headers: &HeaderSource, release: &str) -> Result<HeaderLookup, FetchError> {
        self.fetcher().headers().find(headers, &target(release)).await
    }

    /// Returns the origin of the headers, or panics if they are missing.
    #[track_caller]
    pub fn origin(found: Result<HeaderLookup, FetchError>) -> Vec<String> {
        match found.map_err(|error| error_chain(&error)) {
            Ok(Lookup::Found(set)) => {
                set.origin.iter().map(|o| o.split(' ').next().unwrap().to_owned()).collect()
            }
            other => panic!("{other:?}"),
        }
    }
}

pub fn target(release: &str) -> KernelTarget {
    KernelTarget {
        os: "rocky".parse().unwrap(),
        os_version: "9.5".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

/// Returns a header source with these packages.
pub fn headers(packages: &[&str], repositories: &[&str], signed: &str) -> HeaderSource {
    let from = archive(repositories, signed);
    serde_json::from_value(json!({"rpm": {"packages": packages, "from": from}})).unwrap()
}

/// Returns an archive with repositories below `https://acme.invalid/`.
pub fn archive(repositories: &[&str], signed: &str) -> Value {
    let url = |path: &&str| match path.strip_prefix("list:") {
        Some(list) => json!({"mirrorList": format!("https://acme.invalid/{list}")}),
        None => json!({"url": format!("https://acme.invalid/{path}")}),
    };
    let repositories: Vec<Value> = repositories.iter().map(url).collect();
    json!({"repositories": repositories, "signedBy": "acme.asc", "signed": signed})
}

#[track_caller]
fn missing<T: std::fmt::Debug>(found: Result<Lookup<T>, FetchError>) -> String {
    match found.map_err(|error| error_chain(&error)) {
        Ok(Lookup::Missing { looked_for, .. }) => looked_for,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn headers_of_each_form_are_found_behind_a_client_certificate() {
    let world = World::new();
    let package = world.add("9.5/BaseOS/x86_64/os", "kernel-devel", ROCKY);
    world.add("9.5/RT/x86_64/os", "kernel-rt-devel", ROCKY_RT);
    let rocky = headers(
        &["kernel-devel | kernel-rt-devel"],
        &["{{releasever}}/BaseOS/{{basearch}}/os/", "{{releasever}}/RT/{{basearch}}/os", "9/absent/"],
        "packages",
    );
    let found = world.find(&rocky, ROCKY).await;
    let Ok(Lookup::Found(set)) = &found else { panic!("{found:?}") };
    assert_eq!(set.facts.release.as_str(), ROCKY);
    assert_eq!(set.compiler.unwrap().to_string(), "gcc 11");
    assert!(set.root.join(format!("usr/lib/modules/{ROCKY}/build/Makefile")).exists(), "the link is missing");
    assert_eq!(World::origin(found), ["kernel-devel=5.14.0-503.11.1.el9_5.x86_64"]);
    assert_eq!(
        World::origin(world.find(&rocky, ROCKY_RT).await),
        ["kernel-rt-devel=5.14.0-503.11.1.el9_5.x86_64"]
    );
    let looked_for = missing(world.find(&rocky, NEWER).await);
    assert!(
        looked_for.starts_with("package kernel-devel or kernel-rt-devel, without https://127.0.0.1"),
        "{looked_for}"
    );
    assert!(looked_for.contains("/9/absent/ (missing)"), "{looked_for}");
    let near = format!("did you mean {ROCKY}?");
    let found = world.find(&rocky, NEWER).await;
    let Ok(Lookup::Missing { hint, .. }) = &found else { panic!("{found:?}") };
    assert!(hint.starts_with(&near), "{hint}");
    let looked_for = missing(world.fetcher().headers().look(&rocky, &target(NEWER)).await);
    assert!(looked_for.ends_with(&format!(" ({near})")), "{looked_for}");
    let entitled = headers(&["kernel-devel"], &["9.5/BaseOS/x86_64/os/", "eus/refused/"], "packages");
    let looked_for = missing(world.find(&entitled, NEWER).await);
    assert!(looked_for.contains("/eus/refused/repodata/repomd.xml (403)"), "{looked_for}");

    // A merged repository contains no packages: its index refers to the repository that does.
    let merged = world.served("merged");
    fs::create_dir_all(merged.join("Packages")).unwrap();
    fs::copy(&package, merged.join("Packages").join(package.file_name().unwrap())).unwrap();
    let base = ["--quiet", "--baseurl", "https://acme.invalid/9.5/BaseOS/x86_64/os/"];
    run(Command::new("createrepo_c").args(base).arg(&merged));
    fs::remove_dir_all(merged.join("Packages")).unwrap();
    let found = world.find(&headers(&["kernel-devel"], &["merged/"], "packages"), ROCKY).await;
    assert_eq!(World::origin(found), ["kernel-devel=5.14.0-503.11.1.el9_5.x86_64"]);

    // Without the client certificate, and then without a mirror.
    let mut site = world.site();
    site["hosts"][0]["clientCertificate"].take();
    site["hosts"][0]["clientKey"].take();
    let without = world.fetcher_of(&site);
    let error = without.headers().find(&rocky, &target(ROCKY)).await.unwrap_err();
    assert!(error_chain(&error).contains("CertificateRequired"), "{}", error_chain(&error));
    let nowhere = world.fetcher_of(&json!({}));
    let looked_for = missing(nowhere.headers().look(&rocky, &target(ROCKY)).await);
    assert!(
        looked_for.contains("https://acme.invalid/9.5/BaseOS/x86_64/os/ (no mirror in site.yaml)"),
        "{looked_for}"
    );
    fs::remove_file(world.definitions().join("acme.asc")).unwrap();
    let looked_for = missing(world.find(&rocky, ROCKY).await);
    assert!(looked_for.ends_with("acme.asc with the keys of the distribution"), "{looked_for}");
}

#[tokio::test]
async fn what_is_not_signed_or_not_the_same_is_refused() {
    let world = World::new();
    let source = headers(&["kernel-devel"], &["os/"], "packages");
    let package = world.add_unsigned("os", "kernel-devel", ROCKY);
    let refused = async |why: &str| {
        let error = world.find(&source, ROCKY).await.unwrap_err();
        assert!(matches!(error, FetchError::Signature { .. }), "{why}: {}", error_chain(&error));
        assert!(!error.is_transient() && error.hint().is_some(), "{why}");
    };
    refused("no signature").await;
    SigningKey::new("stranger").sign_package(&package);
    index(&world.served("os"), "gz", "sha256");
    refused("a stranger's").await;

    world.key.sign_package(&package);
    let mut bytes = fs::read(&package).unwrap();
    let end = bytes.len() - 20;
    bytes[end] ^= 1;
    fs::write(&package, &bytes).unwrap();
    let error = world.find(&source, ROCKY).await.unwrap_err();
    assert!(matches!(error, FetchError::Checksum { .. }), "{}", error_chain(&error));
    index(&world.served("os"), "gz", "sha256");
    refused("changed after it was signed").await;

    fs::write(world.served("os/repodata/repomd.xml"), "<html>Hello").unwrap();
    let error = world.find(&source, ROCKY).await.unwrap_err();
    assert!(matches!(error, FetchError::Metadata(..)), "{}", error_chain(&error));
}

#[tokio::test]
async fn replaced_keys_withdraw_what_the_old_ones_verified() {
    let world = World::new();
    world.add("os", "kernel-devel", ROCKY);
    let source = headers(&["kernel-devel"], &["os/"], "packages");
    let fetcher = world.fetcher();
    World::origin(fetcher.headers().find(&source, &target(ROCKY)).await);
    world.define("acme.asc", &SigningKey::new("other").armored());
    let error = fetcher.headers().find(&source, &target(ROCKY)).await.unwrap_err();
    assert!(matches!(error, FetchError::Signature { .. }), "{}", error_chain(&error));
}

/// New releases appear after the first request.
#[tokio::test]
async fn new_kernels_are_found_in_each_stream() {
    let world = World::new();
    world.add("os", "kernel-devel", ROCKY);
    world.add("eus", "kernel-devel", EUS);
    fs::write(world.served("mirrors"), "# mirrors\nhttps://acme.invalid/gone/\nhttps://acme.invalid/eus\n")
        .unwrap();
    let source = headers(&["kernel-devel | kernel-rt-devel"], &["os/", "list:mirrors"], "packages");
    let track = serde_json::from_value(json!({"packages": ["kernel-devel | kernel-rt-devel"]})).unwrap();
    let releases = async || {
        let fetcher = world.fetcher();
        let found = fetcher.headers().rpm_releases(&source, &track, &target(ROCKY)).await;
        let found = found.map_err(|error| error_chain(&error)).unwrap().unwrap();
        found
            .iter()
            .map(|kernels| kernels.iter().map(ToString::to_string).collect::<Vec<_>>())
            .collect::<Vec<_>>()
    };
    assert_eq!(releases().await, [vec![ROCKY], vec![EUS]]);
    // A recently fetched list counts as current. farrier refreshes an older list before it reports a missing package.
    let fetcher = world.asking_fetcher();
    let look = async |release| fetcher.headers().look(&source, &target(release)).await;
    assert!(missing(look(NEWER).await).starts_with("package kernel-devel"));
    world.add("os", "kernel-devel", NEWER);
    assert!(matches!(look(NEWER).await, Ok(Lookup::Found(None))));
    assert_eq!(releases().await[0].len(), 2);
}

/// A mirror during an update: the index appears before or after the packages that it names.
#[tokio::test]
async fn an_index_that_names_what_is_not_there_takes_nothing_away() {
    let world = World::new();
    world.add("os", "kernel-devel", ROCKY);
    let source = headers(&["kernel-devel"], &["os/"], "packages");
    let fetcher = world.asking_fetcher();
    let look = async |release| fetcher.headers().look(&source, &target(release)).await;
    assert!(matches!(look(ROCKY).await, Ok(Lookup::Found(None))));
    world.add("os", "kernel-devel", NEWER);
    let (metadata, away) = (world.served("os/repodata"), world.served("away"));
    let parts = fs::read_dir(&metadata).unwrap().map(|part| part.unwrap().file_name());
    let primary = parts.into_iter().find(|part| part.to_string_lossy().contains("primary.xml")).unwrap();
    fs::rename(metadata.join(&primary), &away).unwrap();
    let error = look(ROCKY).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().ends_with("is being updated"), "{error}");
    fs::rename(&away, metadata.join(&primary)).unwrap();
    for release in [ROCKY, NEWER] {
        assert!(matches!(look(release).await, Ok(Lookup::Found(None))), "{release}");
    }
}

/// A signed repository of the kernel that `ci/own-kernel` compiles, and a repository with a compiler.
struct OwnRepository {
    kernel: OwnKernel,
    world: World,
}

impl OwnRepository {
    fn new() -> Self {
        let (kernel, world) = (own_kernel(), World::new());
        world.add_made("ci/own-kernel-rpms", "own-kernel", "os");
        world.key.sign_file(&world.served("os/repodata/repomd.xml"));
        Self { kernel, world }
    }

    /// Creates a site whose family takes headers, kernel image and tracked kernel from one repository and the compiler from
    /// another.
    fn site(&self, keys: &Path) -> Site {
        self.world.add_made("ci/toolchain-rpms", "toolchain-rpms", "toolchain");
        let toolchain = json!({"rpm": {"packages": COMPILER, "from": archive(&["toolchain/"], "packages")}});
        let site = Site::new();
        fs::remove_file(site.definitions().join("images/broken.yaml")).unwrap();
        site.edit("images/hello.yaml", "  modules: [", "  check: {boot: true}\n  modules: [");
        site.define("acme.asc", &self.world.key.armored());
        let family = "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {name: acme}\nspec:\n  \
             match: {os: rocky, osVersion: '9\\.5'}\n  \
             headers:\n    rpm:\n      packages: [kernel-devel]\n      from:\n        \
             repositories: [{url: 'https://acme.invalid/os/'}]\n        signedBy: acme.asc\n        signed: both\n  \
             kernelImage: {rpm: {packages: [kernel]}}\n  track: {rpm: {packages: [kernel-devel]}}\n  \
             toolchain: ";
        site.define("kernels/05-acme.yaml", &format!("{family}{toolchain}\n"));
        // The toolchain's cache key depends on its definition, not on the content at the tests' address, so drop the shared
        // entry.
        fs::remove_file(site.cache().join("packages-root")).unwrap();
        // This kernel refuses unsigned modules.
        let (modules, images) = (keys.join("modules.pem"), keys.join("images.key"));
        fs::copy(self.kernel.signing_key(), &modules).unwrap();
        run(Command::new("openssl")
            .args(["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out"])
            .arg(&images));
        site.define("modules.crt", &run(Command::new("openssl").args(["x509", "-in"]).arg(&modules)));
        site.define(
            "images.pub",
            &run(Command::new("openssl").args(["pkey", "-pubout", "-in"]).arg(&images)),
        );
        let mut spec = self.world.site();
        spec["moduleSigning"] = json!({"key": {"file": modules}, "certificate": "modules.crt"});
        spec["imageSigning"] = json!({"key": {"file": images}, "publicKey": "images.pub"});
        let definition = json!({"apiVersion": "farrier.dev/v1alpha1", "kind": "Site", "metadata": {"name": "acme"}, "spec": spec});
        site.define("site.yaml", &definition.to_string());
        site
    }
}

/// A kernel from `make binrpm-pkg` and a compiler, both as RPM packages served over TLS: headers, toolchain, build, check, and
/// a boot of that exact kernel. Then the same on a disconnected site, from a bundle of the store's content.
#[test]
fn a_kernel_in_rpm_packages_from_the_repository_to_the_boot() {
    let repository = OwnRepository::new();
    let keys = tempfile::tempdir().unwrap();
    let site = repository.site(keys.path());
    let release = repository.kernel.release.clone();
    let release = release.as_str();
    let target = ["--kernel", release, "--os", "rocky", "--os-version", "9.5", "--arch", "amd64"];
    let entrypoint = entrypoint().display().to_string();
    let building = ["--entrypoint", &entrypoint, "build", "hello", "-o", "json"];
    let mut command = site.command(&[&building[..], &target, &["--push"]].concat());
    command.env("FARRIER_ENGINE", "sandbox");
    let built = site.finish(command.spawn().unwrap()).exits(0);
    let report = built.json();
    assert_eq!(
        (&report["outcome"], &report["check"]["verdict"]),
        (&"built".into(), &"loads".into()),
        "{built}"
    );
    assert_eq!(report["check"]["boot"]["modules"][0]["outcome"], "loaded", "{built}");
    assert_eq!(report["check"]["boot"]["kernel"], release, "{built}");

    let provenance = provenance(&site, report["digest"].as_str().unwrap());
    // The packages are repacked from Debian's, and so is the toolchain's os-release.
    for package in ["gcc-12", "make"] {
        assert!(
            provenance.contains(&format!("pkg:rpm/debian/{package}@")),
            "{package} is not in {provenance}"
        );
    }

    // Like with apt, the store holds header set, sources, toolchain and base, and a bundle carries them over. Then the
    // repositories go away.
    let kept = site.farrier(&[&["mirror", "-o", "json"][..], &target].concat()).exits(0).json();
    let kinds: Vec<&str> =
        kept.as_array().unwrap().iter().map(|kept| kept["kind"].as_str().unwrap()).collect();
    assert!(["headers", "source", "root-fs"].iter().all(|kind| kinds.contains(kind)), "{kept:#}");
    let bundle = site.path("site.bundle").display().to_string();
    site.farrier(&[&["bundle", "export", "--image", "hello", "--to", &bundle][..], &target].concat())
        .exits(0);
    // Keep the certificates, because site.yaml names them.
    let World { server, authority: _authority, key: _key, directory: _directory } = repository.world;
    drop(server);

    let other = Site::new();
    fs::remove_dir_all(other.cache()).unwrap();
    fs::create_dir(other.cache()).unwrap();
    let key = site.definitions().join("images.pub").display().to_string();
    let definitions = other.definitions().display().to_string();
    fs::remove_dir_all(&definitions).unwrap();
    let import = ["bundle", "import", &bundle, "--key", &key, "--definitions-to", &definitions];
    other.farrier(&import).exits(0);
    other.edit("images/hello.yaml", "  check: {boot: true}\n", "");
    let mut command = other.command(&[&building[..], &target, &["--force"]].concat());
    command.env("FARRIER_ENGINE", "sandbox").env("FARRIER_OFFLINE", "1");
    let offline = other.finish(command.spawn().unwrap()).exits(0);
    assert_eq!(offline.json()["check"]["verdict"], "loads", "{offline}");
}

/// Returns the image's provenance, which is a referrer of the image.
fn provenance(site: &Site, image: &str) -> String {
    let beside = site.inspect_raw(&format!("hello:{}", image.replace(':', "-")));
    let of_type = |one: &&Value| one["artifactType"] == "application/vnd.in-toto+json";
    let found = beside["manifests"].as_array().unwrap().iter().find(of_type).unwrap();
    let artifact = site.inspect_raw(&format!("hello@{}", found["digest"].as_str().unwrap()));
    String::from_utf8(site.registry.blob(artifact["layers"][0]["digest"].as_str().unwrap())).unwrap()
}

/// Without a build: headers and kernel image equal the output of the kernel's build, and tracking finds the kernel.
#[tokio::test]
async fn packages_of_make_binrpm_pkg_tell_their_kernel_by_their_files() {
    let OwnRepository { kernel, world } = OwnRepository::new();
    let release = kernel.release.as_str();
    let family: KernelFamily = serde_json::from_value(json!({
        "apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {"name": "acme"},
        "spec": {
            "match": {}, "toolchain": {"image": "localhost/x:1"},
            "headers": headers(&["kernel-devel"], &["os/"], "both"), "kernelImage": {"rpm": {"packages": ["kernel"]}},
        },
    }))
    .unwrap();
    let fetcher = world.fetcher();
    let found = fetcher.headers().find(&family.spec.headers, &target(release)).await.unwrap();
    let Lookup::Found(set) = found else { panic!("{found:?}") };
    assert_eq!(set.compiler.unwrap().to_string(), "gcc 12");
    assert!(set.facts.symbols.is_some_and(|table| !table.is_empty()));
    let image = fetcher.kernel_images().find(&family, &target(release)).await.unwrap();
    let KernelImageLookup::Found(image) = image else { panic!("{image:?}") };
    assert_eq!(fs::read(&image.vmlinuz).unwrap(), fs::read(kernel.vmlinuz()).unwrap());
    assert!(
        image.modules.is_some_and(|modules| modules.join("kernel/lib").is_dir())
            && image.system_map.is_some()
    );
    let again = fetcher.kernel_images().find_local(&family, &target(release)).await.unwrap();
    assert!(again.is_some(), "the cache lacks the fetched image");
    let track = serde_json::from_value(json!({"packages": ["kernel-devel"]})).unwrap();
    let releases = fetcher.headers().rpm_releases(&family.spec.headers, &track, &target(ROCKY)).await;
    assert_eq!(releases.unwrap().unwrap(), [vec![kernel.release]]);
}
