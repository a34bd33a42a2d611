//! Stand-ins for OFED and the drivers that depend on OFED, compiled like a toolchain image would compile the real ones.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::KernelRelease;
use farrier_inputs::KernelImage;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::{
    kept,
    node_vm::{depmod, files, image_tree},
    packages::{header_tree, headers, run, unpacked},
    virtual_machine::entrypoint,
};

/// Returns the build's output for a kernel: modules below `lib/modules`, headers and symbol table below `usr/src`. The build
/// runs once for each state of the sources.
pub fn payload(release: &KernelRelease) -> PathBuf {
    made_once("ofed", release, &fixture("ofed"), compile)
}

/// Creates an image with the stand-in for OFED, as farrier assembles it.
pub fn image(kernel: &KernelImage) -> TempDir {
    let image = image_tree(&entrypoint());
    let payload = payload(&kernel.release);
    run(Command::new("cp").arg("-a").arg(payload.join("lib")).arg(payload.join("usr")).arg(image.path()));
    // farrier makes absolute links in an exposed tree relative.
    let default = image.path().join("usr/src/ofa_kernel/default");
    let target = fs::read_link(&default).unwrap();
    fs::remove_file(&default).unwrap();
    symlink(target.strip_prefix("/usr/src/ofa_kernel").unwrap(), default).unwrap();
    depmod(kernel, image.path());
    image
}

/// Returns the modules of GPU driver and peer memory, compiled against the OFED stand-in.
pub fn gpu_modules(release: &KernelRelease) -> PathBuf {
    let ofed = payload(release);
    made_once("gpu", release, &fixture("gpu"), |release, sources, work| {
        compile_gpu(release, sources, work, &ofed);
    })
}

/// Returns the kernel's simulated devices with a driver named `mlx5_core`: `host/mlx5_core.ko`, and `other/mlx5_core.ko` with
/// other parameter defaults. Debian's kernels lack this driver, but their source package contains it.
pub fn netdevsim(release: &KernelRelease) -> PathBuf {
    variants_of("netdevsim", "net/netdevsim", "NETDEVSIM", &["host", "other"], release)
}

/// Returns the kernel's driver of the network card that QEMU has, under the name `mlx5_core`: `host/mlx5_core.ko`, another version
/// of it as `other/mlx5_core.ko`, and one that sends nothing as `deaf/mlx5_core.ko`. `refused` fails to load, and `hanging` loads
/// until it is killed.
pub fn e1000(release: &KernelRelease) -> PathBuf {
    variants_of(
        "e1000",
        "net/ethernet/intel/e1000",
        "E1000",
        &["host", "other", "deaf", "refused", "hanging"],
        release,
    )
}

/// Compiles variants of a driver of the kernel's source package, which the fixture's program `prepare` makes from its sources.
fn variants_of(
    name: &str,
    directory: &str,
    option: &str,
    variants: &[&str],
    release: &KernelRelease,
) -> PathBuf {
    made_once(name, release, &fixture(name), |release, fixture, work| {
        let headers = header_tree(release, &work.join("root"));
        let series = release.as_str().splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
        let package = format!("linux-source-{series}");
        let archive = unpacked(&package).join(format!("usr/src/{package}.tar.xz"));
        let sources = work.join("sources");
        fs::create_dir(&sources).unwrap();
        run(Command::new("tar")
            .arg(format!("--strip-components={}", 2 + directory.split('/').count()))
            .args([Path::new("--extract"), Path::new("--file"), &archive, Path::new("--directory"), &sources])
            .arg(format!("{package}/drivers/{directory}")));
        for kind in variants {
            let (tree, out) = (work.join(kind), work.join("out").join(kind));
            fs::create_dir_all(&out).unwrap();
            run(Command::new("cp").arg("-r").args([&sources, &tree]));
            run(Command::new(fixture.join("prepare")).arg(kind).current_dir(&tree));
            make_modules(&headers, &tree, &[format!("CONFIG_{option}=m")]);
            fs::copy(tree.join("mlx5_core.ko"), out.join("mlx5_core.ko")).unwrap();
        }
    })
}

