//! Which processes use a driver: who has its device files open, or mapped.

use std::{fmt, fs, path::Path};

use crate::paths::Paths;

/// A process that uses a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) command: String,
    /// Such as `/dev/infiniband/uverbs0`.
    pub(crate) device: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({}) with {} open", self.id, self.command, self.device)
    }
}

/// How the device files begin whose users hold a module.
pub(crate) fn devices(module: &str) -> &'static [&'static str] {
    match module {
        name if name.starts_with("nvidia") => &["/dev/nvidia"],
        name if name.starts_with("mst") => &["/dev/mst", "/dev/mstflint"],
        name if name.contains("vdpa") => &["/dev/vhost-vdpa"],
        name if name.contains("fwctl") => &["/dev/fwctl"],
        _ => &["/dev/infiniband/"],
    }
}

/// The processes that have such files open or mapped: those that this container sees, which is all of the node's
/// with `hostPID` only.
pub(crate) fn processes(paths: &Paths, devices: &[&str]) -> Vec<Process> {
    let entries = fs::read_dir(paths.at("/proc")).into_iter().flatten().flatten();
    let mut found: Vec<Process> = entries
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            let device = open_device(&entry.path(), devices)?;
            let command = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            Some(Process { id, command: command.trim().to_owned(), device })
        })
        .collect();
    found.sort_by_key(|process| process.id);
    found
}

fn open_device(process: &Path, devices: &[&str]) -> Option<String> {
    let is_one = |path: &str| devices.iter().any(|device| path.starts_with(device));
    let open = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let mut open = open.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_str()?.to_owned()));
    if let Some(path) = open.find(|path| is_one(path)) {
        return Some(path);
    }
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    let mut mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    mapped.find(|path| is_one(path)).map(str::to_owned)
}
