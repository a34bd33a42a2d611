//! Tests farrier's kernel families, each on the newest kernel with available packages. A driver is built, checked and booted
//! with only the shipped definitions, as a user would.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::{
    Architecture, HeaderSource, KernelFamily, KernelRelease, KernelTarget, Toolchain, debian_version,
    match_family,
};
use farrier_definitions as definitions;
use farrier_inputs::{FetchOptions, Fetcher, HeaderLookup, PackageRoot};
use farrier_local::cache::Cache;
use farrier_payload::ENTRYPOINT;
use serde_json::json;

use crate::support::{
    docker::docker,
    kept,
    kernels::shared_cache,
    packages::{run, unpacked},
    site::{Run, Site, skopeo},
    virtual_machine::entrypoint,
};

/// Debian's families, each with a matching version of Debian.
const DEBIAN: [(&str, &str); 8] = [
    ("debian-11", "11"),
    ("debian-12", "12"),
    ("debian-12-lts", "12"),
    ("debian-12-backports", "12"),
    ("debian-13", "13"),
    ("debian-13-backports", "13"),
    ("debian-sid", "sid"),
    ("debian-experimental", "sid"),
];

fn family(name: &str) -> KernelFamily {
    let families = definitions::load(None).unwrap().families;
    families
        .into_iter()
        .find(|family| family.metadata.name == name)
        .unwrap_or_else(|| panic!("no family {name}"))
}

fn target(name: &str, release: KernelRelease, arch: Architecture) -> KernelTarget {
    let (_, version) = DEBIAN.iter().find(|(known, _)| *known == name).unwrap();
    let (os, os_version) = ("debian".parse().unwrap(), version.parse().unwrap());
    KernelTarget { os, os_version, release, arch }
}

/// Returns all releases with headers in a family's suites, including releases that other families match.
async fn releases(family: &KernelFamily, arch: Architecture) -> Vec<KernelRelease> {
    let name = &family.metadata.name;
    let HeaderSource::Apt(apt) = &family.spec.headers else { panic!("{name} has no packages") };
    let suites = serde_json::from_value(json!({"suites": apt.suites, "flavors": [arch]})).unwrap();
    let fetcher = Fetcher::new(Cache::open(shared_cache()).unwrap(), FetchOptions::default());
    fetcher.headers().releases(&family.spec.headers, &suites, arch).await.unwrap()
}

/// Returns the kernels of the default flavor with headers in a family's suites, oldest first.
async fn kernels(name: &str, arch: Architecture) -> Vec<KernelTarget> {
    flavor(name, arch, "").await
}

/// Returns the kernels of another flavor, such as `cloud-` or `rt-`.
async fn flavor(name: &str, arch: Architecture, flavor: &str) -> Vec<KernelTarget> {
    let family = family(name);
    let releases = releases(&family, arch).await;
    let is_of_it = |release: &KernelRelease| {
        let version = release.as_str().strip_suffix(&format!("-{flavor}{arch}"));
        version.is_some_and(|version| !version.ends_with("-cloud") && !version.ends_with("-rt"))
    };
    let mut kernels: Vec<KernelTarget> =
        releases.into_iter().filter(is_of_it).map(|release| target(name, release, arch)).collect();
    kernels.retain(|kernel| family.spec.matches.is_match(kernel));
    kernels.sort_by(|a, b| debian_version::compare(a.release.as_str(), b.release.as_str()));
    kernels.dedup();
    kernels
}

async fn newest(name: &str) -> KernelTarget {
    newest_for(name, Architecture::Amd64).await
}

async fn newest_for(name: &str, arch: Architecture) -> KernelTarget {
    kernels(name, arch).await.pop().unwrap_or_else(|| panic!("the suites of {name} have no kernel"))
}

/// Creates a site with the shipped definition and a boot check before publication.
fn site(image: &str) -> Site {
    let site = site_with(image);
    site.edit(&format!("images/{image}.yaml"), "  modules: [", "  check: {boot: true}\n  modules: [");
    site
}

/// Puts a shipped image on a base that can be built for any architecture.
fn with_minimal_base(site: &Site, image: &str) {
    let file = format!("images/{image}.yaml");
    let text = fs::read_to_string(site.definitions().join(&file)).unwrap();
    let (before, rest) = text.split_once("    base:\n").unwrap();
    let (_, after) = rest.split_once("    entrypoint:").unwrap();
    site.define(
        &file,
        &format!("{before}    base: {{minimal: {{suites: [bookworm]}}}}\n    entrypoint:{after}"),
    );
}

