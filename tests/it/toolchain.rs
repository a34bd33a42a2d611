//! Root file systems made from packages: toolchains that farrier assembles, compared with those that mmdebstrap installs.
use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use farrier_core::{
    image::Digest,
    kernel::{Architecture, BootstrapSpec, Toolchain},
};
use farrier_inputs::PackageRoot;
use farrier_local::cache::Cache;

use crate::{
    fetch::{fetcher, names, shared_cache},
    offline::MSTFLINT,
    support::{
        docker::docker,
        kernels::{self, new_cache},
        site::Site,
    },
};

fn packages(include: &[&str]) -> BootstrapSpec {
    BootstrapSpec {
        suite: "bookworm".parse().unwrap(),
        extra_suites: vec!["bookworm-security".parse().unwrap()],
        components: vec![],
        include: include.iter().map(|name| name.parse().unwrap()).collect(),
        mirror: None,
        signed_by: None,
    }
}

/// Returns a file of a layer.
pub fn in_layer(layer: &Path, name: &str) -> Vec<u8> {
    let output = Command::new("tar").arg("-xOf").arg(layer).arg(name).output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[tokio::test]
async fn root_file_system_with_a_toolchain() {
    let dir = tempfile::tempdir().unwrap();
    let cache = new_cache(dir.path());
    let root = PackageRoot::Toolchain(packages(&["make", "gcc-12", "gcc", "kmod"]));
    let rootfs = fetcher(&cache).root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap();
    assert_eq!(names(&cache, "packages-root"), [root.key(Architecture::Amd64)]);

    let layer = fs::read(&rootfs.file).unwrap();
    assert_eq!((rootfs.layer.size, &rootfs.layer.digest), (layer.len() as u64, &Digest::of(&layer)));
    let list = Command::new("tar").arg("-tvf").arg(&rootfs.file).output().unwrap();
    assert!(list.status.success());
    let list = String::from_utf8(list.stdout).unwrap();
    let has = |name: &str| list.lines().any(|line| line.ends_with(&format!(" {name}")));
    for name in [
        "usr/bin/gcc-12 -> x86_64-linux-gnu-gcc-12",
        "usr/bin/make",
        "usr/bin/kmod",
        "usr/share/doc/make/copyright",
        // Files that package scripts would create.
        "bin -> usr/bin",
        "lib64 -> usr/lib64",
        "usr/bin/awk -> mawk",
        "usr/bin/cc -> gcc",
        "usr/bin/c99 -> c99-gcc",
        "usr/bin/which -> which.debianutils",
        "usr/lib/cpp -> ../bin/cpp",
        "etc/passwd",
        "etc/group",
        "tmp/",
        "proc/",
    ] {
        assert!(has(name), "{name} is not in the layer");
    }
    for name in ["dev/null", "etc/resolv.conf", "etc/hostname", "etc/apt/sources.list.d/", "usr/bin/apt-get"]
    {
        assert!(!has(name), "{name} is in the layer");
    }
    assert!(!list.contains("usr/share/man/man1/"), "manual pages are in the layer");
    // All files belong to root, and none is setuid, setgid or a device.
    for line in list.lines() {
        let (mode, rest) = line.split_once(' ').unwrap();
        assert!(rest.starts_with("0/0 ") && !mode.contains(['s', 'S', 'c', 'b']), "{line}");
    }
    let status = String::from_utf8(in_layer(&rootfs.file, "var/lib/dpkg/status")).unwrap();
    for package in ["gcc-12", "libc6", "bash", "mawk"] {
        assert!(status.contains(&format!("Package: {package}\n")), "{package} is not in dpkg's list");
    }

    // The second call finds the result in the cache.
    let started = Instant::now();
    assert_eq!(fetcher(&cache).root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap(), rootfs);
    assert!(started.elapsed() < Duration::from_secs(1));
}

/// farrier runs no program from the packages, so packages of another architecture work, too.
#[tokio::test]
async fn a_toolchain_of_another_architecture() {
    let cache = shared_cache();
    let root = PackageRoot::Toolchain(packages(&["make"]));
    let rootfs = fetcher(&cache).root_fs().bootstrap(&root, Architecture::Arm64).await.unwrap();
    let make = in_layer(&rootfs.file, "usr/bin/make");
    // `e_machine` of the ELF header: EM_AARCH64.
    assert_eq!(make.get(18..20), Some(&[183, 0][..]));
    in_layer(&rootfs.file, "usr/lib/aarch64-linux-gnu/libc.so.6");
}

#[tokio::test]
async fn root_file_system_of_packages_that_do_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let cache = new_cache(dir.path());
    let spec = packages(&["no-such-package"]);
    for root in [PackageRoot::Toolchain(spec.clone()), PackageRoot::RuntimeBase(spec.clone())] {
        let error = fetcher(&cache).root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap_err();
        assert!(error.to_string().contains("no-such-package"), "{error}");
        assert!(!error.is_transient());
        assert_eq!(names(&cache, "packages-root"), Vec::<String>::new());
    }
    // Definitions cannot contain a name that a shell would interpret, so no tool receives one.
    let mut hostile = serde_json::to_value(&spec).unwrap();
    hostile["include"] = serde_json::json!(["$(reboot)"]);
    assert!(serde_json::from_value::<BootstrapSpec>(hostile).is_err());
}

