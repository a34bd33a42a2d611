//! Reads facts about a kernel from its image and companion files.

use std::{
    io::{self, BufReader},
    path::{Path, PathBuf},
};

use farrier_core::kernel::KernelRelease;
use farrier_local::{blocking::stoppable, cache::Cache};
use farrier_payload as payload;
use farrier_payload::DecompressionBudget;
use fs_err::{self as fs, File};
use kmod::{self, ExtraKernelFacts, FactSource, InTree, Known, Vmlinux, VmlinuzError, exported_names};
use oci::error_chain;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{KernelImage, KernelImages, unusable};
use crate::{FetchError, Result, digest, files::read_start};

/// Maximum size of an index file in bytes; `modules.dep` of a distribution kernel has 1 MB.
const MAX_INDEX: u64 = 64 << 20;
/// Kind of the cache's records.
const KIND: &str = "kernel-facts";
/// Format version; change it when the same image gives other facts.
const FORMAT: &str = "kernel-facts-4";

/// Facts from the image itself, as recorded.
#[derive(Debug, Serialize, Deserialize)]
struct ImageFacts {
    release: Option<String>,
    beyond_headers: ExtraKernelFacts,
}

impl KernelImage {
    /// Reads the image's facts about its kernel beyond the header set. Decompresses the image into a temporary file, and reads
    /// one of the kernel's own modules. Blocks. [`KernelImages::facts`] reads each image only once.
    pub fn facts(&self) -> Result<ExtraKernelFacts> {
        let image = read_image(&self.vmlinuz)?;
        self.check_release(&image)?;
        Ok(combine(image.beyond_headers, self.companions()?))
    }

