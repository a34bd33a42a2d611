//! What the node's files, mounts and locks answer when something does not work.

use std::{fmt, io, path::Path};

use crate::node::Node;

/// A step that failed on a file, a directory or a mount.
#[derive(Debug)]
pub(crate) struct Fault {
    action: &'static str,
    place: String,
    source: io::Error,
}

impl Fault {
    /// `action` such as `write`, on a path of the container.
    pub(crate) fn on(node: &Node<'_>, action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        let place = node.paths.name(path);
        move |source| Self { action, place: place.clone(), source }
    }

    /// A mount, which has two ends.
    pub(crate) fn between(
        node: &Node<'_>,
        action: &'static str,
        from: &Path,
        to: &Path,
    ) -> impl Fn(io::Error) -> Self {
        let place = format!("{} onto {}", node.paths.name(from), node.paths.name(to));
        move |source| Self { action, place: place.clone(), source }
    }

    /// What to do about it.
    pub(crate) fn hint(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::PermissionDenied => "run the container privileged, with SELinux level s0",
            io::ErrorKind::ReadOnlyFilesystem => "the volume of that path must be writable",
            io::ErrorKind::NotFound => "mount the host's directory there, as the operator's DaemonSet does",
            _ => "look at the volumes of the pod",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.action, self.place, self.source)
    }
}

impl std::error::Error for Fault {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
