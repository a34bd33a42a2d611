//! Fetches kernel images into the cache.

use std::path::Path;

use farrier_core::{
    image::checked::{HeadersPath, PackageAlternatives},
    kernel::{Architecture, KernelFamily, KernelImageFile, KernelImageSource, KernelRelease, KernelTarget},
};
use farrier_local::tree_removal::remove_tree;
use fs_err as fs;

use super::{KernelImage, KernelImageLookup, KernelImages};
use crate::{
    FetchError, Lookup, Result, TREE,
    files::{is_directory, name_of},
    kernel_packages::{Location, Search},
    with_release,
};

/// Format version; change it when the same packages are laid out differently.
const FORMAT: &str = "kernel-image-1";
/// Kind of the cache entries and records.
const KIND: &str = "kernel-images";

/// Hint for a kernel image that cannot be fetched.
const NOT_MIRRORED_HINT: &str = "kernel images are not stored in registries; put the kernel's vmlinuz and modules into \
                                 the definitions directory and name them as the family's `kernelImage: file`, or add a \
                                 mirror of the kernel's packages, and the mirror's host, to site.yaml";

/// Whether a search may contact the package archive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Archive,
    Local,
}

impl KernelImages<'_> {
    /// Finds the target's kernel image, fetching it if needed.
    pub async fn find(self, family: &KernelFamily, target: &KernelTarget) -> Result<KernelImageLookup> {
        self.find_in_scope(family, target, Scope::Archive).await
    }

    /// Returns the target's kernel image if it is already in the cache or in the location that the definition names.
    pub async fn find_local(
        self,
        family: &KernelFamily,
        target: &KernelTarget,
    ) -> Result<Option<KernelImage>> {
        match self.find_in_scope(family, target, Scope::Local).await? {
            Lookup::Found(image) => Ok(Some(*image)),
            Lookup::Missing { .. } => Ok(None),
        }
    }

    async fn find_in_scope(
        self,
        family: &KernelFamily,
        target: &KernelTarget,
        scope: Scope,
    ) -> Result<KernelImageLookup> {
        let from = match &family.spec.kernel_image {
            Some(KernelImageSource::Apt(apt)) => {
                let alternatives =
                    |group: &PackageAlternatives| group.split(" | ").map(str::to_owned).collect();
                let groups = apt.packages.iter().map(alternatives).collect();
                Location::Apt(apt.apt_suites(), groups)
            }
            Some(KernelImageSource::Rpm(rpm)) => match rpm.archive(family.spec.headers.rpm_archive()) {
                Some(archive) => Location::Rpm(archive, &rpm.packages),
                None => return Ok(no_source_defined(family, target)),
            },
            Some(KernelImageSource::File(file)) => return Ok(file_image(file, &self.0.root, target)),
            None => return Ok(no_source_defined(family, target)),
        };
        let describe = || format!("kernel image of {} ({})", target.release, target.arch);
        self.0.explain_with_hint(self.search(from, target, scope).await, describe, NOT_MIRRORED_HINT)
    }

    async fn search(
        self,
        from: Location<'_>,
        target: &KernelTarget,
        scope: Scope,
    ) -> Result<KernelImageLookup> {
        let hint = "add the suite or repository that has it to the family's kernelImage, or pass \
            --kernel-image PATH";
        let fetcher = self.0;
        let search =
            Search { fetcher, target, kind: KIND, format: FORMAT, from, with_dependencies: false, hint };
        let names: Vec<String> = search.names().iter().map(|group| group.join(" or ")).collect();
        let names = names.join(", ");
        let lookup = if scope == Scope::Local {
            search.known()?.map_or_else(|| search.missing(&names), Lookup::Found)
        } else {
            let (kernel, package_names) = (target.clone(), names.clone());
            let finish = move |root: &Path| {
                prune(root)?;
                let KernelTarget { release, arch, .. } = &kernel;
                KernelImage::find_below(root, release, *arch).map(drop).ok_or_else(|| {
                    FetchError::Layout(format!("boot/vmlinuz-{release} in {package_names}: no such file"))
                })
            };
            search.run(finish).await?
        };
        let record = match lookup {
            Lookup::Found(record) => record,
            Lookup::Missing { looked_for, hint } => return Ok(Lookup::Missing { looked_for, hint }),
        };
        let root = self.0.cache.entry_path(KIND, &record.key)?.join(TREE);
        let image = KernelImage::find_below(&root, &target.release, target.arch);
        let Some(image) = image else { return Ok(search.missing(&names)) };
        Ok(Lookup::Found(Box::new(KernelImage { origin: record.origin, ..image })))
    }

    /// Returns a user-provided kernel image. Without `release`, the release is read from the image.
    pub async fn file(
        self,
        vmlinuz: &Path,
        release: Option<&KernelRelease>,
        arch: Architecture,
    ) -> Result<KernelImage> {
        let release = if let Some(release) = release {
            release.clone()
        } else {
            self.release_of(vmlinuz).await?.ok_or_else(|| {
                let path = vmlinuz.display();
                FetchError::Layout(format!(
                    "the kernel's release in {path}: it contains no `Linux version` string; pass --kernel"
                ))
            })?
        };
        let origin = vec![vmlinuz.display().to_string()];
        // As in /boot: `vmlinuz-X` next to `System.map-X`.
        let system_map = vmlinuz.with_file_name(format!("System.map-{release}"));
        let is_map_of_image = name_of(vmlinuz) == format!("vmlinuz-{release}") && system_map.is_file();
        let system_map = is_map_of_image.then_some(system_map);
        let modules = KernelImage::modules_beside(vmlinuz, &release);
        Ok(KernelImage { release, arch, vmlinuz: vmlinuz.to_owned(), system_map, modules, origin })
    }
}

