//! Reads the facts about a kernel from its unpacked header set.

use std::{
    error::Error,
    io::{self, Read},
    path::{Path, PathBuf},
};

use farrier_core::kernel::{Architecture, Compiler, KernelRelease};
use farrier_local::archive::links::resolve;
use fs_err::File;
use kmod::{HeaderError, KernelFacts};

/// Maximum size of a file in bytes; Debian's `Module.symvers` has 2 MB.
const MAX_FILE: u64 = 64 << 20;

/// Reason why a tree is not the header set of a kernel.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The tree has no build directory for this release.
    #[error(
        "the tree has no build directory of {0}: neither lib/modules/{0}/build nor usr/lib/modules/{0}/build"
    )]
    NoBuild(KernelRelease),
    /// The build directory has neither of these files, so it does not state its release or its kernel's configuration.
    #[error("{0} holds neither {1}")]
    Unprepared(PathBuf, &'static str),
    /// The build directory belongs to another kernel.
    #[error("{build} is the build directory of {actual:?}, not of {expected}")]
    Release { build: PathBuf, actual: String, expected: KernelRelease },
    /// The build directory is configured for another architecture than the kernel's.
    #[error("{0} is configured for an architecture other than {1}")]
    Architecture(PathBuf, Architecture),
    /// The kernel's configuration or symbol table is damaged, or the compiler is unknown.
    #[error("cannot read {what} in {build}")]
    Damaged { what: &'static str, build: PathBuf, source: Box<dyn Error + Send + Sync> },
    /// A file or link of the tree cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl TreeError {
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NoBuild(_) | Self::Release { .. } | Self::Architecture(..) => {
                "provide the header set of exactly this kernel and architecture"
            }
            Self::Unprepared(..) => "provide a build tree on which `make modules_prepare` was run",
            Self::Damaged { .. } => "fetch the header set again; if the file is unmodified, report a bug",
            Self::Io(_) => "check the file's permissions and the disk",
        }
    }
}

/// Reads the header set of `release` in a tree rooted at `/`: `lib/modules/<release>/build` and the trees that it links to. Links
/// are resolved inside `root`: an absolute link starts at `root`, and `..` does not leave `root`.
pub fn read_header_set(
    root: &Path,
    release: &KernelRelease,
    arch: Architecture,
) -> Result<(KernelFacts, Option<Compiler>), TreeError> {
    let build = find_build(root, release)?;
    let read = |file: &str| read_inside(root, &build.join(file));
    let header = |name: &str| read_header(root, release, name);
    let facts =
        KernelFacts::of_headers(Some((release, arch)), read, header).map_err(|error| match error {
            HeaderError::Unprepared(files) => TreeError::Unprepared(build.clone(), files),
            HeaderError::Release(actual) => {
                TreeError::Release { build: build.clone(), actual, expected: release.clone() }
            }
            HeaderError::Architecture => TreeError::Architecture(build.clone(), arch),
            HeaderError::Damaged(what, source) => TreeError::Damaged { what, build: build.clone(), source },
            HeaderError::Io(error) => error.into(),
        })?;
    // An unknown compiler is not an error here: the kernel's loader does not compare compilers, and only builds need the compiler.
    let compiler = facts.config.get("CC_VERSION_TEXT").and_then(|text| text.parse().ok());
    Ok((facts, compiler))
}

/// Returns the build directory's path relative to the root, with links resolved.
pub fn find_build(root: &Path, release: &KernelRelease) -> Result<PathBuf, TreeError> {
    for modules in ["lib/modules", "usr/lib/modules"] {
        let path = Path::new(modules).join(release.as_str()).join("build");
        if let Some(directory) = resolve(root, &path)?.filter(|directory| root.join(directory).is_dir()) {
            return Ok(directory);
        }
    }
    Err(TreeError::NoBuild(release.clone()))
}

/// Reads a header in the build tree of `release`, or in its source tree, where distributions keep headers shared by their flavors.
pub fn read_header(root: &Path, release: &KernelRelease, header: &str) -> io::Result<Option<String>> {
    for tree in ["build", "source"] {
        for modules in ["lib/modules", "usr/lib/modules"] {
            let path = Path::new(modules).join(release.as_str()).join(tree).join(header);
            if let Some(text) = read_inside(root, &path)? {
                return Ok(Some(text));
            }
        }
    }
    Ok(None)
}

