//! Adapter: the GSP firmware. The kernel opens it by a path of the host's, so it must be visible there, and the
//! kernel must know where.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where the host sees the driver's firmware, below the exposed root.
pub(crate) const HOST_PATH: &str = "/run/nvidia/driver/lib/firmware";

/// The kernel's own search path, below `/sys`: `Documentation/driver-api/firmware/fw_search_path.rst`.
const SEARCH_PATH: &str = "module/firmware_class/parameters/path";

/// Firmware directories of an image, below its root. The operator mounts the host's directory over
/// `/lib/firmware`, which is why there is a second place.
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
pub(crate) fn set_search_path(sys: &Path) -> io::Result<SearchPath> {
    let Some(current) = search_path(sys)? else { return Ok(SearchPath::Absent) };
    if current.is_empty() {
        fs::write(sys.join(SEARCH_PATH), HOST_PATH)?;
    } else if current != HOST_PATH {
        return Ok(SearchPath::Kept(current));
    }
    Ok(SearchPath::Ours)
}

/// Empties the search path if it is ours.
pub(crate) fn restore_search_path(sys: &Path) -> io::Result<()> {
    if search_path(sys)?.is_some_and(|current| current == HOST_PATH) {
        // An empty write does nothing, and a newline would be part of the path.
        fs::write(sys.join(SEARCH_PATH), b"\0")?;
    }
    Ok(())
}

fn search_path(sys: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(sys.join(SEARCH_PATH)) {
        Ok(text) => Ok(Some(text.trim_matches(['\0', '\n', ' ']).to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Copies the firmware of the images' roots to where the host sees it; gives the number of files that had to be
/// written. `target` is [`HOST_PATH`].
pub(crate) fn provide(roots: &[&Path], target: &Path) -> io::Result<usize> {
    let mut written = 0;
    for root in roots {
        for directory in IMAGE_PATHS {
            let from = root.join(directory);
            if from.is_dir() {
                written += copy(&from, &target.join("nvidia"))?;
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

/// Firmware is named by the driver's version and whole by [`copy`]: the same size is the same file.
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

    fn with_search_path(text: &[u8]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        fs::create_dir_all(sys.path().join("module/firmware_class/parameters")).unwrap();
        fs::write(sys.path().join(SEARCH_PATH), text).unwrap();
        sys
    }

    #[test]
    fn an_empty_search_path_becomes_ours_and_empty_again() {
        for empty in [&b""[..], b"\n", b"\0\n"] {
            let sys = with_search_path(empty);
            assert_eq!(set_search_path(sys.path()).unwrap(), SearchPath::Ours);
            assert_eq!(fs::read_to_string(sys.path().join(SEARCH_PATH)).unwrap(), HOST_PATH);
            // After a kill -9 it is still there.
            assert_eq!(set_search_path(sys.path()).unwrap(), SearchPath::Ours);
            restore_search_path(sys.path()).unwrap();
            assert_eq!(search_path(sys.path()).unwrap().as_deref(), Some(""));
        }
    }

    #[test]
    fn somebody_elses_search_path_is_left_alone() {
        let sys = with_search_path(b"/var/lib/firmware\n");
        assert_eq!(set_search_path(sys.path()).unwrap(), SearchPath::Kept("/var/lib/firmware".into()));
        restore_search_path(sys.path()).unwrap();
        assert_eq!(fs::read(sys.path().join(SEARCH_PATH)).unwrap(), b"/var/lib/firmware\n");
    }

    #[test]
    fn a_kernel_without_a_search_path_is_no_fault() {
        let sys = tempfile::tempdir().unwrap();
        assert_eq!(set_search_path(sys.path()).unwrap(), SearchPath::Absent);
        restore_search_path(sys.path()).unwrap();
    }

    #[test]
    fn firmware_is_copied_once_and_again_when_it_differs() {
        let (image, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = |root: &str, text: &str| {
            let path = image.path().join(root).join("535.1");
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("gsp_ga10x.bin"), text).unwrap();
        };
        file("opt/lib/firmware/nvidia", "firmware");
        let target = host.path().join("run/nvidia/driver/lib/firmware");
        assert_eq!(provide(&[image.path()], &target).unwrap(), 1);
        assert_eq!(provide(&[image.path()], &target).unwrap(), 0);
        let copied = target.join("nvidia/535.1/gsp_ga10x.bin");
        assert_eq!(fs::read(&copied).unwrap(), b"firmware");
        fs::write(&copied, "firm").unwrap();
        assert_eq!(provide(&[image.path()], &target).unwrap(), 1);
        assert_eq!(fs::read(&copied).unwrap(), b"firmware");
        let names = fs::read_dir(copied.parent().unwrap()).unwrap().count();
        assert_eq!(names, 1, "nothing unfinished is left");
    }

    #[test]
    fn an_image_without_firmware_gives_none() {
        let (image, host) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(provide(&[image.path()], host.path()).unwrap(), 0);
    }
}
