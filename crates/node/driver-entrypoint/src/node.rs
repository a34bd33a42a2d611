//! Context that all steps share: the node's paths, its kernel and the log.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{kernel::Kernel, log::Log};

/// The node that the container runs on.
pub(crate) struct Node<'a> {
    pub(crate) paths: Paths,
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) log: Log,
}

impl Node<'_> {
    /// Polls until the condition is met, at most `attempts` times. Returns whether it is met.
    pub(crate) fn poll(&self, attempts: u32, interval: Duration, mut is_met: impl FnMut() -> bool) -> bool {
        (0..attempts).any(|attempt| {
            if attempt > 0 {
                self.kernel.pause(interval);
            }
            is_met()
        })
    }
}

/// Root of all paths of this program: `/`, or a temporary directory in tests.
#[derive(Clone, Debug)]
pub(crate) struct Paths(PathBuf);

impl Paths {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// Maps an absolute path of the container, such as `/proc/modules`, to a path below the root.
    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Inverse of [`at`](Self::at): maps a path below the root to its path in the container.
    pub(crate) fn container_path(&self, path: &Path) -> String {
        let inside = path.strip_prefix(&self.0).unwrap_or(path);
        format!("/{}", inside.to_string_lossy().trim_start_matches('/'))
    }

    /// Directory of the image's modules for a kernel release.
    pub(crate) fn image_modules(&self, release: &str) -> PathBuf {
        self.at("/lib/modules").join(release)
    }

    /// Directory of the host's modules for a kernel release, where the pod's manifest mounts them.
    pub(crate) fn host_modules(&self, release: &str) -> PathBuf {
        self.at("/host/lib/modules").join(release)
    }
}

/// Whether the path is absolute and has no `..` component.
pub(crate) fn is_plain_path(path: &str) -> bool {
    path.starts_with('/') && path.split('/').all(|part| part != "..")
}