/// Creates a site with only this shipped definition.
fn site_with(image: &str) -> Site {
    let site = Site::new();
    fs::remove_dir_all(site.definitions()).unwrap();
    let file = format!("images/{image}.yaml");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file);
    site.define(&file, &fs::read_to_string(shipped).unwrap());
    site
}

/// Returns a directory with `driver-entrypoint` and, when compiled, its arm64 build.
fn entrypoints(site: &Site) -> PathBuf {
    let place = site.definitions().with_file_name("programs");
    fs::create_dir_all(&place).unwrap();
    let arm64 = kept("arm64").join("driver-entrypoint-arm64");
    for program in [entrypoint(), arm64].iter().filter(|program| program.is_file()) {
        fs::copy(program, place.join(program.file_name().unwrap())).unwrap();
    }
    place.join(ENTRYPOINT)
}

fn build(site: &Site, image: &str, kernel: &KernelTarget) -> Run {
    let KernelTarget { os, os_version, release, arch } = kernel;
    let entrypoint = entrypoints(site).display().to_string();
    let target =
        ["--kernel", release.as_str(), "--os", os, "--os-version", os_version, "--arch", arch.as_str()];
    let mut command = site.command(
        &[&["--entrypoint", &entrypoint, "build", image], &target[..], &["--push", "-o", "json"]].concat(),
    );
    command.env("FARRIER_ENGINE", "sandbox");
    site.finish(command.spawn().unwrap())
}

/// Builds, checks and boots an image, and returns farrier's report.
fn proven(site: &Site, image: &str, kernel: &KernelTarget) -> serde_json::Value {
    judged(site, image, kernel, "loads")
}

/// Builds and checks an image, expects the verdict, and returns farrier's report.
fn judged(site: &Site, image: &str, kernel: &KernelTarget, verdict: &str) -> serde_json::Value {
    let run = build(site, image, kernel).exits(0);
    println!("{kernel}: {run}");
    let built = run.json();
    assert_eq!(
        (&built["outcome"], &built["check"]["verdict"]),
        (&"built".into(), &verdict.into()),
        "{kernel}: {run}"
    );
    let booted = built["check"]["boot"]["modules"].as_array().unwrap_or_else(|| panic!("not booted: {run}"));
    assert!(
        !booted.is_empty() && booted.iter().all(|module| module["outcome"] != "refused"),
        "{kernel}: {run}"
    );
    built
}

#[tokio::test]
async fn debian_11() {
    // Debian 11's security suite lists 6.1 kernels whose packages the archive lacks.
    let mut kernels = kernels("debian-11", Architecture::Amd64).await;
    kernels.retain(|kernel| kernel.release.as_str().starts_with("5.10."));
    proven(&site("mstflint"), "mstflint", kernels.last().expect("the suites contain a 5.10 kernel"));
}

#[tokio::test]
async fn debian_12() {
    proven(&site("mstflint"), "mstflint", &newest("debian-12").await);
}

#[tokio::test]
async fn debian_12_lts() {
    proven(&site("mstflint"), "mstflint", &newest("debian-12-lts").await);
}

#[tokio::test]
async fn debian_13() {
    proven(&site("mstflint"), "mstflint", &newest("debian-13").await);
}

/// The kernel for cloud virtual machines.
#[tokio::test]
async fn debian_13_cloud() {
    let kernels = flavor("debian-13", Architecture::Amd64, "cloud-").await;
    proven(&site("mstflint"), "mstflint", kernels.last().expect("the suites contain a cloud kernel"));
}

#[tokio::test]
async fn debian_13_backports() {
    proven(&site("mstflint"), "mstflint", &newest("debian-13-backports").await);
}

#[tokio::test]
async fn debian_sid() {
    proven(&site("mstflint"), "mstflint", &newest("debian-sid").await);
}

