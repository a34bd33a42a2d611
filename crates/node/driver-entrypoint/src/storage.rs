//! Storage that a driver carries: file systems and swap space on block devices, and network file systems.

use std::{
    collections::BTreeSet,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use crate::{
    files::{entries, name_of, text},
    modules::users::module_of,
    mountinfo::{self, Mount},
    node::Paths,
};

/// Maximum number of stacked block devices, such as LVM on multipath on RAID.
const MAX_DEPTH: usize = 8;

/// A use of storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StorageUse {
    /// Description, for example `the file system mounted at /var/lib/kubelet`.
    pub(crate) description: String,
    /// Modules of the drivers below the block device.
    pub(crate) modules: BTreeSet<String>,
    /// Addresses of the servers that provide the storage.
    pub(crate) servers: Vec<IpAddr>,
}

/// Lists mounted file systems and swap space of process 1.
pub(crate) fn uses(paths: &Paths) -> Vec<StorageUse> {
    let mounts = mountinfo::read(&paths.at("/proc/1")).unwrap_or_default();
    let swaps = fs::read_to_string(paths.at("/proc/swaps")).unwrap_or_default();
    let mut uses: Vec<StorageUse> = mounts.iter().filter_map(|mount| use_of_mount(paths, mount)).collect();
    uses.extend(swaps.lines().skip(1).filter_map(|line| {
        let device = line.split_whitespace().next()?;
        let name = device.strip_prefix("/dev/")?.rsplit('/').next()?;
        let device_path = fs::canonicalize(paths.at(&format!("/sys/class/block/{name}"))).ok()?;
        Some(use_of_device(&device_path, format!("swap space on {device}")))
    }));
    uses.retain(|storage_use| !storage_use.modules.is_empty() || !storage_use.servers.is_empty());
    uses
}

fn use_of_mount(paths: &Paths, mount: &Mount) -> Option<StorageUse> {
    let description = format!("the file system mounted at {}", mount.point.display());
    if mount.file_system.starts_with("nfs") {
        // The client adds the server's address to the options.
        let options = mount.options.split(',');
        let servers = options.filter_map(|option| option.strip_prefix("addr=")?.parse().ok()).collect();
        return Some(StorageUse { description, modules: BTreeSet::new(), servers });
    }
    let device = fs::canonicalize(paths.at(&format!("/sys/dev/block/{}", mount.device))).ok()?;
    Some(use_of_device(&device, description))
}

fn use_of_device(device: &Path, description: String) -> StorageUse {
    let mut storage = StorageUse { description, modules: BTreeSet::new(), servers: Vec::new() };
    add_device(device, MAX_DEPTH, &mut storage);
    storage
}

/// Adds the drivers of a block device: those of all its ancestors, because a disk has a driver (`sd_mod`) and its
/// adapter another. Devices without a driver are composed of other devices: LVM, multipath and RAID list them in
/// `slaves`, and an NVMe subsystem with native multipath contains its controllers.
fn add_device(device: &Path, depth: usize, storage: &mut StorageUse) {
    for ancestor in device.ancestors() {
        storage.modules.extend(module_of(ancestor));
        if let Some(transport) = text(ancestor.join("transport")).filter(|_| is_controller(ancestor)) {
            // A controller over fabrics has no driver in sysfs, so its module is derived from the transport.
            storage.modules.extend((transport != "pcie").then(|| format!("nvme_{transport}")));
            // For example: traddr=10.0.0.5,trsvcid=4420,src_addr=10.0.0.7
            let address = text(ancestor.join("address")).unwrap_or_default();
            let addresses = address.split(',').filter_map(|field| field.strip_prefix("traddr="));
            storage.servers.extend(addresses.filter_map(|address| address.parse::<IpAddr>().ok()));
        }
        if depth == 0 {
            continue;
        }
        let controllers = || entries(ancestor).into_iter().filter(|path| is_controller(path));
        let parts: Vec<PathBuf> = if ancestor.join("subsysnqn").exists() {
            controllers().collect()
        } else {
            entries(ancestor.join("slaves"))
        };
        for part in parts.iter().filter_map(|part| fs::canonicalize(part).ok()) {
            add_device(&part, depth - 1, storage);
        }
    }
}

