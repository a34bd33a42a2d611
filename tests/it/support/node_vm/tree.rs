//! The root file system of a node.

use std::{
    collections::{BTreeSet, VecDeque},
    fs::{self, File},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use farrier_core::image::DRIVER_ENTRYPOINTS;
use farrier_inputs::KernelImage;
use tempfile::TempDir;

use super::super::packages::run;

/// Exactly the tools that the operators' probes use, so that a test detects a further dependency.
const TOOLS: [&str; 4] = ["sh", "ls", "lsmod", "grep"];

/// A node's tree under construction.
pub struct NodeTree {
    directory: TempDir,
    kernel: KernelImage,
}

impl NodeTree {
    /// Creates a node with busybox and, below `/lib/modules`, some in-tree modules with their dependencies.
    pub fn new(kernel: &KernelImage, modules: &[&str]) -> Self {
        let tree = Self { directory: tempfile::tempdir().unwrap(), kernel: kernel.clone() };
        let root = tree.root();
        for name in [
            "bin",
            "sbin",
            "usr/bin",
            "usr/sbin",
            "usr/src",
            "dev",
            "proc",
            "sys",
            "run",
            "tmp",
            "node",
            "containers",
            "images",
            "var/log",
            "etc/modprobe.d",
            "etc/network",
            "lib/udev/rules.d",
        ] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        fs::copy(busybox(), root.join("bin/busybox")).unwrap();
        let init = root.join("init");
        fs::write(&init, include_str!("init.sh")).unwrap();
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(root.join("etc/os-release"), "ID=debian\nVERSION_ID=\"12\"\n").unwrap();
        let overlay = ["overlay"];
        copy_modules(kernel, modules.iter().chain(&overlay), &root);
        depmod(kernel, &root);
        tree
    }

    fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    /// Returns the directory of the node's own modules.
    pub fn modules(&self) -> PathBuf {
        self.root().join("lib/modules").join(self.kernel.release.as_str())
    }

    /// Adds a module from outside the kernel's package to the node's own modules.
    pub fn module(&self, file: &Path) {
        let place = self.modules().join("kernel").join(file.file_name().unwrap());
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::copy(file, place).unwrap();
        depmod(&self.kernel, &self.root());
    }

    /// Compresses the node's own modules like distributions do, alternating between the formats. The agent's own module stays
    /// uncompressed.
    pub fn compress_modules(&self) {
        // Debian's depmod cannot read gzip. For xz, the kernel's decoder only supports CRC32.
        let programs: [&[&str]; 2] = [&["xz", "--check=crc32"], &["zstd", "-q", "--rm"]];
        let modules = files(&self.modules(), ".ko");
        let modules = modules.iter().filter(|path| !path.ends_with("overlay.ko"));
        for (module, program) in modules.zip(programs.iter().cycle()) {
            run(Command::new(program[0]).args(&program[1..]).arg(module));
        }
        depmod(&self.kernel, &self.root());
    }

    /// Writes a file of the node.
    pub fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Copies an image's unpacked tree to the node.
    pub fn image(&self, name: &str, tree: &Path) {
        run(Command::new("cp").arg("-a").arg(tree).arg(self.root().join("images").join(name)));
    }

    /// Writes the initramfs, and returns the tree's directory and the archive's name in it.
    pub fn pack(self) -> (TempDir, &'static str) {
        let name = "initramfs";
        let root = self.root();
        let archive = self.directory.path().join(name);
        let mut find =
            Command::new("find").arg(".").current_dir(&root).stdout(Stdio::piped()).spawn().unwrap();
        let status = Command::new(busybox())
            .args(["cpio", "-o", "-H", "newc", "-R", "0:0"])
            .current_dir(&root)
            .stdin(find.stdout.take().unwrap())
            .stdout(File::create(archive).unwrap())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success(), "busybox cpio: {status}");
        assert!(find.wait().unwrap().success(), "find");
        fs::remove_dir_all(&root).unwrap();
        (self.directory, name)
    }
}

/// Creates the tree of an image without a distribution: the static entrypoint under its names, a shell, and the few tools that
/// probes use.
pub fn image_tree(entrypoint: &Path) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for name in ["bin", "usr/bin", "usr/src", "etc", "dev", "proc", "sys", "run", "tmp", "mnt", "lib"] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(busybox(), root.join("bin/busybox")).unwrap();
    for tool in TOOLS {
        symlink("busybox", root.join("bin").join(tool)).unwrap();
    }
    fs::copy(entrypoint, root.join("usr/bin/driver-entrypoint")).unwrap();
    for link in &DRIVER_ENTRYPOINTS[1..] {
        symlink("driver-entrypoint", root.join("usr/bin").join(link)).unwrap();
    }
    directory
}

/// Writes `modules.dep` and related files for a kernel's modules below a root.
pub fn depmod(kernel: &KernelImage, root: &Path) {
    let mut command = Command::new("depmod");
    command.arg("-b").arg(root);
    if let Some(map) = &kernel.system_map {
        command.arg("-F").arg(map);
    }
    run(command.arg(kernel.release.as_str()));
}

/// Copies modules of the kernel package and their dependencies to their places below a root.
fn copy_modules<'a>(kernel: &KernelImage, names: impl Iterator<Item = &'a &'a str>, root: &Path) {
    let source = kernel.modules.as_ref().expect("the kernel's package has modules");
    let target = root.join("lib/modules").join(kernel.release.as_str());
    fs::create_dir_all(&target).unwrap();
    for entry in fs::read_dir(source).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), target.join(entry.file_name())).unwrap();
        }
    }
    let all = files(source, ".ko");
    let mut wanted: VecDeque<String> = names.map(ToString::to_string).collect();
    let mut seen = BTreeSet::new();
    while let Some(name) = wanted.pop_front() {
        if name.is_empty() || !seen.insert(name.clone()) {
            continue;
        }
        let of_name = |path: &&PathBuf| {
            path.file_stem().unwrap().to_str().unwrap().replace('-', "_") == name.replace('-', "_")
        };
        let file =
            all.iter().find(of_name).unwrap_or_else(|| panic!("{} has no module {name}", kernel.release));
        let place = target.join(file.strip_prefix(source).unwrap());
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::copy(file, place).unwrap();
        let needs = run(Command::new("modinfo").args(["-F", "depends"]).arg(file));
        wanted.extend(needs.trim().split(',').map(str::to_owned));
    }
}

/// Returns the files below a directory whose names end with `suffix`.
pub fn files(directory: &Path, suffix: &str) -> Vec<PathBuf> {
    walkdir::WalkDir::new(directory)
        .sort_by_file_name()
        .into_iter()
        .map(|entry| entry.unwrap().into_path())
        .filter(|path| path.to_str().is_some_and(|path| path.ends_with(suffix)))
        .collect()
}

fn busybox() -> PathBuf {
    let path = PathBuf::from("/bin/busybox");
    assert!(path.exists(), "busybox is missing (Debian package busybox-static)");
    path
}
