//! A driver's firmware. The kernel opens firmware by a path in the host's file system. The image's firmware must therefore be
//! copied to where the host sees it, and the kernel's search path must name that directory.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::CWD,
    mount::{OpenTreeFlags, open_tree},
};

use crate::{error::Error, files::if_exists, node::Node};

/// The kernel's custom search path (`Documentation/driver-api/firmware/fw_search_path.rst`).
const SEARCH_PATH: &str = "/sys/module/firmware_class/parameters/path";

/// Bytes of two files that are compared at a time.
const COMPARE_SIZE: u64 = 256 << 10;

/// Firmware directories of images. The operators mount the host's directory over `/lib/firmware`, so their own images
/// use the first of these.
const IMAGE_PATHS: [&str; 3] = ["opt/lib/firmware", "lib/firmware", "usr/lib/firmware"];

/// An image's firmware, with the host directory for the copies.
#[derive(Clone, Copy)]
pub(crate) struct Firmware<'a> {
    /// Directory that the kernel is to search; it has the same path on the host.
    pub(crate) host_path: &'a str,
    /// Subdirectory of the image's firmware to copy; `""` for all of it.
    pub(crate) subdir: &'a str,
}

impl Firmware<'_> {
    /// Makes the kernel search `host_path` for firmware, and logs that. Fails if another program has set the search path.
    /// A search path that is already `host_path` was left by a killed container.
    pub(crate) fn set_search_path(self, node: &Node<'_>) -> Result<(), Error> {
        let Self { host_path, .. } = self;
        match search_path(node)?.as_deref() {
            None => node.log.warn("this kernel has no search path for firmware"),
            Some(current) if !current.is_empty() && current != host_path => {
                return Err(Error::new(
                    format!(
                        "the kernel looks for firmware at {current}, which another program has set: devices could not load \
                         firmware from {host_path}"
                    ),
                    format!(
                        "remove the other setting (KMM: worker.setFirmwareClassPath; the kernel's command line: \
                         firmware_class.path), or put the driver's firmware at {current} on the node"
                    ),
                ));
            }
            Some(current) => {
                if current.is_empty() {
                    write_search_path(node, host_path)?;
                }
                node.log.step(format!("the kernel looks for firmware at {host_path}"));
            }
        }
        Ok(())
    }

    /// Clears the search path if it is `host_path`.
    pub(crate) fn restore_search_path(self, node: &Node<'_>) -> Result<(), Error> {
        if search_path(node)?.is_some_and(|current| current == self.host_path) {
            // An empty write is a no-op, and a newline would become part of the path.
            write_search_path(node, "\0")?;
        }
        Ok(())
    }

    /// Copies the image's firmware to where the host sees it, and logs that. Returns the number of files written.
    pub(crate) fn provide(self, node: &Node<'_>) -> Result<usize, Error> {
        let (root, target) = (node.paths.at("/"), node.paths.at(self.host_path).join(self.subdir));
        // Clone of the image's root without the mounts that the manifest puts over it; needs Linux 5.2. On older
        // kernels the image has to keep its firmware in a directory without a mount.
        let clone =
            open_tree(CWD, &root, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC).ok();
        let clone = clone.as_ref().map(|root| PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd())));
        let mut written = 0;
        for root in clone.iter().chain([&root]) {
            for directory in IMAGE_PATHS {
                let from = root.join(directory).join(self.subdir);
                if from.is_dir() {
                    let copied = copy(&from, &target);
                    written += copied.map_err(Error::on("copy firmware to", self.host_path))?;
                }
            }
        }
        node.log.step(format!("firmware: {written} file(s) copied to {}", self.host_path));
        Ok(written)
    }
}

fn search_path(node: &Node<'_>) -> Result<Option<String>, Error> {
    let text =
        if_exists(fs::read_to_string(node.paths.at(SEARCH_PATH))).map_err(Error::on("read", SEARCH_PATH))?;
    Ok(text.map(|text| text.trim_matches(['\0', '\n', ' ']).to_owned()))
}

fn write_search_path(node: &Node<'_>, value: &str) -> Result<(), Error> {
    fs::write(node.paths.at(SEARCH_PATH), value).map_err(Error::on("write", SEARCH_PATH))
}

fn copy(from: &Path, to: &Path) -> io::Result<usize> {
    let mut written = 0;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        // Follow symlinks to files but not to directories, which may form a loop.
        if entry.file_type()?.is_dir() {
            written += copy(&source, &target)?;
        } else if source.is_file() && !has_same_content(&source, &target)? {
            fs::create_dir_all(to)?;
            // Replace the file atomically: the kernel may open it at any time.
            let unfinished = PathBuf::from(format!("{}.new", target.display()));
            fs::copy(&source, &unfinished)?;
            fs::rename(&unfinished, &target)?;
            written += 1;
        }
    }
    Ok(written)
}

