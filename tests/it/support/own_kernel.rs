//! A kernel without a distribution package. `ci/own-kernel` compiles it once for all tests and runs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_inputs::KernelImage;

use super::{kept, packages::run};

/// The kernel, its build's output, and the key that it trusts.
pub struct OwnKernel {
    pub release: KernelRelease,
    directory: PathBuf,
}

/// Compiles the kernel unless that was already done.
pub fn own_kernel() -> OwnKernel {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = kept("own-kernel");
    let printed = run(Command::new(root.join("ci/own-kernel")).arg(place));
    let directory = PathBuf::from(printed.trim_end());
    let release = fs::read_to_string(directory.join("release")).unwrap();
    OwnKernel { release: release.trim_end().parse().unwrap(), directory }
}

impl OwnKernel {
    /// Returns the bootable kernel image.
    pub fn vmlinuz(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// Returns the headers package of `make bindeb-pkg`.
    pub fn headers_deb(&self) -> PathBuf {
        self.directory.join("headers.deb")
    }

    /// Returns the headers as a tarball.
    pub fn headers_tarball(&self) -> PathBuf {
        self.directory.join("headers.tar.gz")
    }

    /// Returns a separate build directory after `make modules_prepare`, with the full build's `Module.symvers`.
    pub fn prepared_tree(&self) -> PathBuf {
        self.directory.join("prepared")
    }

    /// Returns the separate build directory of the full build.
    pub fn build_tree(&self) -> PathBuf {
        self.directory.join("build")
    }

    /// Returns the three forms of headers that users have, and the prepared directory.
    pub fn header_sources(&self) -> [PathBuf; 4] {
        [self.headers_deb(), self.headers_tarball(), self.prepared_tree(), self.build_tree()]
    }

    /// Returns the kernel's only in-tree module, signed at installation.
    pub fn own_module(&self) -> PathBuf {
        self.directory.join("modules/kernel/lib/crc7.ko")
    }

    /// Returns key and certificate of the in-tree modules in one PEM file. The kernel only loads modules signed with this key.
    pub fn signing_key(&self) -> PathBuf {
        self.directory.join("signing_key.pem")
    }

    /// Returns the DER certificate.
    pub fn certificate(&self) -> PathBuf {
        self.directory.join("signing_key.x509")
    }

    /// Returns the kernel image for boot checks.
    pub fn image(&self) -> KernelImage {
        KernelImage {
            release: self.release.clone(),
            arch: Architecture::Amd64,
            vmlinuz: self.vmlinuz(),
            system_map: Some(self.directory.join("System.map")),
            modules: Some(self.directory.join("modules")),
            origin: vec!["ci/own-kernel".to_owned()],
        }
    }

    /// Installs the headers below `root`, like the package.
    pub fn install_headers(&self, root: &Path) {
        fs::create_dir_all(root).unwrap();
        run(Command::new("dpkg-deb").arg("-x").arg(self.headers_deb()).arg(root));
    }

    /// Compiles the modules of a directory without farrier, against the package's headers. Returns the copy of the directory in
    /// `work`
    /// with the modules.
    pub fn compile(&self, sources: &Path, work: &Path) -> PathBuf {
        let (root, copy) = (work.join("headers"), work.join("sources"));
        self.install_headers(&root);
        run(Command::new("cp").arg("-r").args([sources, &copy]));
        let tree = root.join(format!("usr/src/linux-headers-{}", self.release));
        run(Command::new("make")
            .args(["-s", "CC=gcc-12", "modules", "-C"])
            .arg(tree)
            .arg(format!("M={}", copy.display())));
        copy
    }

    /// Runs the kernel's tool on a signed module: `-0` extracts the module without its signature, `-s` the PKCS#7 message.
    pub fn extract_module_sig(&self, part: &str, module: &Path) -> Vec<u8> {
        let tool = self.directory.join("source/scripts/extract-module-sig.pl");
        let output = Command::new("perl").arg(tool).arg(part).arg(module).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// Signs a module like the kernel's build, with key and certificate from one PEM file.
    pub fn sign_file(&self, key: &Path, module: &Path) {
        let tool = self.build_tree().join("scripts/sign-file");
        run(Command::new(tool).arg("sha256").args([key, key, module]));
    }
}
