//! Processes that use a driver: those with its device files open or mapped.

use std::{collections::BTreeSet, fmt, fs, path::Path};

use super::loaded::Loaded;
use crate::{
    devices::driver_entries,
    files::{entries, link_name, name_of, text},
    module_file::kernel_name,
    node::Paths,
};

/// A process that has a device file open or mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceUser {
    pub(crate) id: u32,
    command: String,
    /// UID of the process's pod.
    pub(crate) pod: Option<String>,
    device: String,
}

impl fmt::Display for DeviceUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, command, pod, device } = self;
        write!(f, "process {id} ({command})")?;
        pod.as_ref().map_or(Ok(()), |pod| write!(f, " of pod {pod}"))?;
        write!(f, " with {device} open")
    }
}

/// Path prefixes of device files that keep a module loaded while a process uses them: well-known paths of the module's
/// kind, and the devices that the module drives.
pub(crate) fn device_prefixes(paths: &Paths, loaded: &Loaded, module: &str) -> Vec<String> {
    let uses_rdma = || loaded.get("ib_core").is_some_and(|core| core.holders.contains(module));
    let well_known: &[&str] = match module {
        name if name.starts_with("nvidia") => &["/dev/nvidia"],
        "gdrdrv" => &["/dev/gdrdrv"],
        name if name.starts_with("mst") => &["/dev/mst", "/dev/mstflint"],
        name if name.contains("vdpa") => &["/dev/vhost-vdpa"],
        name if name.contains("fwctl") => &["/dev/fwctl"],
        name if name.starts_with("vfio") => &["/dev/vfio/"],
        name if ["ib_", "rdma", "mlx"].iter().any(|prefix| name.starts_with(prefix)) || uses_rdma() => {
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
    well_known.iter().map(|&prefix| prefix.to_owned()).chain(driven).collect()
}

/// Modules of other drivers that are bound to virtual functions of the module's devices.
pub(crate) fn virtual_function_drivers(paths: &Paths, module: &str) -> BTreeSet<String> {
    let module = kernel_name(module);
    let functions = driver_entries(paths, &module).into_iter().flat_map(entries);
    let functions = functions.filter(|path| name_of(path).starts_with("virtfn"));
    functions.filter_map(|function| module_of(&function)).filter(|driver| *driver != module).collect()
}

/// Module of a device's driver.
pub(crate) fn module_of(device: &Path) -> Option<String> {
    link_name(device.join("driver/module")).map(|name| kernel_name(&name))
}

/// Lists processes that have a file with one of these path prefixes open or mapped, for example `process 12 (ucx) with
/// /dev/infiniband/uverbs0 open`. Without `hostPID`, the list has only processes of this container.
pub(crate) fn processes(paths: &Paths, prefixes: &[String]) -> Vec<DeviceUser> {
    let process = |entry: &Path| {
        let id = entry.file_name()?.to_str()?.parse().ok()?;
        let device = open_device(entry, prefixes)?;
        let command = text(entry.join("comm")).unwrap_or_default();
        Some(DeviceUser { id, command, pod: pod_of(entry), device })
    };
    let mut users: Vec<DeviceUser> =
        entries(paths.at("/proc")).iter().filter_map(|entry| process(entry)).collect();
    users.sort_by_key(|user| user.id);
    users
}

/// Parses the pod's UID from a process's cgroup: `kubepods-burstable-pod<uid>.slice`, where `_` replaces `-`, or
/// `kubepods/burstable/pod<uid>`. The UID of a static pod is a hash.
pub(crate) fn pod_of(process: &Path) -> Option<String> {
    text(process.join("cgroup"))?.split(['/', '\n']).find_map(|part| {
        let (_, uid) = part.strip_suffix(".slice").unwrap_or(part).rsplit_once("pod")?;
        let is_plain = |byte: u8| byte.is_ascii_hexdigit() || matches!(byte, b'-' | b'_');
        (matches!(uid.len(), 32 | 36) && uid.bytes().all(is_plain)).then(|| uid.replace('_', "-"))
    })
}

fn open_device(process: &Path, prefixes: &[String]) -> Option<String> {
    let is_device = |path: &str| prefixes.iter().any(|prefix| path.starts_with(prefix.as_str()));
    let open = entries(process.join("fd"));
    let mut open = open.iter().filter_map(|entry| Some(fs::read_link(entry).ok()?.to_str()?.to_owned()));
    if let Some(path) = open.find(|path| is_device(path)) {
        return Some(path);
    }
    let maps = fs::read_to_string(process.join("maps")).unwrap_or_default();
    let mut mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    mapped.find(|path| is_device(path)).map(str::to_owned)
}
