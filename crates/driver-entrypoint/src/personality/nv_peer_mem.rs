//! `nv-peer-mem`: the container of `nv_peer_mem`, for GPU drivers before 470.

use crate::{
    node::Node,
    personality::{Error, peer_memory::PeerMemory, watch::Owner},
    signals::Ending,
};

/// How it is used.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint nv-peer-mem [--ready-file PATH]

Loads nv_peer_mem as soon as OFED and the GPU driver are ready, unloads it when one of them goes and at a signal.
USE_HOST_MOFED=true: OFED is the host's own. The ready file is /.driver-ready unless another is named.";

const MODULE: &str = "nv_peer_mem";
const READY_FILE: &str = "/.driver-ready";

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    ready_file: String,
    host_ofed: bool,
}

impl Options {
    /// From the words after `nv-peer-mem` and the environment.
    pub(crate) fn parse(arguments: &[&str], variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let ready_file = match arguments {
            [] => READY_FILE,
            ["--ready-file", path] => path,
            _ => return None,
        };
        let host_ofed = variable("USE_HOST_MOFED").is_some_and(|value| value == "true");
        let is_path = ready_file.starts_with('/') && !ready_file.ends_with('/');
        is_path.then(|| Self { ready_file: ready_file.to_owned(), host_ofed })
    }
}

/// From start to stop.
pub(crate) fn run(node: &Node<'_>, options: &Options, ending: &mut dyn Ending) -> Result<(), Error> {
    let Options { ready_file, host_ofed } = options;
    let (ready_file, host_ofed) = (Some(ready_file.as_str()), *host_ofed);
    PeerMemory { module: MODULE, owner: Owner::Us, ready_file, host_ofed }.run(node, ending)
}
