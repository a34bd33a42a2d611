//! A kernel that nobody has a package of: `ci/own-kernel` compiles it, once for all tests and runs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier::{
    inputs::KernelImage,
    kernel::{Architecture, KernelRelease},
};

use super::{kept, packages::run};

/// The kernel, what its build left, and the key that it believes.
pub struct OwnKernel {
    pub release: KernelRelease,
    directory: PathBuf,
}

/// Compiles it, where that was not done yet.
pub fn own_kernel() -> OwnKernel {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let place = kept("own-kernel");
    let printed = run(Command::new(root.join("ci/own-kernel")).arg(place));
    let directory = PathBuf::from(printed.trim_end());
    let release = fs::read_to_string(directory.join("release")).unwrap();
    OwnKernel { release: release.trim_end().parse().unwrap(), directory }
}

impl OwnKernel {
    /// The kernel, as a boot loader takes it.
    pub fn vmlinuz(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    /// What `make bindeb-pkg` packs of its headers.
    pub fn headers_deb(&self) -> PathBuf {
        self.directory.join("headers.deb")
    }

    /// The same as a tarball.
    pub fn headers_tarball(&self) -> PathBuf {
        self.directory.join("headers.tar.gz")
    }

    /// A build directory apart from the sources, as `make modules_prepare` leaves it, with the full build's
    /// `Module.symvers`.
    pub fn prepared_tree(&self) -> PathBuf {
        self.directory.join("prepared")
    }

    /// The build directory apart from the sources, as the whole build left it.
    pub fn build_tree(&self) -> PathBuf {
        self.directory.join("build")
    }

    /// The three forms in which its users have its headers, and the prepared directory.
    pub fn header_sources(&self) -> [PathBuf; 4] {
        [self.headers_deb(), self.headers_tarball(), self.prepared_tree(), self.build_tree()]
    }

    /// The one module of its own, signed when it was installed.
    pub fn own_module(&self) -> PathBuf {
        self.directory.join("modules/kernel/lib/crc7.ko")
    }

    /// Key and certificate of its own modules in one PEM file: the kernel loads what this signed, and nothing else.
    pub fn signing_key(&self) -> PathBuf {
        self.directory.join("signing_key.pem")
    }

    /// The certificate alone, DER.
    pub fn certificate(&self) -> PathBuf {
        self.directory.join("signing_key.x509")
    }

    /// For boot checks.
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

    /// Puts the headers below `root`, as if the package were installed there.
    pub fn install_headers(&self, root: &Path) {
        fs::create_dir_all(root).unwrap();
        run(Command::new("dpkg-deb").arg("-x").arg(self.headers_deb()).arg(root));
    }

    /// Compiles the modules of a directory, without farrier, against the package's headers; the copy of the directory
    /// in `work` then holds them.
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

    /// What the kernel's own tool takes out of a signed module: `-0` the module without its signature, `-s` the
    /// PKCS#7 message alone.
    pub fn extract_module_sig(&self, part: &str, module: &Path) -> Vec<u8> {
        let tool = self.directory.join("source/scripts/extract-module-sig.pl");
        let output = Command::new("perl").arg(tool).arg(part).arg(module).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    /// Signs a module as the kernel's own build does, with a key and certificate of one PEM file.
    pub fn sign_file(&self, key: &Path, module: &Path) {
        let tool = self.build_tree().join("scripts/sign-file");
        run(Command::new(tool).arg("sha256").args([key, key, module]));
    }
}
