//! Adapter: the GSP firmware. The kernel opens it by a path of the host's, so it must be visible there, and the
//! kernel must know where.

use std::{
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    mount::{OpenTreeFlags, open_tree},
};

use crate::{fault::Fault, node::Node};

/// Where the host sees the driver's firmware: below the exposed root.
pub(crate) const HOST_PATH: &str = "/run/nvidia/driver/lib/firmware";

/// The kernel's own search path (`Documentation/driver-api/firmware/fw_search_path.rst`).
const SEARCH_PATH: &str = "/sys/module/firmware_class/parameters/path";

/// Where images keep the firmware. The operator mounts the host's directory over `/lib/firmware`, which is why its
/// own images have the first.
const IMAGE_PATHS: &[&str] = &["opt/lib/firmware/nvidia", "lib/firmware/nvidia", "usr/lib/firmware/nvidia"];

/// What was found in the kernel's search path, and done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SearchPath {
    /// It was empty, or ours since a container that was killed: it is ours.
    Ours,
    /// It is somebody's: left alone, as the operators' images do.
    Kept(String),
    /// This kernel has none.
    Absent,
}

/// Makes the kernel look for firmware at [`HOST_PATH`].
pub(crate) fn set_search_path(node: &Node<'_>) -> Result<SearchPath, Fault> {
    let Some(current) = search_path(node)? else { return Ok(SearchPath::Absent) };
    if current.is_empty() {
        write_search_path(node, HOST_PATH)?;
    } else if current != HOST_PATH {
        return Ok(SearchPath::Kept(current));
    }
    Ok(SearchPath::Ours)
}

/// Empties the search path if it is ours.
pub(crate) fn restore_search_path(node: &Node<'_>) -> Result<(), Fault> {
    if search_path(node)?.is_some_and(|current| current == HOST_PATH) {
        // An empty write does nothing, and a newline would be part of the path.
        write_search_path(node, "\0")?;
    }
    Ok(())
}

fn search_path(node: &Node<'_>) -> Result<Option<String>, Fault> {
    let path = node.paths.at(SEARCH_PATH);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim_matches(['\0', '\n', ' ']).to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Fault::on(node, "read", &path)(error)),
    }
}

fn write_search_path(node: &Node<'_>, value: &str) -> Result<(), Fault> {
    let path = node.paths.at(SEARCH_PATH);
    fs::write(&path, value).map_err(Fault::on(node, "write", &path))
}

/// Copies the image's firmware to where the host sees it; gives the number of files that had to be written.
pub(crate) fn provide(node: &Node<'_>) -> Result<usize, Fault> {
    let (root, target) = (node.paths.at("/"), node.paths.at(HOST_PATH));
    // The image's root without what the manifest mounts over it. Linux 5.2 and later; before, the image has to keep
    // its firmware where nothing is mounted.
    let bare = open_tree(CWD, &root, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).ok();
    let bare = bare.as_ref().map(|root| PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd())));
    let mut written = 0;
    for root in bare.iter().chain([&root]) {
        for directory in IMAGE_PATHS {
            let from = root.join(directory);
            if from.is_dir() {
                written += copy(&from, &target.join("nvidia")).map_err(Fault::on(
                    node,
                    "copy firmware to",
                    &target,
                ))?;
            }
        }
    }
    Ok(written)
}

fn copy(from: &Path, to: &Path) -> io::Result<usize> {
    let mut written = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        // Links to files are followed, those to directories are not: they may lead in a circle.
        if entry.file_type()?.is_dir() {
            written += copy(&source, &target)?;
        } else if source.is_file() && !is_there(&source, &target)? {
            fs::create_dir_all(to)?;
            // The kernel may open it at any time: whole, or not at all.
            let unfinished = PathBuf::from(format!("{}.new", target.display()));
            fs::copy(&source, &unfinished)?;
            fs::rename(&unfinished, &target)?;
            written += 1;
        }
    }
    Ok(written)
}

/// Firmware is named by the driver's version, and whole after [`copy`]: the same size is the same file.
fn is_there(source: &Path, target: &Path) -> io::Result<bool> {
    match fs::metadata(target) {
        Ok(there) => Ok(there.len() == fs::metadata(source)?.len()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn an_empty_search_path_becomes_ours_and_empty_again() {
        for empty in ["", "\n", "\0\n"] {
            let bench = Bench::new();
            bench.file(SEARCH_PATH, empty);
            assert_eq!(set_search_path(&bench.node()).unwrap(), SearchPath::Ours);
            assert_eq!(bench.text(SEARCH_PATH).unwrap(), HOST_PATH);
            // After a kill -9 it is still there.
            assert_eq!(set_search_path(&bench.node()).unwrap(), SearchPath::Ours);
            restore_search_path(&bench.node()).unwrap();
            assert_eq!(search_path(&bench.node()).unwrap().as_deref(), Some(""));
        }
    }

    #[test]
    fn somebody_elses_search_path_is_left_alone() {
        let bench = Bench::new();
        bench.file(SEARCH_PATH, "/var/lib/firmware\n");
        let kept = set_search_path(&bench.node()).unwrap();
        assert_eq!(kept, SearchPath::Kept("/var/lib/firmware".into()));
        restore_search_path(&bench.node()).unwrap();
        assert_eq!(bench.text(SEARCH_PATH).unwrap(), "/var/lib/firmware\n");
    }

    #[test]
    fn a_kernel_without_a_search_path_is_no_fault() {
        let bench = Bench::new();
        assert_eq!(set_search_path(&bench.node()).unwrap(), SearchPath::Absent);
        restore_search_path(&bench.node()).unwrap();
        assert_eq!(bench.text(SEARCH_PATH), None);
    }

    #[test]
    fn firmware_is_copied_once_and_again_when_it_differs() {
        let bench = Bench::new();
        bench.file("/opt/lib/firmware/nvidia/535.1/gsp_ga10x.bin", "firmware");
        bench.file("/lib/firmware/nvidia/535.1/gsp_tu10x.bin", "other");
        let copied = format!("{HOST_PATH}/nvidia/535.1/gsp_ga10x.bin");
        assert_eq!(provide(&bench.node()).unwrap(), 2);
        assert_eq!(provide(&bench.node()).unwrap(), 0);
        assert_eq!(bench.text(&copied).unwrap(), "firmware");
        bench.file(&copied, "firm");
        assert_eq!(provide(&bench.node()).unwrap(), 1);
        assert_eq!(bench.text(&copied).unwrap(), "firmware");
        let names = fs::read_dir(bench.at(&copied).parent().unwrap()).unwrap().count();
        assert_eq!(names, 2, "nothing unfinished is left");
    }

    #[test]
    fn an_image_without_firmware_gives_none() {
        let bench = Bench::new();
        assert_eq!(provide(&bench.node()).unwrap(), 0);
        assert!(!bench.at(HOST_PATH).exists());
    }
}