/// The GPU driver's definition distinguishes Debian 12's kernels by version. The plan includes the patch exactly for the
/// kernels whose header requires it. `ci/gpu-kernels` compiles and boots them.
#[tokio::test]
async fn the_gpu_driver_is_patched_where_debian_12_s_kernels_want_it() {
    let site = site_with("nvidia-gpu");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let node = fs::read_to_string(root.join("tests/fixtures/gpudirect/cluster/node.yaml")).unwrap();
    let mut kernels = Vec::new();
    for kind in ["", "cloud-"] {
        for kernel in flavor("debian-12", Architecture::Amd64, kind).await {
            let release = kernel.release.as_str();
            let text = node.replace("NAME", &format!("node-{}", kernels.len())).replace("KERNEL", release);
            fs::write(site.cluster().join(format!("{release}.yaml")), text).unwrap();
            let number = release.strip_suffix(&format!("-{kind}amd64")).unwrap();
            let package = format!("linux-headers-{number}-common");
            let header = unpacked(&package).join(format!("usr/src/{package}/include/linux/pci.h"));
            let header = fs::read_to_string(header).unwrap();
            let (_, declared) =
                header.split_once("pci_resize_resource(").expect("the kernel has the function");
            let arguments = declared.split(')').next().unwrap().split(',').count();
            assert!([3, 4].contains(&arguments), "{release}: {arguments}");
            kernels.push((release.to_owned(), arguments == 4));
        }
    }
    assert!(kernels.len() > 1, "{kernels:?}");
    let plan = site.farrier(&["plan"]).exits(0);
    for (release, wanted) in kernels {
        let row = plan.line(&format!(" {release} ("));
        assert!(row.contains("not in the registry"), "{row}");
        assert_eq!(row.contains("patched with 001-nvidia-535-pci-resize-resource.patch"), wanted, "{row}");
    }
}

/// Every kernel with headers in Debian's suites matches a Debian family, and not the family for custom kernels.
#[tokio::test]
async fn no_kernel_of_debian_is_one_of_ones_own() {
    let families = definitions::load(None).unwrap().families;
    for (name, _) in DEBIAN {
        for arch in [Architecture::Amd64, Architecture::Arm64] {
            for release in releases(&family(name), arch).await {
                let version = release.as_str().split('-').next().unwrap();
                // `linux-headers-6.12-amd64` is a metapackage for the newest kernel of a series. In experimental, kernels have
                // such names.
                let is_meta = name != "debian-experimental" && version.matches('.').count() == 1;
                let is_common = release.as_str().contains("common");
                let is_kernel = version.starts_with(|c: char| c.is_ascii_digit());
                if is_meta || is_common || !is_kernel || !release.as_str().contains(arch.as_str()) {
                    continue;
                }
                let target = target(name, release, arch);
                let found = &match_family(&families, &target).unwrap().metadata.name;
                assert!(found.starts_with("debian-"), "{target}: {found}");
            }
        }
    }
}

/// Fetches the header set of a Debian kernel.
async fn headers_of(kernel: &KernelTarget, family: &KernelFamily) -> PathBuf {
    let fetcher = Fetcher::new(Cache::open(shared_cache()).unwrap(), FetchOptions::default());
    match fetcher.headers().find(&family.spec.headers, kernel).await.unwrap() {
        HeaderLookup::Found(headers) => headers.root.clone(),
        HeaderLookup::Missing { .. } => panic!("no headers of {kernel}"),
    }
}

/// Copies a Debian header set to `tree` under another release.
fn rename(headers: &Path, known: &KernelRelease, release: &str, tree: &Path) {
    let known = known.as_str();
    fs::create_dir_all(tree).unwrap();
    run(Command::new("cp").arg("-a").arg(headers.join(".")).arg(tree));
    fs::rename(tree.join("usr/lib/modules").join(known), tree.join("usr/lib/modules").join(release)).unwrap();
    let include = tree.join(format!("usr/src/linux-headers-{known}/include"));
    let utsrelease = fs::read_to_string(include.join("generated/utsrelease.h")).unwrap();
    assert!(utsrelease.contains(known), "{utsrelease}");
    fs::write(include.join("generated/utsrelease.h"), utsrelease.replace(known, release)).unwrap();
    fs::write(include.join("config/kernel.release"), format!("{release}\n")).unwrap();
}