/// Whether the path is an NVMe controller, such as `nvme0`. Namespaces are `nvme0n1` or `nvme0c0n1`.
fn is_controller(path: &Path) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name_of(path).strip_prefix("nvme").is_some_and(is_number)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    /// Creates an NVMe subsystem with native multipath, and one controller over a fabric. As in Linux, the block device
    /// is below the subsystem, which has no driver and no `slaves`.
    fn subsystem(bench: &Bench, transport: &str, address: &str) {
        let controller = "/sys/devices/virtual/nvme-fabrics/ctl/nvme0";
        bench.write(&format!("{controller}/transport"), &format!("{transport}\n"));
        bench.write(&format!("{controller}/address"), &format!("{address}\n"));
        let top = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0";
        bench.write(&format!("{top}/subsysnqn"), "nqn.2026-11.example:disk\n");
        bench.write(&format!("{top}/nvme0n1/size"), "8192\n");
        symlink("../../nvme-fabrics/ctl/nvme0", bench.at(top).join("nvme0")).unwrap();
        fs::create_dir_all(bench.at("/sys/dev/block")).unwrap();
        symlink(format!("../../{}", &top[5..]) + "/nvme0n1", bench.at("/sys/dev/block/259:1")).unwrap();
    }

    #[test]
    fn native_multipath_leads_to_the_transports_module_and_server() {
        let bench = Bench::new();
        subsystem(&bench, "rdma", "traddr=10.0.0.5,trsvcid=4420,src_addr=10.0.0.7");
        bench.write("/proc/1/mountinfo", "30 1 259:1 / /var/lib/kubelet rw - ext4 /dev/nvme0n1 rw\n");
        let wanted = StorageUse {
            description: "the file system mounted at /var/lib/kubelet".to_owned(),
            modules: ["nvme_rdma".to_owned()].into(),
            servers: vec![[10, 0, 0, 5].into()],
        };
        assert_eq!(uses(&bench.node().paths), [wanted]);
    }

    #[test]
    fn a_disk_has_its_own_driver_and_its_adapters() {
        let bench = Bench::new();
        let adapter = "/sys/devices/pci0/0000:08:00.0";
        let disk = format!("{adapter}/host7/target7:0:0/7:0:0:1");
        for (device, module) in [(adapter, "mlx5_core"), (disk.as_str(), "sd_mod")] {
            fs::create_dir_all(bench.at(device).join("driver")).unwrap();
            symlink(format!("/sys/module/{module}"), bench.at(device).join("driver/module")).unwrap();
        }
        fs::create_dir_all(bench.at(&format!("{disk}/block/sdb"))).unwrap();
        fs::create_dir_all(bench.at("/sys/class/block")).unwrap();
        symlink(bench.at(&format!("{disk}/block/sdb")), bench.at("/sys/class/block/sdb")).unwrap();
        bench.write("/proc/swaps", "Filename Type Size Used Priority\n/dev/sdb partition 1 0 -2\n");
        let found = uses(&bench.node().paths);
        assert_eq!(found[0].description, "swap space on /dev/sdb");
        assert_eq!(found[0].modules.iter().collect::<Vec<_>>(), ["mlx5_core", "sd_mod"]);
    }

    #[test]
    fn a_file_system_of_the_network_has_a_server() {
        let bench = Bench::new();
        bench.write(
            "/proc/1/mountinfo",
            "30 1 0:40 / /srv/a\\040b rw shared:1 - nfs4 10.0.0.5:/root rw,vers=4.2,addr=10.0.0.5,clientaddr=10.0.0.7\n\
             31 1 0:5 / /dev rw - devtmpfs none rw\n",
        );
        let found = uses(&bench.node().paths);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].description.as_str(), &found[0].servers[..]),
            ("the file system mounted at /srv/a b", &[IpAddr::from([10, 0, 0, 5])][..])
        );
    }
}
