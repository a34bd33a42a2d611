//! Index from module names to files; the image's tree takes precedence over the host's.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use walkdir::{DirEntry, WalkDir};

use crate::{
    error::Error,
    files::if_exists,
    module_file::{ModuleFile, Origin, kernel_name},
    node::Node,
};

/// Modules of several trees. The first tree that has a name wins.
#[derive(Debug, Default)]
pub(crate) struct Index {
    files: BTreeMap<String, ModuleFile>,
    built_in: BTreeSet<String>,
    trees: Vec<PathBuf>,
    release: String,
}

impl Index {
    /// Indexes the image's modules before the host's, for the running kernel.
    pub(crate) fn of_node(node: &Node<'_>) -> Result<Self, Error> {
        let release = node.kernel.release();
        let image = node.paths.image_modules(&release);
        let host = node.paths.host_modules(&release);
        Self::read(&release, &[(Origin::Image, image), (Origin::Host, host)])
    }

    /// Indexes the host's modules only, as they were before the driver container.
    pub(crate) fn of_host(node: &Node<'_>) -> Result<Self, Error> {
        let release = node.kernel.release();
        Self::read(&release, &[(Origin::Host, node.paths.host_modules(&release))])
    }

    /// Reads trees such as `/lib/modules/<release>`, in order of precedence. A missing tree counts as empty.
    pub(crate) fn read(release: &str, trees: &[(Origin, PathBuf)]) -> Result<Self, Error> {
        let mut index = Self { release: release.to_owned(), ..Self::default() };
        for (origin, directory) in trees {
            index.trees.push(directory.clone());
            for file in module_files(directory, *origin)? {
                if let Some((name, file)) = ModuleFile::of(&file, *origin) {
                    index.files.entry(name).or_insert(file);
                }
            }
            let built_in = read_text(&directory.join("modules.builtin"))?.unwrap_or_default();
            let names = built_in.lines().filter_map(|line| ModuleFile::of(Path::new(line), *origin));
            index.built_in.extend(names.map(|(name, _)| name));
        }
        Ok(index)
    }

    /// Returns the file of a module.
    pub(crate) fn file(&self, name: &str) -> Option<&ModuleFile> {
        self.files.get(&kernel_name(name))
    }

    /// Returns the file of a module if it comes from the image.
    pub(crate) fn image_file(&self, name: &str) -> Option<&ModuleFile> {
        self.file(name).filter(|file| file.origin == Origin::Image)
    }

    /// Whether the module is built into the kernel, whether or not a file exists.
    pub(crate) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.contains(&kernel_name(name))
    }

    /// Whether the module has a file or is built into the kernel.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file(name).is_some() || self.is_built_in(name)
    }

    /// Whether the index has no files.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Error for a module that no tree has; lists the searched trees.
    pub(crate) fn missing_error(&self, name: &str, needed_by: Option<&str>) -> Error {
        let needed_by = needed_by.map(|by| format!(", which {by} needs,")).unwrap_or_default();
        let trees: Vec<String> = self.trees.iter().map(|tree| tree.display().to_string()).collect();
        let (name, release, trees) = (kernel_name(name), &self.release, trees.join(" and "));
        Error::new(
            format!("module {name}{needed_by} is missing for kernel {release}: looked in {trees}"),
            "this image was not built for the running kernel, or the host's /lib/modules is not mounted at \
             /host/lib/modules",
        )
    }
}

/// Lists the module files of a tree in order of precedence. `modules.dep` already has depmod's order, and spares
/// reading thousands of directory entries; its entries without a file are skipped. In an image `modules.dep` may come
/// from the topmost layer and list only that layer's modules. Unlisted files follow after the listed files.
fn module_files(directory: &Path, origin: Origin) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    if let Some(list) = read_text(&directory.join("modules.dep"))? {
        let names = list.lines().filter_map(|line| Some(line.split_once(':')?.0));
        // Paths in `modules.dep` are relative to the tree, unless it was built in an unusual way.
        let listed = names.map(|name| resolve_link(directory, directory.join(name)));
        files.extend(listed.filter(|file| file.is_file()));
        if origin == Origin::Host && !files.is_empty() {
            return Ok(files);
        }
    }
    let mut paths = Vec::new();
    // Directory symlinks such as `build` and `source`, which lead to whole kernel trees, are not followed. Symlinks to
    // modules count as files: weak-updates contains nothing else.
    for entry in WalkDir::new(directory) {
        let entry = if_exists(entry.map_err(io::Error::from));
        let entry = entry.map_err(Error::on("read", directory.to_string_lossy()))?.map(DirEntry::into_path);
        paths.extend(entry.filter(|path| ModuleFile::of(path, origin).is_some()));
    }
    paths.sort_by_cached_key(|file| (search_rank(directory, file), file.clone()));
    let paths = paths.into_iter().map(|file| resolve_link(directory, file));
    files.extend(paths.filter(|file| file.is_file()));
    Ok(files)
}