/// Adds the driver with other parameter defaults to an image.
pub fn add_other_netdevsim(root: &Path, release: &KernelRelease, kernel: &KernelImage) {
    add_driver(root, &netdevsim(release).join("other/mlx5_core.ko"), kernel);
}

/// Adds a module to an image.
pub fn add_driver(root: &Path, module: &Path, kernel: &KernelImage) {
    let updates = root.join("lib/modules").join(kernel.release.as_str()).join("updates");
    fs::create_dir_all(&updates).unwrap();
    fs::copy(module, updates.join(module.file_name().unwrap())).unwrap();
    depmod(kernel, root);
}

/// Copies a program of the host with its libraries into an image.
pub fn program(root: &Path, program: &str) {
    let libraries = run(Command::new("ldd").arg(program));
    let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/'));
    for file in libraries.chain([program]) {
        let place = root.join(file.trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::copy(file, place).unwrap();
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Returns the cached output of `compile`, which writes `out` in the directory of its last argument.
fn made_once(
    name: &str,
    release: &KernelRelease,
    sources: &Path,
    compile: impl FnOnce(&KernelRelease, &Path, &Path),
) -> PathBuf {
    let cache = kept("stand-ins");
    let lock = File::create(cache.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    // The GPU's stand-ins are compiled against OFED's.
    let identity = identity(&[sources, &fixture("ofed")], &headers(release));
    let made = cache.join(format!("{name}-{release}-{identity}"));
    if !made.exists() {
        let work = tempfile::tempdir_in(&cache).unwrap();
        compile(release, sources, work.path());
        fs::rename(work.path().join("out"), &made).unwrap();
    }
    made
}

fn identity(sources: &[&Path], headers: &Path) -> String {
    let mut hash = Sha256::new();
    hash.update(headers.canonicalize().unwrap().to_str().unwrap());
    for place in sources {
        for path in files(place, "").iter().filter(|path| path.is_file()) {
            hash.update(path.strip_prefix(place).unwrap().as_os_str().as_encoded_bytes());
            hash.update(fs::read(path).unwrap());
        }
    }
    hex::encode(hash.finalize())[..12].to_owned()
}

fn compile(release: &KernelRelease, sources: &Path, work: &Path) {
    let headers = header_tree(release, &work.join("root"));
    let tree = work.join("tree");
    run(Command::new("cp").arg("-r").args([sources, &tree]));
    run(Command::new("./configure")
        .arg(format!("--kernel-version={release}"))
        .arg(format!("--kernel-sources={}", headers.display()))
        .args(["--default", "-j2"])
        .env("CC", "gcc-12")
        .current_dir(&tree));
    for target in ["kernel", "install"] {
        run(Command::new("make")
            // The tests do not need BTF.
            .args(["-s", "-j2", "CC=gcc-12", "KCFLAGS=-g0", "CONFIG_DEBUG_INFO_BTF_MODULES=", target])
            .arg(format!("INSTALL_MOD_PATH={}", work.join("out").display()))
            .current_dir(&tree));
    }
}

fn compile_gpu(release: &KernelRelease, sources: &Path, work: &Path, ofed: &Path) {
    let headers = header_tree(release, &work.join("root"));
    let (tree, out) = (work.join("tree"), work.join("out"));
    let exposed = ofed.join("usr/src/ofa_kernel").join("x86_64").join(release.as_str());
    run(Command::new("cp").arg("-r").args([sources, &tree]));
    let symbols = format!("KBUILD_EXTRA_SYMBOLS={}", exposed.join("Module.symvers").display());
    make_modules(&headers, &tree, &[format!("OFA_DIR={}", exposed.display()), symbols]);
    fs::create_dir(&out).unwrap();
    for module in files(&tree, ".ko") {
        fs::copy(&module, out.join(module.file_name().unwrap())).unwrap();
    }
}

fn make_modules(headers: &Path, tree: &Path, variables: &[String]) {
    run(Command::new("make")
        .args(["-s", "-j2", "CC=gcc-12", "KCFLAGS=-g0", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules", "-C"])
        .arg(headers)
        .arg(format!("M={}", tree.display()))
        .args(variables));
}
