//! Kernel images and the kernel's own modules, from packages or from a file system.

mod facts;
mod fetch;
pub mod host;

use std::path::{Path, PathBuf};

use farrier_core::kernel::{Architecture, KernelRelease};
use oci::error_chain;

use super::{FetchError, Fetcher, Lookup};

/// A kernel image with its companion files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelImage {
    pub release: KernelRelease,
    pub arch: Architecture,
    /// The bootable image (`vmlinuz`).
    pub vmlinuz: PathBuf,
    /// `System.map`.
    pub system_map: Option<PathBuf>,
    /// The kernel's own module directory (`/lib/modules/<release>`), with or without `modules.dep`.
    pub modules: Option<PathBuf>,
    /// Packages and versions, or files, for provenance.
    pub origin: Vec<String>,
}

impl KernelImage {
    /// Finds the image and its companion files in their usual locations below `root`. `origin` is the image's path.
    fn find_below(root: &Path, release: &KernelRelease, arch: Architecture) -> Option<Self> {
        let modules = Self::module_directories(root, release).into_iter().find(|path| path.is_dir());
        let vmlinuz = Self::image_paths(root, release).into_iter().find(|path| path.is_file())?;
        // RHEL's kernel-core and newer kernels' `make binrpm-pkg` keep `System.map` with the modules.
        let maps = [
            Some(root.join(format!("boot/System.map-{release}"))),
            modules.as_ref().map(|dir| dir.join("System.map")),
        ];
        Some(Self {
            release: release.clone(),
            arch,
            origin: vec![vmlinuz.display().to_string()],
            vmlinuz,
            system_map: maps.into_iter().flatten().find(|path| path.is_file()),
            modules,
        })
    }

    /// Returns the kernel's own modules for an image that is in their directory, or in `/boot` of the same root.
    fn modules_beside(vmlinuz: &Path, release: &KernelRelease) -> Option<PathBuf> {
        // `/vmlinuz` and similar paths are links.
        let vmlinuz = vmlinuz.canonicalize().ok()?;
        let directory = vmlinuz.parent()?;
        let mut dirs = Vec::new();
        if directory.file_name().is_some_and(|name| name == release.as_str()) {
            dirs.push(directory.to_owned());
        }
        if vmlinuz.file_name().is_some_and(|name| *name == *format!("vmlinuz-{release}")) {
            dirs.extend(directory.parent().into_iter().flat_map(|r| Self::module_directories(r, release)));
        }
        dirs.into_iter().find(|path| path.join("kernel").is_dir())
    }

    fn module_directories(root: &Path, release: &KernelRelease) -> [PathBuf; 2] {
        ["lib/modules", "usr/lib/modules"].map(|dir| root.join(dir).join(release.as_str()))
    }

    /// Returns the usual locations of images: RHEL and newer Ubuntu keep them with the modules.
    fn image_paths(root: &Path, release: &KernelRelease) -> Vec<PathBuf> {
        let with_modules = ["lib/modules", "usr/lib/modules"].map(|dir| format!("{dir}/{release}/vmlinuz"));
        let names = [format!("boot/vmlinuz-{release}")].into_iter().chain(with_modules);
        names.map(|name| root.join(name)).collect()
    }
}

/// Result of a search for a kernel image.
pub type KernelImageLookup = Lookup<Box<KernelImage>>;

/// Access to kernel images. Relative paths in definitions start at `root`.
#[derive(Clone, Copy)]
pub struct KernelImages<'a>(pub(super) &'a Fetcher);

/// Creates an error about an unusable file of the user or the machine; `cause` is the reason.
fn unusable(message: &str, cause: &dyn std::error::Error, hint: &str) -> FetchError {
    FetchError::unusable(format!("{message}: {}", error_chain(cause)), hint)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn a_given_image_has_the_modules_that_it_lies_with() {
        let release: KernelRelease = "6.1.0-56-amd64".parse().unwrap();
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let modules = root.join("usr/lib/modules/6.1.0-56-amd64");
        let place = |path: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        let its = ["boot/vmlinuz-6.1.0-56-amd64", "usr/lib/modules/6.1.0-56-amd64/vmlinuz"].map(place);
        let others =
            ["boot/vmlinuz", "boot/vmlinuz-6.1.0-55-amd64", "usr/lib/modules/vmlinuz", "a/b/vmlinuz"]
                .map(place);
        let beside = |vmlinuz: &PathBuf| KernelImage::modules_beside(vmlinuz, &release);
        // A directory without modules does not count.
        assert!(its.iter().all(|vmlinuz| beside(vmlinuz).is_none()));
        fs::create_dir(modules.join("kernel")).unwrap();
        assert!(its.iter().all(|vmlinuz| beside(vmlinuz).as_ref() == Some(&modules)));
        assert!(others.iter().all(|vmlinuz| beside(vmlinuz).is_none()));
        let link = root.join("vmlinuz");
        fs::os::unix::fs::symlink("boot/vmlinuz-6.1.0-56-amd64", &link).unwrap();
        assert_eq!(beside(&link), Some(modules));
    }

    #[test]
    fn symbols_addresses_are_with_the_image_or_with_the_modules() {
        let release: KernelRelease = "5.14.0-503.el9.x86_64".parse().unwrap();
        for (image, map) in [
            ("boot/vmlinuz-5.14.0-503.el9.x86_64", "boot/System.map-5.14.0-503.el9.x86_64"),
            ("lib/modules/5.14.0-503.el9.x86_64/vmlinuz", "lib/modules/5.14.0-503.el9.x86_64/System.map"),
        ] {
            let root = tempfile::tempdir().unwrap();
            for file in [image, map] {
                let path = root.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            let found = KernelImage::find_below(root.path(), &release, Architecture::Amd64).unwrap();
            assert_eq!(found.system_map, Some(root.path().join(map)));
        }
    }
}