/// A custom kernel on a distribution without a family, with a release that no distribution uses. The headers are a renamed copy
/// of Debian 13's, and the compiler that they name selects the toolchain.
#[tokio::test]
async fn custom_with_another_compiler() {
    let standing_in = newest("debian-13").await;
    let release = "6.12.7-rc2+Acme.Fleet_9-x";
    let site = site_with("mstflint");
    let tree = site.path("tree");
    let headers = headers_of(&standing_in, &family("debian-13")).await;
    rename(&headers, &standing_in.release, release, &tree);
    let tree = tree.display().to_string();
    let import = ["headers", "import", &tree, "--kernel", release, "--registry", &site.location];
    site.farrier(&import).exits(0);
    let acme = KernelTarget {
        os: "acme".parse().unwrap(),
        os_version: "1".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let run = build(&site, "mstflint", &acme).exits(0);
    let built = run.json();
    let said = (&built["outcome"], &built["check"]["verdict"]);
    assert_eq!(said, (&"built".into(), &"loads".into()), "{run}");
}

/// Compiles the static programs for arm64.
fn compile_programs_for_arm64() {
    run(Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/arm64")).arg(kept("arm64")));
}

/// Asserts that all published modules are for arm64.
fn are_for_arm64(site: &Site, built: &serde_json::Value) {
    let modules = published_modules(site, built);
    assert!(!modules.is_empty());
    for module in modules {
        let header = run(Command::new("readelf").arg("-h").arg(&module));
        assert!(header.lines().any(|line| line.ends_with(" AArch64")), "{}: {header}", module.display());
    }
}

/// Debian's cross compilers build the modules on this machine, and the arm64 kernel loads them in an emulator.
#[tokio::test]
async fn arm64_kernels_of_debian() {
    compile_programs_for_arm64();
    for name in ["debian-12", "debian-13"] {
        let site = site("mstflint");
        let kernel = newest_for(name, Architecture::Arm64).await;
        let built = proven(&site, "mstflint", &kernel);
        are_for_arm64(&site, &built);
    }
}

/// Builds the GPU driver from the arm64 package, which contains objects compiled by NVIDIA. The kernel resolves the symbols of
/// `nvidia`, which finds no GPU; modules that depend on `nvidia` are not reached. Another test covers user space, so the base
/// is minimal.
#[tokio::test]
async fn the_gpu_driver_for_arm64_kernels_of_debian() {
    const IMAGE: &str = "nvidia-gpu";
    compile_programs_for_arm64();
    let site = site(IMAGE);
    with_minimal_base(&site, IMAGE);
    let kernel = newest_for("debian-12", Architecture::Arm64).await;
    // `nvidia-peermem` fails without OFED's symbols, so the boot check is inconclusive; no module is refused.
    let built = judged(&site, IMAGE, &kernel, "unknown");
    are_for_arm64(&site, &built);
    let outcome = |name: &str| {
        let modules = built["check"]["boot"]["modules"].as_array().unwrap();
        let module = modules.iter().find(|module| module["name"] == name);
        module.unwrap_or_else(|| panic!("no {name}: {built}"))["outcome"].as_str().unwrap()
    };
    assert_eq!(outcome("nvidia"), "notPresent");
    for name in ["nvidia_uvm", "nvidia_modeset", "nvidia_drm"] {
        assert_eq!(outcome(name), "notReached", "{name}");
    }
    assert_eq!(outcome("nvidia_peermem"), "failed");
    let verdicts = built["check"]["modules"].as_array().unwrap().iter().map(|module| &module["verdict"]);
    assert_eq!(verdicts.collect::<Vec<_>>(), ["loads"; 5], "{built}");
    let manifest = site.inspect_raw(&format!("{IMAGE}@{}", built["digest"].as_str().unwrap()));
    let sources = manifest["annotations"]["farrier.dev/sources"].as_str().unwrap();
    assert!(sources.starts_with("nvidia-open: nvidia-open-kernel-source="), "{sources}");
}

/// The shipped definitions generate no BTF. A family with `btf: true` generates it, and the kernel loads both kinds of modules.
#[tokio::test]
async fn modules_with_and_without_type_information() {
    let kernel = newest("debian-12-lts").await;
    let plain = site("mstflint");
    let without = proven(&plain, "mstflint", &kernel);
    assert_eq!(sections(&plain, &without), [""; 0]);

    // Build twice: pahole must not run in parallel, because parallel runs give different bytes each time.
    let mut digests = Vec::new();
    for _ in 0..2 {
        let typed = site("mstflint");
        let file = "kernels/11-debian-12-backports.yaml";
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        let text = text.replace("libelf1, xz-utils]", "libelf1, xz-utils, pahole]");
        typed.define(file, &text.replace("spec:\n", "spec:\n  btf: true\n"));
        let with = proven(&typed, "mstflint", &kernel);
        assert!(sections(&typed, &with).contains(&".BTF".to_owned()), "{with}");
        assert_ne!(without["inputHash"], with["inputHash"]);
        digests.push(with["digest"].clone());
    }
    assert_eq!(digests[0], digests[1]);
}

/// A kernel that its users compiled from CentOS 7's sources, with an image as the toolchain. The tree is a renamed copy of
/// Debian's, because Debian has neither CentOS 7's sources nor its gcc 4.8.
#[tokio::test(flavor = "multi_thread")]
async fn a_recompiled_kernel_of_centos_7() {
    let release = "3.10.0-1160.45.1.el7.custom.x86_64";
    let (debian, standing_in) = (family("debian-12"), newest("debian-12").await);
    let site = site_with("mstflint");
    let headers = headers_of(&standing_in, &debian).await;
    rename(&headers, &standing_in.release, release, &site.definitions().join("headers").join(release));

    let fetcher = Fetcher::new(Cache::open(shared_cache()).unwrap(), FetchOptions::default());
    let Toolchain::Bootstrap(spec) = &debian.spec.toolchain else { panic!("no bootstrap") };
    let toolchain = PackageRoot::Toolchain(spec.clone());
    let made = fetcher.root_fs().bootstrap(&toolchain, Architecture::Amd64).await.unwrap();
    let image = format!("{}/centos-7-gcc:4.8", site.location);
    docker(&["import", made.file.to_str().unwrap(), &image]);
    docker(&["push", &image]);
    docker(&["rmi", &image]);
    let family = format!(
        "apiVersion: farrier.dev/v1alpha1\nkind: KernelFamily\nmetadata: {{name: centos-7}}\nspec:\n  \
         match: {{os: centos, osVersion: '7', release: '3\\.10\\.0-.*'}}\n  headers: {{tarball: {{path: 'headers/{{{{release}}}}'}}}}\n  \
         toolchain: {{image: '{image}'}}\n"
    );
    site.define("kernels/05-centos-7.yaml", &family);

    let centos = KernelTarget {
        os: "centos".parse().unwrap(),
        os_version: "7".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let built = build(&site, "mstflint", &centos).exits(0);
    assert_eq!(built.json()["outcome"], "built", "{built}");
    let tags = site.tags("mstflint");
    let [published] = &tags[..] else { panic!("{tags:?}") };
    assert!(published.ends_with(&format!("-{release}-centos7-amd64")), "{published}");
    let described = site.inspect_raw(&format!("mstflint:{published}"));
    assert_eq!(described["annotations"]["farrier.dev/kernel-release"], release);
}

/// Unpacks the published image and returns its module files.
fn published_modules(site: &Site, built: &serde_json::Value) -> Vec<PathBuf> {
    let copy = site.path("copy");
    let from = format!("docker://{}", built["pinned"].as_str().unwrap());
    let copied = skopeo(&["copy", "--src-tls-verify=false", &from, &format!("dir:{}", copy.display())]);
    assert!(copied.status.success(), "{copied:?}");
    let manifest: serde_json::Value =
        serde_json::from_slice(&fs::read(copy.join("manifest.json")).unwrap()).unwrap();
    let payload = manifest["layers"].as_array().unwrap().last().unwrap()["digest"].as_str().unwrap();
    let tree = site.path("tree");
    fs::create_dir(&tree).unwrap();
    run(Command::new("tar")
        .arg("-xf")
        .arg(copy.join(payload.trim_start_matches("sha256:")))
        .arg("-C")
        .arg(&tree));
    let files = walkdir::WalkDir::new(&tree).into_iter().map(Result::unwrap);
    let modules = files.filter(|file| file.path().extension().is_some_and(|end| end == "ko"));
    modules.map(walkdir::DirEntry::into_path).collect()
}

/// Returns the BTF sections of the published module.
fn sections(site: &Site, built: &serde_json::Value) -> Vec<String> {
    let modules = published_modules(site, built);
    let [module] = &modules[..] else { panic!("{modules:?}") };
    let listed = run(Command::new("readelf").args(["-SW"]).arg(module));
    println!("{}: {} bytes", module.display(), module.metadata().unwrap().len());
    let words = listed.split_whitespace().filter(|word| word.starts_with(".BTF"));
    words.map(str::to_owned).collect()
}
