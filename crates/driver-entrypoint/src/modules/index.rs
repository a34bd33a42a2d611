//! Which file a module's name stands for: the trees of the image and of the host, in that order.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use walkdir::{DirEntry, WalkDir};

use crate::{
    error::Error,
    files::if_there,
    module_file::{ModuleFile, Origin, kernel_name},
    node::Node,
};

/// The modules of some trees. The first tree that has a name wins.
#[derive(Debug, Default)]
pub(crate) struct Index {
    files: BTreeMap<String, ModuleFile>,
    built_in: BTreeSet<String>,
    places: Vec<PathBuf>,
    release: String,
}

impl Index {
    /// The image's modules before the host's, for the running kernel.
    pub(crate) fn of_node(node: &Node<'_>) -> Result<Self, Error> {
        let release = node.kernel.release();
        let image = node.paths.image_modules(&release);
        let host = node.paths.host_modules(&release);
        Self::read(&release, &[(Origin::Image, image), (Origin::Host, host)])
    }

    /// The host's modules alone: what was there before the driver container.
    pub(crate) fn of_host(node: &Node<'_>) -> Result<Self, Error> {
        let release = node.kernel.release();
        let host = node.paths.host_modules(&release);
        Self::read(&release, &[(Origin::Host, host)])
    }

    /// Trees such as `/lib/modules/<release>`, in the order in which they win. One that is not there holds nothing.
    pub(crate) fn read(release: &str, trees: &[(Origin, PathBuf)]) -> Result<Self, Error> {
        let mut index = Self { release: release.to_owned(), ..Self::default() };
        for (origin, directory) in trees {
            index.places.push(directory.clone());
            for file in tree(directory, *origin)? {
                if let Some((name, file)) = ModuleFile::of(&file, *origin) {
                    index.files.entry(name).or_insert(file);
                }
            }
            let built_in = text(&directory.join("modules.builtin"))?.unwrap_or_default();
            let names = built_in.lines().filter_map(|line| ModuleFile::of(Path::new(line), *origin));
            index.built_in.extend(names.map(|(name, _)| name));
        }
        Ok(index)
    }

    /// The file that a name stands for.
    pub(crate) fn file(&self, name: &str) -> Option<&ModuleFile> {
        self.files.get(&kernel_name(name))
    }

    /// The file that the image itself has for a name.
    pub(crate) fn of_image(&self, name: &str) -> Option<&ModuleFile> {
        self.file(name).filter(|file| file.origin == Origin::Image)
    }

    /// Is it a part of the kernel, whatever files there are?
    pub(crate) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.contains(&kernel_name(name))
    }

    /// Is there a file of that name, or is it a part of the kernel?
    pub(crate) fn has(&self, name: &str) -> bool {
        self.file(name).is_some() || self.is_built_in(name)
    }

    /// Is there no file at all?
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// A name is nowhere: where it was looked for.
    pub(crate) fn missing(&self, name: &str, needed_by: Option<&str>) -> Error {
        let needed_by = needed_by.map(|by| format!(", which {by} needs,")).unwrap_or_default();
        let places: Vec<String> = self.places.iter().map(|place| place.display().to_string()).collect();
        Error::new(
            format!(
                "module {}{needed_by} is not there for kernel {}: looked in {}",
                kernel_name(name),
                self.release,
                places.join(" and ")
            ),
            "this image was not built for the running kernel, or the host's /lib/modules is not mounted at \
             /host/lib/modules",
        )
    }
}

/// The files of a tree, those that win first. `modules.dep` has settled that already, and saves reading thousands
/// of directory entries; it is not followed where it names what is not there. In an image it may be that of the
/// topmost layer alone: the others' files come after those that it lists.
fn tree(directory: &Path, origin: Origin) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    if let Some(list) = text(&directory.join("modules.dep"))? {
        let names = list.lines().filter_map(|line| Some(line.split_once(':')?.0));
        // Its paths are below the tree, unless it was built in an unusual way.
        let found = names.map(|name| followed(directory, directory.join(name)));
        files.extend(found.filter(|file| file.is_file()));
        if origin == Origin::Host && !files.is_empty() {
            return Ok(files);
        }
    }
    let mut found = Vec::new();
    // `build` and `source` are links to whole kernel trees. A link to a module is a file like any other (weak-updates
    // holds nothing else).
    for entry in WalkDir::new(directory) {
        let entry = if_there(entry.map_err(io::Error::from));
        let entry = entry.map_err(Error::on("read", directory.to_string_lossy()))?.map(DirEntry::into_path);
        found.extend(entry.filter(|path| ModuleFile::of(path, origin).is_some()));
    }
    found.sort_by_cached_key(|file| (rank(directory, file), file.clone()));
    let found = found.into_iter().map(|file| followed(directory, file));
    files.extend(found.filter(|file| file.is_file()));
    Ok(files)
}

