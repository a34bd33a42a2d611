//! Which processes use a driver: who has its device files open, or mapped.

use std::{fs, path::Path};

use super::loaded::Loaded;
use crate::{
    files::{entries, text},
    module_file::kernel_name,
    node::Paths,
};

/// How the device files begin whose users hold a module: those of its kind, and those of the devices that it drives.
pub(crate) fn devices(paths: &Paths, loaded: &Loaded, module: &str) -> Vec<String> {
    let uses_rdma = || loaded.get("ib_core").is_some_and(|core| core.holders.contains(module));
    let of_its_kind: &[&str] = match module {
        name if name.starts_with("nvidia") => &["/dev/nvidia"],
        name if name.starts_with("mst") => &["/dev/mst", "/dev/mstflint"],
        name if name.contains("vdpa") => &["/dev/vhost-vdpa"],
        name if name.contains("fwctl") => &["/dev/fwctl"],
        name if ["ib_", "rdma", "mlx"].iter().any(|start| name.starts_with(start)) || uses_rdma() => {
            &["/dev/infiniband/"]
        }
        _ => &[],
    };
    let driven = entries(paths.at("/sys/dev/char")).into_iter().filter_map(|device| {
        let device = fs::canonicalize(device).ok()?;
        let driver = device.ancestors().find_map(module_of)?;
        let uevent = (driver == module).then(|| text(device.join("uevent")))??;
        let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
        Some(format!("/dev/{name}"))
    });
    of_its_kind.iter().map(|&start| start.to_owned()).chain(driven).collect()
}

/// The module of a device's driver.
pub(crate) fn module_of(device: &Path) -> Option<String> {
    let module = fs::read_link(device.join("driver/module")).ok()?;
    module.file_name()?.to_str().map(kernel_name)
}

/// The processes that have such files open or mapped, such as `process 12 (ucx) with /dev/infiniband/uverbs0 open`:
/// those that this container sees, which is all of the node's with `hostPID` only.
pub(crate) fn processes(paths: &Paths, devices: &[String]) -> Vec<String> {
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

fn open_device(process: &Path, devices: &[String]) -> Option<String> {
    let is_one = |path: &str| devices.iter().any(|device| path.starts_with(device.as_str()));
    let open = entries(process.join("fd"));
    let mut open = open.iter().filter_map(|entry| Some(fs::read_link(entry).ok()?.to_str()?.to_owned()));
    if let Some(path) = open.find(|path| is_one(path)) {
        return Some(path);
    }
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    let mut mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    mapped.find(|path| is_one(path)).map(str::to_owned)
}
