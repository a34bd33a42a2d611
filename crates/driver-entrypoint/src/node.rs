//! What every step works on: the node's paths, its kernel and the log.

use std::path::{Path, PathBuf};

use crate::{kernel::Kernel, log::Log};

/// The node that the container runs on.
pub(crate) struct Node<'a> {
    pub(crate) paths: Paths,
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) log: Log,
}

/// The root that every path of this program is below: `/`, or a directory that stands in for it in tests.
#[derive(Clone, Debug)]
pub(crate) struct Paths(PathBuf);

impl Paths {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// An absolute path of the container, such as `/proc/modules`.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// The other way round: what a path below the root is called inside of the container.
    pub(crate) fn name(&self, path: &Path) -> String {
        let inside = path.strip_prefix(&self.0).unwrap_or(path);
        format!("/{}", inside.to_string_lossy().trim_start_matches('/'))
    }

    /// The image's modules for a kernel release.
    pub(crate) fn image_modules(&self, release: &str) -> PathBuf {
        self.at("/lib/modules").join(release)
    }

    /// The host's modules for a kernel release, where the manifest mounts them.
    pub(crate) fn host_modules(&self, release: &str) -> PathBuf {
        self.at("/host/lib/modules").join(release)
    }
}

/// Is it an absolute path of the container, that leads to no place above one that it names?
pub(crate) fn is_plain_path(path: &str) -> bool {
    path.starts_with('/') && path.split('/').all(|part| part != "..")
}