/// Returns the number of processes whose command line contains the text.
fn processes(text: &str) -> usize {
    let lines =
        fs::read_dir("/proc").unwrap().filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok());
    lines.filter(|line| String::from_utf8_lossy(line).contains(text)).count()
}

#[tokio::test]
async fn a_cancelled_bootstrap_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = new_cache(dir.path());
    // A selection of packages that no other test uses identifies this test's processes.
    let root = PackageRoot::RuntimeBase(packages(&["ed", "make"]));
    let marker = "--include=ed,make";
    let (fetcher, started) = (fetcher(&cache), Instant::now());
    let running = async {
        while processes(marker) == 0 {
            assert!(started.elapsed() < Duration::from_mins(1), "mmdebstrap does not start");
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        result = fetcher.root_fs().bootstrap(&root, Architecture::Amd64) => panic!("{result:?}"),
        () = running => {}
    }
    assert_eq!(processes(marker), 0);
    assert_eq!(names(&cache, "packages-root"), Vec::<String>::new());
}

/// Returns the digest of mstflint's payload for a kernel.
fn payload(site: &Site, kernel: &str) -> String {
    let built = site.build("mstflint", kernel, &["--push", "-o", "json"]).exits(0).json();
    assert_eq!(built["outcome"], "built", "{built}");
    let image = site.inspect(&format!("mstflint@{}", built["digest"].as_str().unwrap()));
    image["Layers"].as_array().unwrap().last().unwrap().as_str().unwrap().to_owned()
}

/// A toolchain that mmdebstrap installs from the same packages with their scripts compiles the same bytes.
#[tokio::test(flavor = "multi_thread")]
async fn what_it_compiles_is_what_mmdebstrap_s_compiles() {
    let kernel = kernels::newest().newer;
    let (site, other) = (Site::new(), Site::new());
    for site in [&site, &other] {
        site.define("images/mstflint.yaml", MSTFLINT);
    }
    let assembled = payload(&site, &kernel);

    let definitions = farrier_definitions::load(Some(&site.definitions())).unwrap();
    let family =
        definitions.families.iter().find(|found| found.metadata.name.as_str() == "debian-12").unwrap();
    let Toolchain::Bootstrap(spec) = &family.spec.toolchain else { panic!("no bootstrap") };
    let fetcher = fetcher(&Cache::open(kernels::shared_cache()).unwrap());
    let root = PackageRoot::RuntimeBase(spec.clone());
    let made = fetcher.root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap();
    let image = format!("{}/mmdebstrap:1", other.location);
    docker(&["import", made.file.to_str().unwrap(), &image]);
    docker(&["push", &image]);
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/10-debian-12.yaml")).unwrap();
    let (head, _) = text.split_once("  toolchain:").unwrap();
    let toolchain = format!("  toolchain: {{image: \"{image}\"}}\n");
    other.define("kernels/10-debian-12.yaml", &format!("{head}{toolchain}"));
    let installed = payload(&other, &kernel);
    docker(&["rmi", &image]);
    assert_eq!(assembled, installed);
}