/// Reads a file's text; returns `None` if the file does not exist.
fn read_inside(root: &Path, path: &Path) -> io::Result<Option<String>> {
    let Some(resolved) = resolve(root, path)? else { return Ok(None) };
    let file = File::open(root.join(&resolved))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > MAX_FILE {
        let text = format!("cannot read {}: it is not a file of at most 64 MiB", resolved.display());
        return Err(io::Error::other(text));
    }
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use fs_err::{self as fs, os::unix::fs::symlink};

    use super::*;

    const RELEASE: &str = "6.1.0-9-amd64";

    struct Tree(tempfile::TempDir);

    impl Tree {
        /// Debian's layout: an absolute link, and a `kernel.release` that differs from the release.
        fn debian() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            tree.write(
                "usr/src/h/include/generated/utsrelease.h",
                &format!("#define UTS_RELEASE \"{RELEASE}\"\n"),
            );
            tree.write("usr/src/h/include/config/kernel.release", "6.1.20\n");
            tree.write("usr/src/h/include/config/auto.conf", "CONFIG_X86_64=y\nCONFIG_SMP=y\n");
            tree.write("usr/src/h/Module.symvers", "0x00000001\tprintk\tvmlinux\tEXPORT_SYMBOL\t\n");
            tree.link("/usr/src/h", &format!("lib/modules/{RELEASE}/build"));
            tree
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn link(&self, target: &str, path: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let _ = fs::remove_file(&path);
            symlink(target, path).unwrap();
        }

        fn remove(&self, path: &str) {
            fs::remove_file(self.0.path().join(path)).unwrap();
        }

        fn read(&self) -> Result<KernelFacts, TreeError> {
            read_header_set(self.0.path(), &RELEASE.parse().unwrap(), Architecture::Amd64)
                .map(|(facts, _)| facts)
        }
    }

    #[test]
    fn reads_a_debian_tree_through_its_absolute_link() {
        let facts = Tree::debian().read().unwrap();
        assert!(facts.config.is_set("SMP"));
        assert_eq!(facts.symbols.unwrap().get("printk").unwrap().crc, 1);
    }

    #[test]
    fn reads_a_usr_lib_tree_and_a_plain_config() {
        let tree = Tree::debian();
        tree.remove(&format!("lib/modules/{RELEASE}/build"));
        tree.remove("usr/src/h/include/generated/utsrelease.h");
        tree.write("usr/src/h/include/config/kernel.release", &format!("{RELEASE}\n"));
        tree.remove("usr/src/h/include/config/auto.conf");
        tree.write("usr/src/h/.config", "# comment\nCONFIG_X86_64=y\n");
        tree.write("usr/src/h/Module.symvers", "");
        tree.link("/lib/x/h", &format!("usr/lib/modules/{RELEASE}/build"));
        tree.link("../src", "usr/lib/x");
        fs::remove_dir_all(tree.0.path().join("lib")).unwrap();
        assert!(tree.read().unwrap().symbols.is_none());
    }

    #[test]
    fn a_header_is_read_where_flavors_share_it() {
        let tree = Tree::debian();
        tree.write("usr/src/common/include/linux/pci.h", "shared");
        tree.link("/usr/src/common", &format!("lib/modules/{RELEASE}/source"));
        let read = |header| read_header(tree.0.path(), &RELEASE.parse().unwrap(), header).unwrap();
        assert_eq!(read("include/linux/pci.h").as_deref(), Some("shared"));
        assert_eq!(read("include/linux/none.h"), None);
        tree.write("usr/src/h/include/linux/pci.h", "its own");
        assert_eq!(read("include/linux/pci.h").as_deref(), Some("its own"));
    }

    #[test]
    fn another_release_is_told() {
        let tree = Tree::debian();
        tree.write("usr/src/h/include/generated/utsrelease.h", "#define UTS_RELEASE \"6.1.0-8-amd64\"\n");
        assert_eq!(
            tree.read().unwrap_err().to_string(),
            "usr/src/h is the build directory of \"6.1.0-8-amd64\", not of 6.1.0-9-amd64"
        );
    }

    #[test]
    fn what_is_missing_or_wrong_is_told() {
        let tree = Tree::debian();
        tree.write("usr/src/h/Module.symvers", "<html>\n");
        assert!(matches!(tree.read(), Err(TreeError::Damaged { what: "Module.symvers", .. })));
        tree.write("usr/src/h/include/config/auto.conf", "CONFIG_ARM64=y\n");
        assert!(matches!(tree.read(), Err(TreeError::Architecture(..))));
        tree.write("usr/src/h/include/config/auto.conf", "nothing");
        assert!(matches!(tree.read(), Err(TreeError::Damaged { what: "the configuration", .. })));
        tree.remove("usr/src/h/include/config/auto.conf");
        assert_eq!(
            tree.read().unwrap_err().to_string(),
            "usr/src/h holds neither include/config/auto.conf nor .config"
        );
        tree.remove("usr/src/h/include/config/kernel.release");
        tree.remove("usr/src/h/include/generated/utsrelease.h");
        let release = "include/generated/utsrelease.h nor include/config/kernel.release";
        assert_eq!(tree.read().unwrap_err().to_string(), format!("usr/src/h holds neither {release}"));
        tree.remove(&format!("lib/modules/{RELEASE}/build"));
        assert!(matches!(tree.read(), Err(TreeError::NoBuild(_))));
    }

    #[test]
    fn no_link_leaves_the_tree() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "CONFIG_X86_64=y\n").unwrap();
        let tree = Tree::debian();
        tree.link(&format!("{}/secret", outside.path().display()), "usr/src/h/include/config/auto.conf");
        assert!(matches!(tree.read(), Err(TreeError::Unprepared(_, files)) if files.contains(".config")));
        let climb = "../".repeat(64) + outside.path().strip_prefix("/").unwrap().to_str().unwrap();
        tree.link(&climb, &format!("lib/modules/{RELEASE}/build"));
        assert!(matches!(tree.read(), Err(TreeError::NoBuild(_))));
    }

    #[test]
    fn a_loop_of_links_ends() {
        let tree = Tree::debian();
        tree.link("b", "a");
        tree.link("a", "b");
        tree.link("/a", &format!("lib/modules/{RELEASE}/build"));
        assert!(matches!(tree.read(), Err(TreeError::Io(_))));
    }

    #[test]
    fn a_directory_in_a_files_place_is_a_fault() {
        let tree = Tree::debian();
        tree.remove("usr/src/h/Module.symvers");
        tree.write("usr/src/h/Module.symvers/x", "");
        assert!(matches!(tree.read(), Err(TreeError::Io(_))));
    }
}