/// Resolves a symlink with an absolute target below `/lib/modules`, as in weak-updates of RPM distributions. Such a
/// target is relative to the root that the tree comes from, so it is looked up next to the tree.
fn resolve_link(directory: &Path, file: PathBuf) -> PathBuf {
    let target = fs::read_link(&file).unwrap_or_default();
    let relative = ["/lib/modules", "/usr/lib/modules"].iter().find_map(|top| target.strip_prefix(top).ok());
    match relative.zip(directory.parent()) {
        Some((relative, top)) => top.join(relative),
        None => file,
    }
}

/// Rank in depmod's default order (`search updates extra built-in weak-updates`).
fn search_rank(directory: &Path, file: &Path) -> usize {
    let relative = file.strip_prefix(directory).unwrap_or(file);
    match relative.components().next().and_then(|first| first.as_os_str().to_str()) {
        Some("updates") => 0,
        Some("extra") => 1,
        Some("weak-updates") => 3,
        _ => 2,
    }
}

fn read_text(path: &Path) -> Result<Option<String>, Error> {
    let bytes = if_exists(fs::read(path)).map_err(Error::on("read", path.to_string_lossy()))?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, RELEASE};

    #[test]
    fn the_image_comes_before_the_host_and_updates_before_the_rest() {
        let bench = Bench::new();
        bench.host_module("a", "");
        bench.host_module("b", "");
        bench.image_module("a", "");
        for place in ["kernel/a.ko", "extra/c.ko", "kernel/c.ko"] {
            bench.module(&format!("/lib/modules/{RELEASE}/{place}"), "", "other");
        }
        bench.write(&format!("/host/lib/modules/{RELEASE}/modules.builtin"), "kernel/lib/crc-t10dif.ko\n");
        let index = Index::of_node(&bench.node()).unwrap();
        let place = |name: &str| index.file(name).map(|file| bench.node().paths.container_path(&file.path));
        assert_eq!(place("a"), Some(format!("/lib/modules/{RELEASE}/updates/a.ko")));
        assert_eq!(place("c"), Some(format!("/lib/modules/{RELEASE}/extra/c.ko")));
        assert_eq!(place("b"), Some(format!("/host/lib/modules/{RELEASE}/kernel/b.ko")));
        assert!(index.has("crc_t10dif") && place("crc_t10dif").is_none());
        let origin = |name: &str| index.file(name).map(|file| file.origin);
        assert_eq!((origin("a"), origin("b")), (Some(Origin::Image), Some(Origin::Host)));
        assert!(!index.has("d"));
        assert_eq!(
            index.missing_error("d", Some("a")).to_string().split(": ").next().unwrap(),
            format!("module d, which a needs, is missing for kernel {RELEASE}")
        );
    }

    #[test]
    fn modules_dep_decides_between_two_files() {
        let bench = Bench::new();
        let tree = format!("/host/lib/modules/{RELEASE}");
        for place in ["updates/a.ko", "kernel/a.ko"] {
            bench.module(&format!("{tree}/{place}"), "", "x");
        }
        bench.write(&format!("{tree}/modules.dep"), "kernel/a.ko:\nkernel/gone.ko: kernel/a.ko\n");
        let index = Index::of_host(&bench.node()).unwrap();
        assert!(index.file("a").unwrap().path.ends_with("kernel/a.ko"));
        assert!(!index.has("gone"));
    }

    /// EL and SLES have such links for modules that were built for another of their kernels.
    #[test]
    fn a_link_of_weak_updates_is_followed_below_the_host_s_tree() {
        for (top, list) in [("/lib/modules", ""), ("/usr/lib/modules", "weak-updates/a.ko:\n")] {
            let bench = Bench::new();
            let tree = format!("/host/lib/modules/{RELEASE}");
            bench.module("/host/lib/modules/6.1.0-1/extra/a.ko", "", "x");
            bench.write(&format!("{tree}/modules.dep"), list);
            let link = bench.at(&format!("{tree}/weak-updates/a.ko"));
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(format!("{top}/6.1.0-1/extra/a.ko"), link).unwrap();
            let index = Index::of_host(&bench.node()).unwrap();
            assert_eq!(index.file("a").unwrap().info().unwrap().source_version, "x", "{top}");
        }
    }

    /// A layer that is put on another image brings a `modules.dep` that lists only its own modules.
    #[test]
    fn an_image_of_several_layers_has_the_modules_of_all() {
        let bench = Bench::new();
        let tree = format!("/lib/modules/{RELEASE}");
        for place in ["extra/nvidia.ko", "extra/nvidia-peermem.ko"] {
            bench.module(&format!("{tree}/{place}"), "", "x");
        }
        bench.write(&format!("{tree}/modules.dep"), "extra/nvidia-peermem.ko:\n");
        let index = Index::of_node(&bench.node()).unwrap();
        assert!(index.image_file("nvidia").is_some() && index.image_file("nvidia_peermem").is_some());
    }
}
