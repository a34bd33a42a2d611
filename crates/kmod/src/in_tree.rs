//! Pure: `modules.dep`, `modules.order` and `modules.builtin`: the modules that come with a kernel.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::module_name;

/// Modules of one kernel. Distribution kernels have about 4,000.
const MAX_MODULES: usize = 100_000;

/// The modules that come with a kernel. Names as `lsmod` shows them.
///
/// Memory: at most 30 times the texts that it takes in, and 32 MiB beside their length: 100,000 modules of each kind. What is
/// beyond that is not known as a module of the kernel's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InTree {
    /// Loadable ones, with their files relative to the kernel's module directory.
    pub modules: BTreeMap<String, String>,
    /// Those that are part of the kernel image.
    pub builtin: BTreeSet<String>,
}

impl InTree {
    /// Takes in `modules.dep` (`kernel/a.ko.xz: kernel/b.ko.xz ...`) or `modules.order` (`kernel/a.ko`): the
    /// first word of each line is a module's file. Modules that are known already stay as they are.
    pub fn add_modules(&mut self, text: &str) {
        for line in text.lines() {
            let file = line.split([':', ' ', '\t']).next().unwrap_or_default();
            self.add_module(file);
        }
    }

    /// Takes in one module's file, relative to the kernel's module directory; what is no module is passed over.
    pub fn add_module(&mut self, file: &str) {
        if is_module(file) && self.modules.len() < MAX_MODULES {
            self.modules.entry(module_name(file)).or_insert_with(|| file.to_owned());
        }
    }

    /// Takes in `modules.builtin` (`kernel/a.ko`, one on each line).
    pub fn add_builtin(&mut self, text: &str) {
        let files = text.lines().map(str::trim).filter(|file| is_module(file));
        self.builtin.extend(files.map(module_name).take(MAX_MODULES.saturating_sub(self.builtin.len())));
    }

    /// Nothing in it?
    pub fn is_empty(&self) -> bool {
        let Self { modules, builtin } = self;
        modules.is_empty() && builtin.is_empty()
    }
}

/// A module's file, within the module directory.
fn is_module(file: &str) -> bool {
    let named = [".ko", ".ko.gz", ".ko.xz", ".ko.zst"].iter().any(|end| file.ends_with(end));
    named && !file.starts_with('/') && !file.split('/').any(|part| matches!(part, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_index_files_of_a_kernel() {
        let mut index = InTree::default();
        assert!(index.is_empty());
        index.add_modules(
            "kernel/drivers/net/mlx5-core.ko.xz: kernel/net/psample.ko.xz\nkernel/net/psample.ko.xz:\n\
             /outside.ko: \n../up.ko:\nupdates/dkms/nvidia.ko:\nmodules.alias\n\n",
        );
        index.add_modules("kernel/net/psample.ko\nkernel/fs/ext4/ext4.ko\n");
        index.add_builtin(
            "kernel/arch/x86/crypto/aes-x86_64.ko\nkernel/fs/nfs_common/nfs_acl.ko\nnot a module\n",
        );
        let modules: Vec<_> =
            index.modules.iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
        assert_eq!(
            modules,
            [
                ("ext4", "kernel/fs/ext4/ext4.ko"),
                ("mlx5_core", "kernel/drivers/net/mlx5-core.ko.xz"),
                ("nvidia", "updates/dkms/nvidia.ko"),
                ("psample", "kernel/net/psample.ko.xz"),
            ]
        );
        assert_eq!(index.builtin.iter().collect::<Vec<_>>(), ["aes_x86_64", "nfs_acl"]);
        assert!(!index.is_empty());
    }

    proptest! {
        #[test]
        fn never_panics_and_stays_inside(text in "[a-z./: \\n\\PC]{0,200}") {
            let mut index = InTree::default();
            index.add_modules(&text);
            index.add_builtin(&text);
            prop_assert!(index.modules.values().all(|file| !file.contains("..") || !file.split('/').any(|p| p == "..")));
        }
    }
}
