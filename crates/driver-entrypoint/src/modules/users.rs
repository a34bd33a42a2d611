//! Which processes use a driver: who has its device files open, or mapped.

use std::{fs, path::Path};

use crate::{
    files::{entries, text},
    node::Paths,
};

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

/// The processes that have such files open or mapped, such as `process 12 (ucx) with /dev/infiniband/uverbs0 open`:
/// those that this container sees, which is all of the node's with `hostPID` only.
pub(crate) fn processes(paths: &Paths, devices: &[&str]) -> Vec<String> {
    let process = |entry: &Path| {
        let id: u32 = entry.file_name()?.to_str()?.parse().ok()?;
        let device = open_device(entry, devices)?;
        let command = text(entry.join("comm")).unwrap_or_default();
        Some((id, format!("process {id} ({command}) with {device} open")))
    };
    let mut found: Vec<_> = entries(paths.at("/proc")).iter().filter_map(|entry| process(entry)).collect();
    found.sort();
    found.into_iter().map(|(_, process)| process).collect()
}

fn open_device(process: &Path, devices: &[&str]) -> Option<String> {
    let is_one = |path: &str| devices.iter().any(|device| path.starts_with(device));
    let open = entries(process.join("fd"));
    let mut open = open.iter().filter_map(|entry| Some(fs::read_link(entry).ok()?.to_str()?.to_owned()));
    if let Some(path) = open.find(|path| is_one(path)) {
        return Some(path);
    }
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    let mut mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    mapped.find(|path| is_one(path)).map(str::to_owned)
}
