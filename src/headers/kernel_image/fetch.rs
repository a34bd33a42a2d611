//! Adapter: fetches kernel images into the cache.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{KernelImage, KernelImageLookup};
use crate::{
    headers::{
        FetchError, Fetcher,
        apt::{self, AptArchive, Closure, control},
        blocking::blocking,
        digest,
        header_set::with_release,
        io_error, unpack,
    },
    kernel::{
        AptKernelImage, Architecture, KernelFamily, KernelImageFile, KernelImageSource, KernelRelease,
        KernelTarget,
    },
};

/// Changes when the same packages are laid out differently.
const FORMAT: &str = "kernel-image-1";
/// The kind of the cache's entries and records.
const KIND: &str = "kernel-images";
/// The tree's name in its cache entry.
const TREE: &str = "tree";

/// What to do about a kernel image that cannot be fetched: no store holds them.
const BRING: &str = "registries keep no kernel images: put the kernel's vmlinuz and modules into the definitions directory and \
                     name them as the family's `kernelImage: file`, or name a mirror of its packages, and its host, in \
                     site.yaml";

/// Remembers what a search came to, as for header sets.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    key: String,
    origin: Vec<String>,
}

/// May a search ask the archive, or only look at what is here?
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Archive,
    Here,
}

impl Fetcher {
    /// Looks for the target's kernel image, relative paths starting at `root` (the definitions directory), and
    /// fetches it if need be.
    pub async fn kernel_image(
        &self,
        family: &KernelFamily,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<KernelImageLookup, FetchError> {
        self.look_for_image(family, root, target, Reach::Archive).await
    }

    /// The target's kernel image if it is here already: in the cache, or where the definition says.
    pub async fn kernel_image_at_hand(
        &self,
        family: &KernelFamily,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<Option<KernelImage>, FetchError> {
        match self.look_for_image(family, root, target, Reach::Here).await? {
            KernelImageLookup::Found(image) => Ok(Some(*image)),
            KernelImageLookup::Missing { .. } => Ok(None),
        }
    }

    async fn look_for_image(
        &self,
        family: &KernelFamily,
        root: &Path,
        target: &KernelTarget,
        reach: Reach,
    ) -> Result<KernelImageLookup, FetchError> {
        match &family.spec.kernel_image {
            Some(KernelImageSource::Apt(apt)) => {
                let what = || format!("kernel image of {} ({})", target.release, target.arch);
                self.unless_kept(self.apt_image(apt, target, reach).await, what, BRING)
            }
            Some(KernelImageSource::File(file)) => Ok(file_image(file, root, target)),
            None => Ok(KernelImageLookup::Missing {
                looked_for: format!("the kernel image of {target}"),
                hint: format!(
                    "add `kernelImage` to kernel family {}, or give --kernel-image PATH",
                    family.metadata.name
                ),
            }),
        }
    }

    async fn apt_image(
        &self,
        image: &AptKernelImage,
        target: &KernelTarget,
        reach: Reach,
    ) -> Result<KernelImageLookup, FetchError> {
        let AptKernelImage { packages, from } = image;
        let groups: Vec<Vec<String>> = packages
            .iter()
            .map(|group| group.split(" | ").map(|name| with_release(name, target)).collect())
            .collect();
        let missing = |names: &str| {
            KernelImageLookup::Missing {
            looked_for: format!("package {names} ({}) in {}", target.arch, from.suites.join(", ")),
            hint: "add the suite that has it to `suites` of the family's kernelImage, or give --kernel-image PATH"
                .to_owned(),
        }
        };
        let wanted = groups.iter().map(|group| group.join(" or ")).collect::<Vec<_>>().join(", ");
        let search = search_key(&groups, image, target);
        if let Some(Found { key, origin }) = self.cache.read_record::<Found>(KIND, &search)?
            && let Some(place) = self.cache.get(KIND, &key)?
        {
            return Ok(in_tree(&place.join(TREE), target, origin).unwrap_or_else(|| missing(&wanted)));
        }
        if reach == Reach::Here {
            return Ok(missing(&wanted));
        }
        let options = &self.options;
        let archive =
            AptArchive::open(&self.cache, &self.net, &options.apt_dir, from, target.arch, options.refresh)
                .await?;
        let packages = match archive.choose(&groups).await? {
            Closure::Found(packages) => packages,
            Closure::Missing(names) => return Ok(missing(&names)),
        };
        let origin: Vec<String> = packages.iter().map(control::PackageRecord::identity).collect();
        let head = [FORMAT, target.release.as_str(), target.arch.as_str()];
        let key = digest::of_parts(head.into_iter().chain(origin.iter().map(String::as_str)));
        let make = |dir: PathBuf| {
            let packages = &packages;
            let archive = &archive;
            async move {
                let files = archive.download(packages).await?;
                let labels: Vec<String> =
                    packages.iter().map(|p| format!("package {}={}", p.name, p.version)).collect();
                blocking(move |stop| {
                    let root = dir.join(TREE);
                    fs::create_dir(&root).map_err(io_error("create", &root))?;
                    for (file, label) in files.iter().zip(&labels) {
                        unpack(stop, file, &root, label)?;
                    }
                    prune(&root)
                })
                .await
            }
        };
        let place = self.cache.get_or_make(KIND, &key, make).await?;
        let lookup =
            in_tree(&place.join(TREE), target, origin.clone()).ok_or_else(|| FetchError::Layout {
                wanted: format!("boot/vmlinuz-{}", target.release),
                what: wanted,
                found: "no such file".to_owned(),
            })?;
        self.cache.write_record(KIND, &search, &Found { key, origin })?;
        Ok(lookup)
    }

    /// A kernel image that somebody brings, with the release that it says itself where none is given.
    pub async fn kernel_image_file(
        &self,
        vmlinuz: &Path,
        release: Option<&KernelRelease>,
        arch: Architecture,
    ) -> Result<KernelImage, FetchError> {
        let release = if let Some(release) = release {
            release.clone()
        } else {
            self.release_of(vmlinuz).await?.ok_or_else(|| FetchError::Layout {
                wanted: "the kernel's release".to_owned(),
                what: vmlinuz.display().to_string(),
                found: "it holds no `Linux version`; say it with --kernel".to_owned(),
            })?
        };
        let name = vmlinuz.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let origin = vec![vmlinuz.display().to_string()];
        // As /boot has them: `vmlinuz-X` beside `System.map-X`.
        let system_map = vmlinuz.with_file_name(format!("System.map-{release}"));
        let system_map = (name == format!("vmlinuz-{release}") && system_map.is_file()).then_some(system_map);
        Ok(KernelImage { release, arch, vmlinuz: vmlinuz.to_owned(), system_map, modules: None, origin })
    }
}

/// The image in a tree of unpacked packages.
fn in_tree(root: &Path, target: &KernelTarget, origin: Vec<String>) -> Option<KernelImageLookup> {
    let image = KernelImage::below(root, &target.release, target.arch)?;
    Some(KernelImageLookup::Found(Box::new(KernelImage { origin, ..image })))
}

fn file_image(file: &KernelImageFile, root: &Path, target: &KernelTarget) -> KernelImageLookup {
    let KernelImageFile { path, modules, system_map } = file;
    let place = |text: &String| root.join(with_release(text, target));
    let vmlinuz = place(path);
    if !vmlinuz.is_file() {
        return KernelImageLookup::Missing {
            looked_for: vmlinuz.display().to_string(),
            hint: format!("put the kernel image (vmlinuz) of {} there", target.release),
        };
    }
    let KernelTarget { release, arch, .. } = target;
    KernelImageLookup::Found(Box::new(KernelImage {
        release: release.clone(),
        arch: *arch,
        origin: vec![vmlinuz.display().to_string()],
        vmlinuz,
        system_map: system_map.as_ref().map(place).filter(|path| path.is_file()),
        modules: modules.as_ref().map(place).filter(|path| path.is_dir()),
    }))
}

/// Leaves only what is read or booted: the image, its map and configuration, and the modules.
fn prune(root: &Path) -> Result<(), FetchError> {
    let is_boot =
        |name: &str| ["vmlinuz", "System.map", "config"].iter().any(|start| name.starts_with(start));
    keep(root, &|name| matches!(name, "boot" | "lib" | "usr"))?;
    keep(&root.join("boot"), &is_boot)?;
    keep(&root.join("lib"), &|name| name == "modules")?;
    keep(&root.join("usr"), &|name| name == "lib")?;
    keep(&root.join("usr/lib"), &|name| name == "modules")
}

fn keep(directory: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<(), FetchError> {
    if !fs::symlink_metadata(directory).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    for entry in fs::read_dir(directory).map_err(io_error("list", directory))? {
        let entry = entry.map_err(io_error("list", directory))?;
        if wanted(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(io_error("remove", &path))?;
    }
    Ok(())
}

fn search_key(groups: &[Vec<String>], image: &AptKernelImage, target: &KernelTarget) -> String {
    let suites = apt::key_parts(&image.from);
    let names: Vec<String> = groups.iter().map(|group| group.join(" | ")).collect();
    let head = [FORMAT, target.release.as_str(), target.arch.as_str()];
    digest::of_parts(head.into_iter().chain(names.iter().chain(&suites).map(String::as_str)))
}
