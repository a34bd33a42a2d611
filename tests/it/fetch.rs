//! Fetching from the host's package mirrors through apt, and over HTTP on loopback.
use std::{
    fs,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use farrier_core::{
    image::{Digest, MinimalSpec, SourceSpec},
    kernel::{Architecture, HeaderSource, KernelTarget},
};
use farrier_inputs::{FetchError, FetchOptions, Fetcher, HeaderLookup, HeaderSet};
use farrier_local::cache::Cache;
use tempfile::TempDir;

use crate::support::kept;

/// A cache shared by all tests that fetch package lists, like the cache of one user's concurrent farriers.
pub fn shared_cache() -> Cache {
    Cache::open(kept("fetch-cache")).unwrap()
}

pub fn fetcher(cache: &Cache) -> Fetcher {
    Fetcher::new(cache.clone(), FetchOptions::default())
}

fn target(release: &str) -> KernelTarget {
    KernelTarget {
        os: "debian".parse().unwrap(),
        os_version: "12".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

fn debian_headers() -> HeaderSource {
    let json = r#"{"apt": {"packages": ["linux-headers-{{release}}"], "suites": ["bookworm", "bookworm-security"]}}"#;
    serde_json::from_str(json).unwrap()
}

fn source(json: &str) -> SourceSpec {
    serde_json::from_str(&format!(r#"{{"name": "driver", {json}}}"#)).unwrap()
}

/// Returns the newest 6.1 release with headers, according to farrier's private apt lists.
async fn newest_release(cache: &Cache) -> String {
    let missing = lookup(cache, &target("6.1.0-0-amd64")).await;
    assert!(matches!(missing, HeaderLookup::Missing { .. }));
    let config = fs::read_dir(cache.root().join("apt")).unwrap();
    let mut releases: Vec<(u32, String)> = config
        .flat_map(|state| {
            let state = state.unwrap().path().join("apt.conf");
            let output = Command::new("apt-cache")
                .arg("-c")
                .arg(state)
                .args(["search", "--names-only", r"^linux-headers-6\.1\.0-[0-9]+-amd64$"])
                .output()
                .unwrap();
            String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .filter_map(|line| {
            let release = line.split(' ').next()?.strip_prefix("linux-headers-")?.to_owned();
            let abi = release.split('-').nth(1)?.parse().ok()?;
            Some((abi, release))
        })
        .collect();
    releases.sort();
    releases.pop().expect("the mirror contains a 6.1 kernel").1
}

async fn lookup(cache: &Cache, target: &KernelTarget) -> HeaderLookup {
    fetcher(cache).headers().find(&debian_headers(), target).await.unwrap()
}

async fn found(cache: &Cache, target: &KernelTarget) -> HeaderSet {
    match lookup(cache, target).await {
        HeaderLookup::Found(headers) => *headers,
        HeaderLookup::Missing { looked_for, .. } => panic!("missing: {looked_for}"),
    }
}

#[tokio::test]
async fn header_set_from_packages() {
    let shared = shared_cache();
    let release = newest_release(&shared).await;
    let target = target(&release);

    // Two concurrent lookups with separate cache objects, like two processes.
    let (a, b) = (shared_cache(), shared_cache());
    let (first, second) = tokio::join!(found(&a, &target), found(&b, &target));
    assert_eq!((&first.root, &first.key), (&second.root, &second.key));

    let names: Vec<&str> = first.origin.iter().filter_map(|o| o.split('=').next()).collect();
    assert!(names.contains(&format!("linux-headers-{release}").as_str()), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with("-common")), "{names:?}");
    assert!(names.iter().any(|name| name.starts_with("linux-kbuild-")), "{names:?}");
    assert!(
        !names.iter().any(|name| name.starts_with("gcc") || name.starts_with("linux-image")),
        "{names:?}"
    );

    let tree = &first.root;
    assert!(!tree.join("lib").exists(), "a lib directory would replace the toolchain's link");
    let build = fs::read_link(tree.join("usr/lib/modules").join(&release).join("build")).unwrap();
    let build = tree.join(build.strip_prefix("/").unwrap());
    assert!(build.join("Module.symvers").is_file() && build.join("scripts/Makefile.build").is_file());
    assert_eq!(first.facts.release, target.release);
    assert!(first.facts.symbols.is_some());
    assert_eq!(first.compiler.unwrap().to_string(), "gcc 12");

    // With a warm cache farrier only reads files. The limit is generous because this is a debug build.
    let started = Instant::now();
    assert_eq!(found(&shared, &target).await.key, first.key);
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[tokio::test]
async fn headers_that_no_suite_has() {
    let cache = shared_cache();
    for release in ["6.1.0-999-amd64", "6.1.0-acme_X+"] {
        match lookup(&cache, &target(release)).await {
            HeaderLookup::Missing { looked_for, hint } => {
                assert!(looked_for.contains(&format!("linux-headers-{release}")), "{looked_for}");
                assert!(looked_for.contains("bookworm, bookworm-security"), "{looked_for}");
                assert!(hint.contains("tarball"), "{hint}");
            }
            HeaderLookup::Found(headers) => panic!("{:?}", headers.origin),
        }
    }
}

#[tokio::test]
async fn headers_of_a_foreign_architecture() {
    let cache = shared_cache();
    let target = KernelTarget { arch: Architecture::Arm64, ..target("6.1.0-999-arm64") };
    match lookup(&cache, &target).await {
        HeaderLookup::Missing { looked_for, .. } => assert!(looked_for.contains("(arm64)"), "{looked_for}"),
        HeaderLookup::Found(headers) => panic!("{:?}", headers.origin),
    }
}

#[tokio::test]
async fn a_suite_that_the_mirror_lacks() {
    let cache = shared_cache();
    let json = r#"{"apt": {"packages": ["linux-headers-{{release}}"], "suites": ["no-such-suite"]}}"#;
    let source = serde_json::from_str(json).unwrap();
    let error = fetcher(&cache).headers().find(&source, &target("6.1.0-1-amd64")).await.unwrap_err();
    assert!(error.to_string().contains("does not have a Release file"), "{error}");
    assert!(!error.is_transient());
    assert!(error.hint().unwrap().contains("mirror"));

    // Next to an existing suite, a missing suite is only a finding, and the existing suite counts.
    let json =
        r#"{"apt": {"packages": ["linux-headers-{{release}}"], "suites": ["no-such-suite", "bookworm"]}}"#;
    let source = serde_json::from_str(json).unwrap();
    let found = fetcher(&cache).headers().find(&source, &target("6.1.0-999-amd64")).await;
    let HeaderLookup::Missing { looked_for, .. } = found.unwrap() else { panic!("headers were found") };
    assert!(looked_for.contains("linux-headers-6.1.0-999-amd64, without http"), "{looked_for}");
    assert!(looked_for.contains(" no-such-suite (missing)"), "{looked_for}");
}

#[tokio::test]
async fn a_mirror_that_does_not_answer() {
    let cache = shared_cache();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let json = format!(
        r#"{{"apt": {{"packages": ["x-{{{{release}}}}"], "suites": ["bookworm"], "mirror": "http://127.0.0.1:{port}/debian"}}}}"#
    );
    let source = serde_json::from_str(&json).unwrap();
    let error = fetcher(&cache).headers().find(&source, &target("6.1.0-1-amd64")).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
}

#[tokio::test]
async fn source_from_a_package_of_another_suite() {
    let cache = shared_cache();
    let spec = source(
        r#""from": {"apt": {"package": "mstflint-dkms", "suites": ["sid"]}}, "subdir": "usr/src/mstflint-*""#,
    );
    let identity = fetcher(&cache).sources().identity(&spec).await.unwrap();
    assert!(identity.identity.starts_with("mstflint-dkms="), "{}", identity.identity);
    let version = identity.version.unwrap();
    assert!(!version.contains([':', '-']), "{version}");
    let fetched = fetcher(&cache).sources().fetch(&spec).await.unwrap();
    assert!(fetched.root.join("Makefile").is_file());
    assert_eq!(fetched.origin, identity.identity);

    // The missing suite may have a newer version.
    let incomplete =
        source(r#""from": {"apt": {"package": "mstflint-dkms", "suites": ["no-such-suite", "sid"]}}"#);
    let error = fetcher(&cache).sources().identity(&incomplete).await.unwrap_err();
    assert!(error.to_string().contains(" no-such-suite (missing)"), "{error}");

    let absent = source(r#""from": {"apt": {"package": "no-such-package", "suites": ["sid"]}}"#);
    let error = fetcher(&cache).sources().identity(&absent).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot find package no-such-package in sid");
}

/// A header set supplied by a user: an archive of a build tree, created by GNU tar.
#[tokio::test]
async fn header_set_from_a_tarball() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("cache")).unwrap();
    let release = "6.1.192-acme+";
    let build = dir.path().join("linux-6.1.192");
    for (file, text) in [
        ("Makefile", ""),
        ("Module.symvers", "0x12345678\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n"),
        ("include/config/kernel.release", "6.1.192-acme+\n"),
        ("include/generated/utsrelease.h", "#define UTS_RELEASE \"6.1.192-acme+\"\n"),
        (
            "include/config/auto.conf",
            "CONFIG_CC_VERSION_TEXT=\"gcc (GCC) 12.2.0\"\nCONFIG_X86_64=y\nCONFIG_64BIT=y\n",
        ),
    ] {
        fs::create_dir_all(build.join(file).parent().unwrap()).unwrap();
        fs::write(build.join(file), text).unwrap();
    }
    let tar = |flag: &str, name: &str| {
        let status = Command::new("tar")
            .arg(flag)
            .arg(dir.path().join(name))
            .arg("-C")
            .arg(dir.path())
            .arg("linux-6.1.192")
            .status()
            .unwrap();
        assert!(status.success());
    };
    tar("-cJf", "headers-6.1.192-acme+.tar.xz");
    let headers = |path: &str| -> HeaderSource {
        serde_json::from_str(&format!(r#"{{"tarball": {{"path": "{path}"}}}}"#)).unwrap()
    };
    let look = async |path: &str, release: &str| {
        fetcher(&cache)
            .with_definitions(dir.path().to_owned())
            .headers()
            .find(&headers(path), &target(release))
            .await
    };
    let mut identities = Vec::new();
    for path in ["headers-{{release}}.tar.xz", "linux-6.1.192"] {
        let HeaderLookup::Found(found) = look(path, release).await.unwrap() else { panic!("missing") };
        assert!(found.root.join("usr/lib/modules/6.1.192-acme+/build/Module.symvers").is_file());
        assert_eq!(found.compiler.unwrap().to_string(), "gcc 12");
        identities.push(found.identity);
    }
    assert_ne!(identities[0], identities[1]);
    assert!(build.join("Makefile").is_file(), "the user's tree is unchanged");

    let HeaderLookup::Missing { looked_for, .. } =
        look("headers-{{release}}.tar.xz", "6.1.193").await.unwrap()
    else {
        panic!("found")
    };
    assert!(looked_for.ends_with("headers-6.1.193.tar.xz"), "{looked_for}");
    let error = look("headers-6.1.192-acme+.tar.xz", "6.1.193").await.unwrap_err();
    assert!(matches!(error, FetchError::Tree(_)), "{error}");
    let whole = fs::read(dir.path().join("headers-6.1.192-acme+.tar.xz")).unwrap();
    fs::write(dir.path().join("cut.tar.xz"), &whole[..whole.len() / 2]).unwrap();
    let error = look("cut.tar.xz", release).await.unwrap_err();
    assert!(matches!(error, FetchError::Unpack(..)), "{error}");
    assert!(!names(&cache, "headers").iter().any(|name| name.starts_with('.')), "no partial entry is left");
}

pub fn names(cache: &Cache, kind: &str) -> Vec<String> {
    let names = fs::read_dir(cache.root().join(kind)).unwrap();
    names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

const BODY: &[u8] = b"int init_module(void) { return 0; }\n";

/// Starts a loopback server that answers each connection according to its path, and ends with the process.
fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            // Ignore clients that disconnect early.
            let _ = connection.and_then(answer);
        }
    });
    address
}

fn answer(mut connection: TcpStream) -> std::io::Result<()> {
    let mut request = Vec::new();
    let mut buffer = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let count = connection.read(&mut buffer)?;
        request.extend_from_slice(&buffer[..count]);
    }
    let path = String::from_utf8_lossy(&request).split(' ').nth(1).unwrap_or_default().to_owned();
    let (status, length, body) = match path.as_str() {
        "/module.c" => ("200 OK", BODY.len(), BODY),
        "/truncated.c" => ("200 OK", BODY.len() + 100, BODY),
        "/huge.c" => ("200 OK", 1 << 50, BODY),
        "/broken.c" => ("500 Internal Server Error", 0, &b""[..]),
        _ => ("404 Not Found", 0, &b""[..]),
    };
    write!(connection, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n")?;
    connection.write_all(body)
}

struct Downloads {
    _dir: TempDir,
    cache: Cache,
    address: String,
}

impl Downloads {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().join("cache")).unwrap();
        Self { _dir: dir, cache, address: serve() }
    }

    async fn get(&self, path: &str, sha256: &str) -> Result<PathBuf, FetchError> {
        let json = format!(r#""from": {{"url": {{"url": "{}{path}", "sha256": "{sha256}"}}}}"#, self.address);
        fetcher(&self.cache).sources().fetch(&source(&json)).await.map(|fetched| fetched.root)
    }
}

#[tokio::test]
async fn source_from_an_address() {
    let downloads = Downloads::new();
    let digest = Digest::of(BODY);
    let sha256 = digest.hex();
    let root = downloads.get("/module.c", sha256).await.unwrap();
    assert_eq!(fs::read(root.join("module.c")).unwrap(), BODY);

    let other = "0".repeat(64);
    let error = downloads.get("/module.c", &other).await.unwrap_err();
    assert!(error.to_string().contains(sha256) && error.to_string().contains(&other), "{error}");
    assert!(!error.is_transient());

    let error = downloads.get("/truncated.c", &"1".repeat(64)).await.unwrap_err();
    assert!(matches!(error, FetchError::Truncated { received: 36, announced: 136, .. }), "{error:?}");
    assert!(error.is_transient());

    let error = downloads.get("/broken.c", &"2".repeat(64)).await.unwrap_err();
    assert!(error.to_string().ends_with("the server answers 500") && error.is_transient(), "{error}");

    let error = downloads.get("/huge.c", &"4".repeat(64)).await.unwrap_err();
    assert!(
        error.to_string().contains("the download is larger than 8589934592 bytes") && !error.is_transient(),
        "{error}"
    );

    let error = downloads.get("/absent.c", &"3".repeat(64)).await.unwrap_err();
    assert!(error.to_string().ends_with("the server answers 404") && !error.is_transient(), "{error}");

    assert_eq!(names(&downloads.cache, "downloads"), [sha256], "no partial download is left");
}

#[tokio::test]
async fn a_server_that_is_not_there() {
    let mut downloads = Downloads::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    downloads.address = format!("http://127.0.0.1:{port}");
    let error = downloads.get("/module.c", &"0".repeat(64)).await.unwrap_err();
    assert!(matches!(error, FetchError::Transfer(..)) && error.is_transient(), "{error}");
}

/// The minimal base contains the probes' commands and every tool that it links to busybox.
#[tokio::test]
async fn the_minimal_base_has_what_probes_call() {
    let dir = tempfile::tempdir().unwrap();
    let spec: MinimalSpec = serde_json::from_str(r#"{"suites": ["bookworm"]}"#).unwrap();
    let cache = shared_cache();
    let base = fetcher(&cache).root_fs().minimal(&spec, Architecture::Amd64).await.unwrap();
    assert!(base.layer.size < 2 << 20, "{} bytes", base.layer.size);
    assert_eq!(Digest::of(&fs::read(&base.file).unwrap()), base.layer.digest);
    assert_eq!(fetcher(&cache).root_fs().minimal(&spec, Architecture::Amd64).await.unwrap(), base);

    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let unpacked = Command::new("tar").arg("-C").arg(&root).arg("-xf").arg(&base.file).status().unwrap();
    assert!(unpacked.success());
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "chroot"]).arg(&root).args(["/bin/sh", "-c", script]);
        let output = command.env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").output().unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    // lsmod reads /proc/modules, so a file replaces it.
    fs::write(root.join("proc/modules"), "mlx5_core 1 0 - Live 0x0\n").unwrap();
    inside("touch /run/.driver-ready && ls /run/.driver-ready && lsmod | grep mlx5_core");
    assert_eq!(inside("grep root /etc/passwd | cut -d: -f7"), "/bin/sh\n");
    let known = inside("busybox --list");
    let tools = names_of(&root.join("bin"));
    assert!(tools.len() > 80);
    for tool in tools {
        assert!(known.lines().any(|line| line == tool), "busybox has no {tool}");
    }
}

/// When the package archive is unreachable, farrier uses the last known identity and the cached base.
#[tokio::test]
async fn the_minimal_base_is_there_without_a_network() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().to_owned()).unwrap();
    let spec: MinimalSpec = serde_json::from_str(r#"{"suites": ["bookworm"]}"#).unwrap();
    let base = fetcher(&cache).root_fs().minimal(&spec, Architecture::Amd64).await.unwrap();
    // Configure a host whose archive address has no listener.
    let apt_dir = dir.path().join("etc-apt");
    fs::create_dir_all(apt_dir.join("sources.list.d")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let source = format!(
        "Types: deb\nURIs: http://127.0.0.1:{port}/debian\nSuites: bookworm\nComponents: main\n\
         Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    );
    fs::write(apt_dir.join("sources.list.d/debian.sources"), source).unwrap();
    let offline = Fetcher::new(cache.clone(), FetchOptions { refresh: Duration::ZERO, apt_dir });
    assert_eq!(offline.root_fs().minimal(&spec, Architecture::Amd64).await.unwrap(), base);
    // A base that was never fetched before is an error.
    let other: MinimalSpec =
        serde_json::from_str(r#"{"suites": ["bookworm"], "package": "busybox"}"#).unwrap();
    let error = offline.root_fs().minimal(&other, Architecture::Amd64).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
}

/// Returns the names in a directory.
fn names_of(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
