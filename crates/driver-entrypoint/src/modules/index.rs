//! Which file a module's name stands for: the trees of the image and of the host, in that order.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use super::{error::ModuleError, file::ModuleFile, kernel_name};
use crate::node::Node;

/// Whose tree a module is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// The driver image's own.
    Image,
    /// The host's, or that of another driver container.
    Host,
}

/// What a name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    File {
        file: ModuleFile,
        origin: Origin,
    },
    /// A part of the kernel: always there.
    BuiltIn,
}

/// The modules of some trees. The first tree that has a name wins.
#[derive(Debug, Default)]
pub(crate) struct Index {
    files: BTreeMap<String, (ModuleFile, Origin)>,
    built_in: BTreeSet<String>,
    places: Vec<PathBuf>,
    release: String,
}

impl Index {
    /// The image's modules before the host's, for the running kernel.
    pub(crate) fn of_node(node: &Node<'_>) -> Result<Self, ModuleError> {
        let release = node.kernel.release();
        let image = node.paths.image_modules(&release);
        let host = node.paths.host_modules(&release);
        Self::read(&release, &[(Origin::Image, image), (Origin::Host, host)])
    }

    /// The host's modules alone: what was there before the driver container.
    pub(crate) fn of_host(node: &Node<'_>) -> Result<Self, ModuleError> {
        let release = node.kernel.release();
        let host = node.paths.host_modules(&release);
        Self::read(&release, &[(Origin::Host, host)])
    }

    /// Trees such as `/lib/modules/<release>`, in the order in which they win. One that is not there holds nothing.
    pub(crate) fn read(release: &str, trees: &[(Origin, PathBuf)]) -> Result<Self, ModuleError> {
        let mut index = Self { release: release.to_owned(), ..Self::default() };
        for (origin, directory) in trees {
            index.places.push(directory.clone());
            for file in tree(directory, *origin)? {
                if let Some((name, file)) = ModuleFile::of(&file) {
                    index.files.entry(name).or_insert((file, *origin));
                }
            }
            let built_in = text(&directory.join("modules.builtin"))?.unwrap_or_default();
            let names = built_in.lines().filter_map(|line| ModuleFile::of(Path::new(line)));
            index.built_in.extend(names.map(|(name, _)| name));
        }
        Ok(index)
    }

    /// A file before what is built in.
    pub(crate) fn find(&self, name: &str) -> Option<Found> {
        let name = kernel_name(name);
        match self.files.get(&name) {
            Some((file, origin)) => Some(Found::File { file: file.clone(), origin: *origin }),
            None => self.built_in.contains(&name).then_some(Found::BuiltIn),
        }
    }

    /// Like [`Index::find`], and where it is not there, where it was looked for.
    pub(crate) fn require(&self, name: &str, needed_by: Option<&str>) -> Result<Found, ModuleError> {
        self.find(name).ok_or_else(|| self.missing(name, needed_by))
    }

    /// The file that the image itself has for a name.
    pub(crate) fn of_image(&self, name: &str) -> Option<&ModuleFile> {
        let (file, origin) = self.files.get(&kernel_name(name))?;
        (*origin == Origin::Image).then_some(file)
    }

    /// Like [`Index::of_image`], and where it is not there, where it was looked for.
    pub(crate) fn require_of_image(&self, name: &str) -> Result<&ModuleFile, ModuleError> {
        self.of_image(name).ok_or_else(|| self.missing(name, None))
    }

    /// Is it a part of the kernel, whatever files there are?
    pub(crate) fn is_built_in(&self, name: &str) -> bool {
        self.built_in.contains(&kernel_name(name))
    }

    /// Whose tree a name's file is from.
    pub(crate) fn origin(&self, name: &str) -> Option<Origin> {
        self.files.get(&kernel_name(name)).map(|(_, origin)| *origin)
    }

    fn missing(&self, name: &str, needed_by: Option<&str>) -> ModuleError {
        ModuleError::Missing {
            name: kernel_name(name),
            release: self.release.clone(),
            places: self.places.iter().map(|place| place.display().to_string()).collect(),
            needed_by: needed_by.map(str::to_owned),
        }
    }
}

/// The files of a tree, those that win first. `modules.dep` has settled that already, and saves reading thousands
/// of directory entries; it is not followed where it names what is not there. In an image it may be that of the
/// topmost layer alone: the others' files come after those that it lists.
fn tree(directory: &Path, origin: Origin) -> Result<Vec<PathBuf>, ModuleError> {
    let mut files = Vec::new();
    if let Some(list) = text(&directory.join("modules.dep"))? {
        let names = list.lines().filter_map(|line| Some(line.split_once(':')?.0));
        // A path in it is below the tree, unless somebody built it in a strange way.
        files.extend(names.map(|name| directory.join(name)).filter(|file| file.is_file()));
        if origin == Origin::Host && !files.is_empty() {
            return Ok(files);
        }
    }
    let mut found = Vec::new();
    walk(directory, &mut found)?;
    found.sort_by_cached_key(|file| (rank(directory, file), file.clone()));
    files.append(&mut found);
    Ok(files)
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

fn walk(directory: &Path, files: &mut Vec<PathBuf>) -> Result<(), ModuleError> {
    let unreadable = |source| ModuleError::Unreadable { path: directory.display().to_string(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        Err(error) => return Err(unreadable(error)),
    };
    for entry in entries {
        let entry = entry.map_err(unreadable)?;
        let kind = entry.file_type().map_err(unreadable)?;
        // `build` and `source` are links to whole kernel trees. A link to a module is a file like any other
        // (weak-updates holds nothing else).
        if kind.is_dir() {
            walk(&entry.path(), files)?;
        } else if ModuleFile::of(&entry.path()).is_some() && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

fn text(path: &Path) -> Result<Option<String>, ModuleError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(source) => Err(ModuleError::Unreadable { path: path.display().to_string(), source }),
    }
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
        let place = |name: &str| match index.find(name) {
            Some(Found::File { file, .. }) => Some(bench.node().paths.name(&file.path)),
            _ => None,
        };
        assert_eq!(place("a"), Some(format!("/lib/modules/{RELEASE}/updates/a.ko")));
        assert_eq!(place("c"), Some(format!("/lib/modules/{RELEASE}/extra/c.ko")));
        assert_eq!(place("b"), Some(format!("/host/lib/modules/{RELEASE}/kernel/b.ko")));
        assert_eq!(index.find("crc_t10dif"), Some(Found::BuiltIn));
        assert_eq!((index.origin("a"), index.origin("b")), (Some(Origin::Image), Some(Origin::Host)));
        assert_eq!(
            index.require("d", Some("a")).unwrap_err().to_string().split(": ").next().unwrap(),
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
        let Some(Found::File { file, .. }) = index.find("a") else { panic!() };
        assert!(file.path.ends_with("kernel/a.ko"));
        assert_eq!(index.find("gone"), None);
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
