//! Shared helpers for the tests of header imports: trees of headers and archives of them.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

use farrier_core::kernel::{Architecture, HeaderSource, KernelTarget};
use farrier_inputs::{FetchError, FetchOptions, Fetcher, HeaderImport, ImportSource, ImportedHeaders};
use farrier_local::cache::Cache;
use farrier_store::{
    Store,
    registry::{self, RegistryLocation, RegistryOptions},
};
use tempfile::TempDir;

pub const RELEASE: &str = "6.1.192-ACME+";
pub const X86_64: u8 = 62;
pub const AARCH64: u8 = 183;

pub struct Bench(TempDir);

impl Bench {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn link(&self, target: &str, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    pub fn program(&self, path: &str, machine: u8) {
        let mut head = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
        head.resize(18, 0);
        head.extend([machine, 0, 1]);
        self.write(path, head);
        fs::set_permissions(self.path(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Writes the files that `make modules_prepare` and a full build leave in the build directory.
    pub fn configured(&self, build: &str) {
        let text = format!("#define UTS_RELEASE \"{RELEASE}\"\n");
        self.write(&format!("{build}/include/generated/utsrelease.h"), text);
        self.write(
            &format!("{build}/include/config/auto.conf"),
            "CONFIG_CC_VERSION_TEXT=\"gcc (GCC) 12.2.0\"\nCONFIG_X86_64=y\nCONFIG_64BIT=y\n",
        );
        self.write(&format!("{build}/Module.symvers"), "0x12345678\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n");
        self.program(&format!("{build}/scripts/basic/fixdep"), X86_64);
        self.program(&format!("{build}/scripts/mod/modpost"), X86_64);
    }

    /// Writes a header tree like a package's.
    pub fn tree(&self, build: &str) {
        self.configured(build);
        self.write(&format!("{build}/Makefile"), "VERSION = 6\n");
        self.write(&format!("{build}/include/linux/module.h"), "struct module;\n");
        self.link("module.h", &format!("{build}/include/linux/alias.h"));
    }

    pub fn tar(&self, flags: &[&str], archive: &str, name: &str) -> PathBuf {
        let path = self.path(archive);
        let status = Command::new("tar")
            .args(flags)
            .arg("-cf")
            .arg(&path)
            .arg("-C")
            .arg(self.0.path())
            .arg(name)
            .status();
        assert!(status.unwrap().success());
        path
    }

    pub fn fetcher(&self, cache: &str) -> Fetcher {
        Fetcher::new(Cache::open(self.path(cache)).unwrap(), FetchOptions::default())
    }

    pub fn with_store(&self, cache: &str) -> Fetcher {
        let location = RegistryLocation::Layout(self.path("registry"));
        let registry = registry::connect(&location, &RegistryOptions::default());
        self.fetcher(cache).with_store(Store::new(location, Arc::clone(&registry)))
    }

    pub async fn import(&self, sources: &[&Path]) -> Result<ImportedHeaders, FetchError> {
        self.fetcher("cache").headers().import(request(sources)).await
    }

    /// Imports a source that must be refused, and asserts that nothing is left in the cache.
    pub async fn refused(&self, source: &Path) -> FetchError {
        let fetcher = self.with_store("cache-refused");
        let error = fetcher.headers().import(request(&[source])).await.unwrap_err();
        let names = |directory: &str| {
            let listing = fs::read_dir(self.path("cache-refused").join(directory));
            listing.map_or(0, Iterator::count)
        };
        assert_eq!((names("headers"), names("work"), names("records")), (0, 0, 0), "{error}");
        assert!(
            fetcher
                .headers()
                .in_store(&RELEASE.parse().unwrap(), Architecture::Amd64)
                .await
                .unwrap()
                .is_none()
        );
        error
    }
}

pub fn request(sources: &[&Path]) -> HeaderImport {
    HeaderImport {
        sources: sources.iter().map(|path| ImportSource::Path(path.to_path_buf())).collect(),
        release: RELEASE.parse().unwrap(),
        arch: Architecture::Amd64,
        replace: false,
    }
}

pub fn target() -> KernelTarget {
    KernelTarget {
        os: "acme".parse().unwrap(),
        os_version: "1".parse().unwrap(),
        release: RELEASE.parse().unwrap(),
        arch: Architecture::Amd64,
    }
}

pub fn family() -> HeaderSource {
    serde_json::from_str(r#"{"tarball": {"path": "headers/{{release}}.tar.xz"}}"#).unwrap()
}