/// A link to an absolute path, as weak-updates of RPM distributions has them, is meant for the root that the tree is from: it leads
/// to a place beside the tree.
fn followed(directory: &Path, file: PathBuf) -> PathBuf {
    let target = fs::read_link(&file).unwrap_or_default();
    let below = ["/lib/modules", "/usr/lib/modules"].iter().find_map(|top| target.strip_prefix(top).ok());
    match below.zip(directory.parent()) {
        Some((below, top)) => top.join(below),
        None => file,
    }
}

/// depmod's default order (`search updates extra built-in weak-updates`).
fn rank(directory: &Path, file: &Path) -> usize {
    let below = file.strip_prefix(directory).unwrap_or(file);
    match below.components().next().and_then(|first| first.as_os_str().to_str()) {
        Some("updates") => 0,
        Some("extra") => 1,
        Some("weak-updates") => 3,
        _ => 2,
    }
}

fn text(path: &Path) -> Result<Option<String>, Error> {
    let bytes = if_there(fs::read(path)).map_err(Error::on("read", path.to_string_lossy()))?;
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
        bench.file(&format!("/host/lib/modules/{RELEASE}/modules.builtin"), "kernel/lib/crc-t10dif.ko\n");
        let index = Index::of_node(&bench.node()).unwrap();
        let place = |name: &str| index.file(name).map(|file| bench.node().paths.name(&file.path));
        assert_eq!(place("a"), Some(format!("/lib/modules/{RELEASE}/updates/a.ko")));
        assert_eq!(place("c"), Some(format!("/lib/modules/{RELEASE}/extra/c.ko")));
        assert_eq!(place("b"), Some(format!("/host/lib/modules/{RELEASE}/kernel/b.ko")));
        assert!(index.has("crc_t10dif") && place("crc_t10dif").is_none());
        let origin = |name: &str| index.file(name).map(|file| file.origin);
        assert_eq!((origin("a"), origin("b")), (Some(Origin::Image), Some(Origin::Host)));
        assert!(!index.has("d"));
        assert_eq!(
            index.missing("d", Some("a")).to_string().split(": ").next().unwrap(),
            format!("module d, which a needs, is not there for kernel {RELEASE}")
        );
    }

    #[test]
    fn modules_dep_settles_which_of_two_files_it_is() {
        let bench = Bench::new();
        let tree = format!("/host/lib/modules/{RELEASE}");
        for place in ["updates/a.ko", "kernel/a.ko"] {
            bench.module(&format!("{tree}/{place}"), "", "x");
        }
        bench.file(&format!("{tree}/modules.dep"), "kernel/a.ko:\nkernel/gone.ko: kernel/a.ko\n");
        let index = Index::of_host(&bench.node()).unwrap();
        assert!(index.file("a").unwrap().path.ends_with("kernel/a.ko"));
        assert!(!index.has("gone"));
    }

    /// As EL and SLES have them, for modules that were built for another kernel of theirs.
    #[test]
    fn a_link_of_weak_updates_is_followed_below_the_host_s_tree() {
        for (top, list) in [("/lib/modules", ""), ("/usr/lib/modules", "weak-updates/a.ko:\n")] {
            let bench = Bench::new();
            let tree = format!("/host/lib/modules/{RELEASE}");
            bench.module("/host/lib/modules/6.1.0-1/extra/a.ko", "", "x");
            bench.file(&format!("{tree}/modules.dep"), list);
            let link = bench.at(&format!("{tree}/weak-updates/a.ko"));
            fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(format!("{top}/6.1.0-1/extra/a.ko"), link).unwrap();
            let index = Index::of_host(&bench.node()).unwrap();
            assert_eq!(index.file("a").unwrap().info().unwrap().source_version, "x", "{top}");
        }
    }

    /// A layer that is put on another image brings the list of its own modules alone.
    #[test]
    fn an_image_of_several_layers_has_the_modules_of_all() {
        let bench = Bench::new();
        let tree = format!("/lib/modules/{RELEASE}");
        for place in ["extra/nvidia.ko", "extra/nvidia-peermem.ko"] {
            bench.module(&format!("{tree}/{place}"), "", "x");
        }
        bench.file(&format!("{tree}/modules.dep"), "extra/nvidia-peermem.ko:\n");
        let index = Index::of_node(&bench.node()).unwrap();
        assert!(index.of_image("nvidia").is_some() && index.of_image("nvidia_peermem").is_some());
    }
}
