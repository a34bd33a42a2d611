//! The kernel's own modules: where their files are and what they need. Read from the modules themselves, since
//! an unpacked package has no `modules.dep` before `depmod` has run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    path::{Path, PathBuf},
};

use object::read::ReadCache;

use super::{BootError, Result};
use crate::{
    files::read_start,
    kmod::{InTree, Module, module_name},
    payload::{self, DecompressionBudget, is_module_file},
};

/// Bytes of `modules.builtin`; Debian's has 20 kB.
const MAX_INDEX: u64 = 16 << 20;

/// The kernel's own modules.
#[derive(Debug, Default)]
pub(super) struct InTreeModules {
    files: BTreeMap<String, PathBuf>,
    /// Names of those that are part of the kernel image.
    built_in: BTreeSet<String>,
}

impl InTreeModules {
    /// Those below a kernel's module directory. What lies in `kernel/` comes with the kernel and goes before what
    /// was added to it.
    pub(super) fn find(directory: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        for entry in walkdir::WalkDir::new(directory).sort_by_file_name() {
            let entry = entry.map_err(io::Error::from)?;
            let name = entry.file_name().to_string_lossy();
            if !entry.file_type().is_file() || !is_module_file(&name) {
                continue;
            }
            let own = entry.path().strip_prefix(directory).is_ok_and(|path| path.starts_with("kernel"));
            let name = module_name(&name);
            if own || !files.contains_key(&name) {
                files.insert(name, entry.into_path());
            }
        }
        Ok(Self { files, built_in: built_in(directory)? })
    }

    /// Puts modules that others brought in the places of the kernel's own.
    pub(super) fn replace(&mut self, others: Self) {
        self.files.extend(others.files);
    }

    /// Is a module of this name part of the kernel image?
    pub(super) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.contains(name)
    }

    /// The file of a module, by its name as `lsmod` shows it.
    pub(super) fn file(&self, name: &str) -> Option<PathBuf> {
        self.files.get(name).cloned()
    }

    /// What a module must find loaded: `depends`, and what `modprobe` loads before it (`softdep` with `pre:`).
    pub(super) fn needs(&self, file: &Path, budget: &DecompressionBudget) -> Result<Vec<String>> {
        let Some(module) = parse(file, budget)? else { return Ok(Vec::new()) };
        let mut names = needs(&module);
        for wish in module.fields("softdep").flat_map(before) {
            if self.files.contains_key(&wish) {
                names.push(wish);
            } else {
                names.extend(self.algorithms(&wish, budget)?);
            }
        }
        Ok(names)
    }

    /// Modules that offer a cryptographic algorithm, which `softdep` names by it (`libcrc32c` wishes `crc32c`).
    fn algorithms(&self, algorithm: &str, budget: &DecompressionBudget) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let cryptographic = |path: &Path| path.components().any(|part| part.as_os_str() == "crypto");
        for (name, file) in self.files.iter().filter(|(_, file)| cryptographic(file)) {
            let Some(module) = parse(file, budget)? else { continue };
            if module.fields("alias").any(|alias| module_name(alias) == algorithm) {
                names.push(name.clone());
            }
        }
        Ok(names)
    }
}

/// What `modules.builtin` names, where there is one.
fn built_in(directory: &Path) -> Result<BTreeSet<String>> {
    let mut index = InTree::default();
    if let Some(text) = read_start(&directory.join("modules.builtin"), MAX_INDEX)? {
        index.add_builtin(&String::from_utf8_lossy(&text));
    }
    Ok(index.builtin)
}

/// `None` for a file that is no module: it cannot be loaded, and the kernel says so where it matters.
fn parse(file: &Path, budget: &DecompressionBudget) -> Result<Option<Module>> {
    Ok(Module::parse(&ReadCache::new(open(file, budget)?)).ok())
}

/// The names in `depends`, as `lsmod` shows them.
pub(super) fn needs(module: &Module) -> Vec<String> {
    let names = module.fields("depends").flat_map(|list| list.split(','));
    names.filter(|name| !name.is_empty()).map(module_name).collect()
}

/// Opens a module file, decompressed.
pub(super) fn open(path: &Path, budget: &DecompressionBudget) -> Result<File> {
    let reason = |reason: &str| BootError::Module(path.to_owned(), reason.to_owned());
    match payload::open_module(path, budget)? {
        Some(Ok(file)) => Ok(file),
        Some(Err(error)) => Err(reason(&error.to_string())),
        None => Err(reason("its name does not end in .ko, .ko.gz, .ko.xz or .ko.zst")),
    }
}

/// The names between `pre:` and `post:`.
fn before(softdep: &str) -> Vec<String> {
    let mut in_pre = false;
    let mut names = Vec::new();
    for word in softdep.split_whitespace() {
        match word {
            "pre:" => in_pre = true,
            "post:" => in_pre = false,
            name if in_pre => names.push(module_name(name)),
            _ => {}
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_part_of_the_kernel_image_is_told() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!InTreeModules::find(dir.path()).unwrap().is_built_in("crc32c_intel"));
        let text = "kernel/arch/x86/crypto/crc32c-intel.ko\n";
        fs_err::write(dir.path().join("modules.builtin"), text).unwrap();
        let found = InTreeModules::find(dir.path()).unwrap();
        assert!(found.is_built_in("crc32c_intel") && !found.is_built_in("crc32c"));
    }

    #[test]
    fn only_what_comes_before_counts() {
        assert_eq!(before("pre: a-b c post: d"), ["a_b", "c"]);
        assert_eq!(before("post: d pre: e"), ["e"]);
        assert_eq!(before("d"), [""; 0]);
    }
}