/// Returns the result for a family without a source of kernel images.
fn no_source_defined(family: &KernelFamily, target: &KernelTarget) -> KernelImageLookup {
    let name = &family.metadata.name;
    Lookup::Missing {
        looked_for: format!("the kernel image of {target}"),
        hint: format!("add `kernelImage` to kernel family {name}, or pass --kernel-image PATH"),
    }
}

fn file_image(file: &KernelImageFile, root: &Path, target: &KernelTarget) -> KernelImageLookup {
    let KernelImageFile { path, modules, system_map } = file;
    let path_of = |text: &HeadersPath| root.join(with_release(text, target));
    let vmlinuz = path_of(path);
    if !vmlinuz.is_file() {
        return Lookup::Missing {
            looked_for: vmlinuz.display().to_string(),
            hint: format!("put the kernel image (vmlinuz) of {} there", target.release),
        };
    }
    let KernelTarget { release, arch, .. } = target;
    Lookup::Found(Box::new(KernelImage {
        release: release.clone(),
        arch: *arch,
        origin: vec![vmlinuz.display().to_string()],
        vmlinuz,
        system_map: system_map.as_ref().map(path_of).filter(|path| path.is_file()),
        modules: modules.as_ref().map(path_of).filter(|path| path.is_dir()),
    }))
}

/// Removes all files except the image, its map and configuration, and the modules.
fn prune(root: &Path) -> Result<()> {
    let is_boot_file =
        |name: &str| ["vmlinuz", "System.map", "config"].iter().any(|start| name.starts_with(start));
    retain_entries(root, &|name| matches!(name, "boot" | "lib" | "usr"))?;
    retain_entries(&root.join("boot"), &is_boot_file)?;
    retain_entries(&root.join("lib"), &|name| name == "modules")?;
    retain_entries(&root.join("usr"), &|name| name == "lib")?;
    retain_entries(&root.join("usr/lib"), &|name| name == "modules")
}

fn retain_entries(directory: &Path, is_kept: &dyn Fn(&str) -> bool) -> Result<()> {
    if !is_directory(directory) {
        return Ok(());
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if is_kept(&entry.file_name().to_string_lossy()) {
            continue;
        }
        remove_tree(&entry.path())?;
    }
    Ok(())
}