/// Whether the target exists with the same content.
fn has_same_content(source: &Path, target: &Path) -> io::Result<bool> {
    let Some(existing) = if_exists(fs::metadata(target))? else { return Ok(false) };
    if !existing.is_file() || existing.len() != fs::metadata(source)?.len() {
        return Ok(false);
    }
    let next_part = |file: &mut File| {
        let mut bytes = Vec::new();
        file.take(COMPARE_SIZE).read_to_end(&mut bytes).map(|_| bytes)
    };
    let (mut source, mut target) = (File::open(source)?, File::open(target)?);
    loop {
        let (left, right) = (next_part(&mut source)?, next_part(&mut target)?);
        if left != right || left.is_empty() {
            return Ok(left == right);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    const HOST_PATH: &str = "/run/nvidia/driver/lib/firmware";
    const GSP: Firmware<'_> = Firmware { host_path: HOST_PATH, subdir: "nvidia" };

    #[test]
    fn an_empty_search_path_is_set_and_cleared_again() {
        for empty in ["", "\n", "\0\n"] {
            let bench = Bench::new();
            bench.write(SEARCH_PATH, empty);
            let ours = format!("INFO  the kernel looks for firmware at {HOST_PATH}");
            GSP.set_search_path(&bench.node()).unwrap();
            assert_eq!((bench.read(SEARCH_PATH).unwrap(), bench.log()), (HOST_PATH.to_owned(), ours.clone()));
            // A container that was killed with SIGKILL leaves the search path.
            GSP.set_search_path(&bench.node()).unwrap();
            assert_eq!(bench.log(), format!("{ours}\n{ours}"));
            GSP.restore_search_path(&bench.node()).unwrap();
            assert_eq!(search_path(&bench.node()).unwrap().as_deref(), Some(""));
        }
    }

    #[test]
    fn the_search_path_of_another_program_is_left_alone() {
        let bench = Bench::new();
        bench.write(SEARCH_PATH, "/var/lib/firmware\n");
        let error = GSP.set_search_path(&bench.node()).unwrap_err();
        let kept = "the kernel looks for firmware at /var/lib/firmware, which another program has set";
        assert!(error.to_string().starts_with(kept), "{error}");
        GSP.restore_search_path(&bench.node()).unwrap();
        assert_eq!(bench.read(SEARCH_PATH).unwrap(), "/var/lib/firmware\n");
    }

    #[test]
    fn a_kernel_without_a_search_path_is_accepted() {
        let bench = Bench::new();
        GSP.set_search_path(&bench.node()).unwrap();
        assert_eq!(bench.log(), "WARN  this kernel has no search path for firmware");
        GSP.restore_search_path(&bench.node()).unwrap();
        assert_eq!(bench.read(SEARCH_PATH), None);
    }

    #[test]
    fn firmware_is_copied_once_and_again_when_it_differs() {
        let bench = Bench::new();
        bench.write("/opt/lib/firmware/nvidia/535.1/gsp_ga10x.bin", "firmware");
        bench.write("/lib/firmware/nvidia/535.1/gsp_tu10x.bin", "other");
        let copied = format!("{HOST_PATH}/nvidia/535.1/gsp_ga10x.bin");
        assert_eq!(GSP.provide(&bench.node()).unwrap(), 2);
        assert_eq!(GSP.provide(&bench.node()).unwrap(), 0);
        assert_eq!(bench.read(&copied).unwrap(), "firmware");
        // A file of another length, and one of the same length with other content.
        for other in ["firm", "fakeware"] {
            bench.write(&copied, other);
            assert_eq!(GSP.provide(&bench.node()).unwrap(), 1);
            assert_eq!(bench.read(&copied).unwrap(), "firmware");
        }
        let names = fs::read_dir(bench.at(&copied).parent().unwrap()).unwrap().count();
        assert_eq!(names, 2, "no temporary file is left");
    }

    #[test]
    fn all_firmware_of_another_vendor_goes_to_its_directory() {
        let bench = Bench::new();
        bench.write("/usr/lib/firmware/acme/card.fw", "firmware");
        bench.write("/lib/firmware/card.fw", "old");
        let firmware = Firmware { host_path: "/run/farrier/acme/firmware", subdir: "" };
        assert_eq!(firmware.provide(&bench.node()).unwrap(), 2);
        assert_eq!(bench.read("/run/farrier/acme/firmware/acme/card.fw").unwrap(), "firmware");
        assert_eq!(bench.read("/run/farrier/acme/firmware/card.fw").unwrap(), "old");
    }

    #[test]
    fn an_image_without_firmware_gives_none() {
        let bench = Bench::new();
        assert_eq!(GSP.provide(&bench.node()).unwrap(), 0);
        assert!(!bench.at(HOST_PATH).exists());
    }
}