    fn check_release(&self, image: &ImageFacts) -> Result<()> {
        match &image.release {
            Some(actual) if actual != self.release.as_str() => {
                let (path, expected) = (self.vmlinuz.display(), &self.release);
                Err(FetchError::unusable(
                    format!("{path} is the image of kernel {actual}, not of {expected}"),
                    "pass the image of exactly this kernel",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the files that [`Self::companions`] reads. A module directory's own modification time does not show that a file in
    /// it was replaced.
    fn companion_files(&self) -> Vec<PathBuf> {
        let in_modules = self.modules.iter().flat_map(|directory| {
            ["", "kernel", "modules.dep", "modules.order", "modules.builtin"].map(|name| directory.join(name))
        });
        self.system_map.iter().cloned().chain(in_modules.filter(|path| path.exists())).collect()
    }

    fn companions(&self) -> Result<ExtraKernelFacts> {
        let Self { release: _, arch: _, vmlinuz: _, system_map, modules, origin: _ } = self;
        let mut facts = ExtraKernelFacts::default();
        if let Some(path) = system_map {
            let value = exported_names(BufReader::new(File::open(path)?))?;
            facts.exports =
                Some(Known { value, source: FactSource::SystemMap }).filter(|known| !known.value.is_empty());
        }
        if let Some(directory) = modules {
            add_modules(&mut facts, directory)?;
        }
        Ok(facts)
    }
}

/// Returns a key that changes when any of the files is replaced.
fn identity<'p>(what: &str, files: impl IntoIterator<Item = &'p PathBuf>) -> io::Result<String> {
    let mut parts = vec![FORMAT.to_owned(), what.to_owned()];
    for path in files {
        // One file may have several names.
        let path = fs::canonicalize(path)?;
        parts.push(format!("{} {}", path.display(), digest::stamp_of(&fs::metadata(&path)?)));
    }
    Ok(digest::of_parts(parts.iter().map(String::as_str)))
}

impl KernelImages<'_> {
    /// Returns the facts of a kernel image, from the cache after the first time.
    pub async fn facts(self, image: &KernelImage) -> Result<ExtraKernelFacts> {
        let (cache, image) = (self.0.cache.clone(), image.clone());
        stoppable(move |_| {
            let from_image = image_facts(&cache, &image.vmlinuz)?;
            image.check_release(&from_image)?;
            let key = identity("companions", &image.companion_files())?;
            let companions = recorded_or_read(&cache, &key, || image.companions())?;
            Ok(combine(from_image.beyond_headers, companions))
        })
        .await
    }

    /// Returns the release that a kernel image states; `None` if it states none.
    pub(super) async fn release_of(self, vmlinuz: &Path) -> Result<Option<KernelRelease>> {
        let (cache, path) = (self.0.cache.clone(), vmlinuz.to_owned());
        let facts = stoppable(move |_| image_facts(&cache, &path)).await?;
        Ok(facts.release.and_then(|release| release.parse().ok()))
    }
}

fn image_facts(cache: &Cache, vmlinuz: &PathBuf) -> Result<ImageFacts> {
    recorded_or_read(cache, &identity("image", [vmlinuz])?, || read_image(vmlinuz))
}

/// Returns the recorded value, or calls `read` and records its result.
fn recorded_or_read<T: Serialize + DeserializeOwned>(
    cache: &Cache,
    key: &str,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if let Some(recorded) = cache.read_record(KIND, key)? {
        return Ok(recorded);
    }
    let facts = read()?;
    cache.write_record(KIND, key, &facts)?;
    Ok(facts)
}

fn read_image(path: &Path) -> Result<ImageFacts> {
    let unreadable =
        |source: VmlinuzError| unusable(&format!("cannot read {}", path.display()), &source, source.remedy());
    let mut file = File::open(path).map_err(|source| unreadable(source.into()))?.into_file();
    let payload = kmod::locate(&mut file).map_err(unreadable)?;
    let is_uncompressed = payload.method == kmod::Method::Plain && payload.offset == 0;
    if !is_uncompressed {
        // Unpack into a file, not into memory: the kernel is larger than all other data of a check.
        let mut unpacked = tempfile::tempfile().map_err(|source| unreadable(source.into()))?;
        let mut reader = kmod::kernel(&mut file, &payload).map_err(unreadable)?;
        kmod::unpack(reader.as_mut(), &mut unpacked).map_err(unreadable)?;
        drop(reader);
        file = unpacked;
    }
    let mut vmlinux = Vmlinux::open(file).map_err(unreadable)?;
    let beyond_headers = vmlinux.facts().map_err(unreadable)?;
    Ok(ImageFacts { release: vmlinux.release().map_err(unreadable)?, beyond_headers })
}

/// Adds facts from the kernel's own module directory. Reads the index files and one module. Without an index, as in packages whose
/// installation runs depmod, lists the module files. Blocks.
pub(super) fn add_modules(facts: &mut ExtraKernelFacts, directory: &Path) -> Result<()> {
    let mut index = InTree::default();
    for name in ["modules.dep", "modules.order"] {
        if let Some(text) = read_index(&directory.join(name))? {
            index.add_modules(&text);
        }
        // `modules.dep` has the names after compression, `modules.order` those before it.
        if !index.modules.is_empty() {
            break;
        }
    }
    let exists = |file: &String| directory.join(file).is_file();
    if !index.modules.values().any(exists) {
        index.modules.clear();
        walk(directory, &mut index)?;
    }
    if let Some(text) = read_index(&directory.join("modules.builtin"))? {
        index.add_builtin(&text);
    }
    // Skip modules outside of `kernel/`, which were added later and state no facts about the kernel.
    let in_tree = index.modules.values().filter(|file| file.starts_with("kernel/"));
    let sample = match in_tree.map(|file| directory.join(file)).find(|path| path.is_file()) {
        Some(path) => payload::read_module(&path, &DecompressionBudget::without_build())
            .map_err(|error| {
                FetchError::unusable(error_chain(&error), "check the file's permissions and the disk")
            })?
            .and_then(|read| read.module.ok()),
        None => None,
    };
    if let Some(module) = sample {
        facts.add_own_module(module);
    }
    if !index.is_empty() {
        facts.in_tree = Some(Known { value: index, source: FactSource::ModuleIndex });
    }
    Ok(())
}

fn read_index(path: &Path) -> io::Result<Option<String>> {
    Ok(read_start(path, MAX_INDEX)?.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

/// Lists only modules below `kernel/`: others were added later, and are not the kernel's own.
fn walk(directory: &Path, index: &mut InTree) -> io::Result<()> {
    let kernel = directory.join("kernel");
    if !kernel.is_dir() {
        return Ok(());
    }
    for entry in walkdir::WalkDir::new(&kernel).sort_by_file_name() {
        let entry = entry?;
        if entry.file_type().is_file()
            && let Some(file) = entry.path().strip_prefix(directory).ok().and_then(Path::to_str)
        {
            index.add_module(file);
        }
    }
    Ok(())
}

/// Combines facts. The image takes precedence, because it is the kernel itself: its symbol table over `System.map`, and its type
/// information over one module.
fn combine(image: ExtraKernelFacts, companions: ExtraKernelFacts) -> ExtraKernelFacts {
    ExtraKernelFacts {
        btf_base: image.btf_base,
        builder: image.builder,
        module_size: image.module_size.or(companions.module_size),
        exports: image.exports.or(companions.exports),
        ..companions
    }
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
