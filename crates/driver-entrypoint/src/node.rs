//! What every step works on: the node's paths, its kernel and the log.
//!
//! This and the modules `kernel`, `modules`, `mounts`, `lock`, `ready` and `signals` are the core that the
//! personalities stand on; what they share is kept stable.

use crate::{kernel::Kernel, log::Log, paths::Paths};

/// The node that the container runs on.
pub(crate) struct Node<'a> {
    pub(crate) paths: Paths,
    pub(crate) kernel: &'a dyn Kernel,
    pub(crate) log: Log,
}
