//! A `mofed` container must not cut the node off.

use std::{fs, os::unix::fs::symlink};

use super::*;
use crate::logind;

/// Gives `mlx5_core` the interface that carries the default route.
pub(super) fn uplink(bench: &Bench) {
    let driver = bench.at("/sys/class/net/ens1/device/driver");
    fs::create_dir_all(&driver).unwrap();
    symlink("/sys/module/mlx5_core", driver.join("module")).unwrap();
    bench.write("/proc/1/net/route", "head\nens1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n");
}

const REFUSED: &str =
    "refused, because the unload of the driver would disrupt interface ens1 (the node's default route)";

#[test]
fn the_uplink_is_not_taken_from_the_node() {
    let bench = bench();
    uplink(&bench);
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with(REFUSED), "{refusal}");
    assert!(refusal.contains("ALLOW_DISRUPTION=uplink"), "{refusal}");
    assert_eq!(bench.calls(), Vec::<String>::new());
    run_container(&bench, &settings(&[("ALLOW_DISRUPTION", "uplink")]), || {
        assert_eq!(bench.loaded_versions(), OURS);
    })
    .unwrap();
}

/// The drivers stay as they are, and the next container of this image finds them.
#[test]
fn the_uplink_is_not_taken_at_a_stop_either() {
    let bench = bench();
    let restoring = settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]);
    let error = run_container(&bench, &restoring, || uplink(&bench)).unwrap_err();
    assert_eq!(error.to_string(), REFUSED);
    assert_eq!(bench.loaded_versions(), OURS);
    assert_eq!(blacklists(&bench), Vec::<String>::new());
    let allowed = [("RESTORE_DRIVER_ON_POD_TERMINATION", "true"), ("ALLOW_DISRUPTION", "uplink")];
    run_container(&bench, &settings(&allowed), || {}).unwrap();
    assert!(bench.loaded_versions().contains(&"host-mlx5_core".to_owned()));
}

/// UNLOAD_STORAGE_MODULES allows the unload of storage modules, not the loss of mounted file systems.
#[test]
fn mounted_storage_needs_its_own_permission() {
    let bench = bench();
    bench.load_from_host(&["ib_srp"]);
    let disk = bench.at("/sys/devices/pci0/infiniband_srp/host7/block/sdb");
    fs::create_dir_all(&disk).unwrap();
    fs::create_dir_all(bench.at("/sys/devices/pci0/driver")).unwrap();
    symlink("/sys/module/mlx5_core", bench.at("/sys/devices/pci0/driver/module")).unwrap();
    fs::create_dir_all(bench.at("/sys/dev/block")).unwrap();
    symlink(&disk, bench.at("/sys/dev/block/8:16")).unwrap();
    bench.write("/proc/1/mountinfo", "30 1 8:16 / /var/lib/kubelet rw - ext4 /dev/sdb rw\n");
    let unload = ("UNLOAD_STORAGE_MODULES", "true");
    let refusal = refusal(&bench, &[unload]);
    assert!(refusal.contains("would disrupt the file system mounted at /var/lib/kubelet |"), "{refusal}");
    assert_eq!(bench.calls(), Vec::<String>::new());
    run_container(&bench, &settings(&[unload, ("ALLOW_DISRUPTION", "storage")]), || {}).unwrap();
}

/// A storage module of the image that does not fit the host's modules, such as nvme_rdma and nvme_core.
#[test]
fn storage_that_the_image_cannot_serve_brings_the_hosts_drivers_back() {
    let bench = bench();
    bench.load_from_host(&["ib_srp"]);
    let before = bench.loaded_versions();
    bench.kernel.load_errors.borrow_mut().insert("ib_srp of the image".to_owned(), Errno::INVAL);
    let refusal = refusal(&bench, &[("UNLOAD_STORAGE_MODULES", "true")]);
    assert!(refusal.starts_with("load ib_srp from"), "{refusal}");
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
}

#[test]
fn the_hosts_drivers_come_back_with_the_hosts_options() {
    let bench = bench();
    bench.write("/etc/modprobe.d/image.conf", "options mlx5_core prof_sel=3\n");
    bench.write("/host/etc/modprobe.d/site.conf", "options mlx5_core prof_sel=1\n");
    run_container(&bench, &settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]), || {
        assert!(bench.calls().contains(&"load mlx5_core of the image prof_sel=3".to_owned()));
    })
    .unwrap();
    assert!(bench.calls().contains(&"load mlx5_core of the host prof_sel=1".to_owned()));
    assert!(!bench.log().contains("without its options"), "{}", bench.log());
}

/// CrashLoopBackOff would take the interfaces down again and again.
#[test]
fn an_image_that_failed_is_not_tried_again_until_it_changes() {
    let bench = bench();
    bench.kernel.load_errors.borrow_mut().insert("mlx_compat".to_owned(), Errno::NOEXEC);
    refusal(&bench, &[]);
    bench.calls();
    let again = refusal(&bench, &[]);
    assert!(
        again.starts_with(
            "this image's drivers failed on this node, and are not tried again: load mlx_compat"
        ),
        "{again}"
    );
    let removal = "to try this image again, remove /run/mellanox/drivers/.failed on the node, or reboot it";
    assert!(again.ends_with(removal), "{again}");
    assert_eq!(bench.calls(), Vec::<String>::new());
    bench.kernel.load_errors.borrow_mut().clear();
    assert!(refusal(&bench, &[]).starts_with("this image's drivers failed"));

    // Another image, or other parameters, are tried.
    bench.write("/drivers/mlx5_core.conf", "prof_sel=2\n");
    run_container(&bench, &settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]), || {}).unwrap();
    fs::remove_file(bench.at("/drivers/mlx5_core.conf")).unwrap();
    run_container(&bench, &settings(&[]), || {}).unwrap();
}

/// Another program may have released the module by the next try.
#[test]
fn a_driver_in_use_is_tried_again() {
    let bench = bench();
    bench.kernel.references.borrow_mut().insert("ib_core".to_owned(), 1);
    assert!(refusal(&bench, &[]).starts_with("unload ib_core: 1 reference(s)"));
    bench.kernel.references.borrow_mut().clear();
    run_container(&bench, &settings(&[]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
}

#[test]
fn a_read_only_etc_does_not_fail_start_or_stop() {
    let bench = bench();
    // Nothing can be created below a file, and a directory is not removed like a file.
    bench.write("/host/etc/modprobe.d", "");
    fs::create_dir_all(bench.at("/host/etc/udev/rules.d/77-mlnx-net-names.rules/x")).unwrap();
    let before = bench.loaded_versions();
    let environment = [("RESTORE_DRIVER_ON_POD_TERMINATION", "true"), ("CREATE_IFNAMES_UDEV", "true")];
    run_container(&bench, &settings(&environment), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
    assert!(bench.log().contains("WARN  continuing without a blacklist"), "{}", bench.log());
}

/// The kubelet ends pods in the order of their priority, and unmounts volumes of the network after this container.
#[test]
fn the_network_stays_while_the_node_shuts_down() {
    let bench = bench();
    let restoring = settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]);
    run_container(&bench, &restoring, || logind::tests::bus(&bench, 2, b"\x01b\0\0\x01\0\0\0")).unwrap();
    assert_eq!(bench.loaded_versions(), OURS);
    run_container(&bench, &restoring, || logind::tests::bus(&bench, 2, b"\x01b\0\0\0\0\0\0")).unwrap();
    assert!(bench.loaded_versions().contains(&"host-mlx5_core".to_owned()), "{}", bench.log());
}

/// A driver that loads while the probe of one of its devices fails. Also if a container is killed without a driver, or before it
/// looks at the devices.
#[test]
fn a_device_that_loses_its_driver_brings_the_hosts_drivers_back() {
    for killed_at in [None, Some((6, true)), Some((13, true))] {
        lose_the_driver_of_a_device(killed_at);
    }
}

fn lose_the_driver_of_a_device(killed_at: Option<(usize, bool)>) {
    let bench = bench();
    let before = bench.loaded_versions();
    let device = "/sys/bus/pci/devices/0000:08:00.0";
    bench.write(&format!("{device}/vendor"), "0x15b3\n");
    fs::create_dir_all(bench.at("/sys/module/mlx5_core/drivers/pci:mlx5_core")).unwrap();
    for (to, at) in [
        (device, "/sys/module/mlx5_core/drivers/pci:mlx5_core/0000:08:00.0"),
        ("/sys/bus", &format!("{device}/driver")),
    ] {
        symlink(bench.at(to), bench.at(at)).unwrap();
    }
    let driver = bench.at(&format!("{device}/driver"));
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| {
        if name == "mlx5_core" {
            let _ = fs::remove_file(&driver);
        }
    })));
    if killed_at.is_some() {
        bench.kernel.killed_at.set(killed_at);
        assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, &settings(&[]), || {}))).is_err());
        bench.kernel.killed_at.set(None);
    }
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with("no driver is bound to 0000:08:00.0, which had one before"), "{refusal}");
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before, "{killed_at:?}");
    assert_eq!(bench.read("/run/mellanox/drivers/.bound"), None);
}

/// A node whose container was killed between two drivers, and which gets no other container that can start.
#[test]
fn a_container_that_cannot_start_repairs_the_node_after_a_killed_one() {
    for at in 2..9 {
        let bench = bench();
        let before = bench.loaded_versions();
        bench.kernel.killed_at.set(Some((at, true)));
        assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, &settings(&[]), || {}))).is_err());
        bench.kernel.killed_at.set(None);
        let is_lost = !bench.loaded_versions().iter().any(|name| name.ends_with("mlx5_core"));
        // The next image was not built for this kernel.
        fs::rename(bench.at("/lib/modules"), bench.at("/lib/other")).unwrap();
        let refusal = refusal(&bench, &[]);
        assert!(refusal.starts_with("module mlx5_core is missing for kernel"), "{refusal}");
        let after: Vec<String> =
            bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
        if is_lost {
            let after: Vec<String> = after.into_iter().filter(|name| name != "image-mlx_compat").collect();
            assert_eq!(after, before, "{at}: {}", bench.log());
        }
        assert_eq!(blacklists(&bench), Vec::<String>::new());
    }
}

/// The node has either the host's or the image's stack, and the settings of its devices.
#[test]
fn a_container_that_cannot_start_completes_what_a_killed_one_has_begun() {
    let mut kills_with_drivers = 0;
    for at in 2.. {
        let bench = bench();
        network::device(&bench);
        let before = bench.loaded_versions();
        bench.kernel.killed_at.set(Some((at, true)));
        if catch_unwind(AssertUnwindSafe(|| run_container(&bench, &settings(&[]), || {}))).is_ok() {
            break;
        }
        bench.kernel.killed_at.set(None);
        let is_image = bench.loaded_versions() == OURS;
        let is_unset = bench.read(network::NUMBER).as_deref() == Some("0");
        kills_with_drivers += u32::from(is_image && is_unset);
        fs::rename(bench.at("/lib/modules"), bench.at("/lib/other")).unwrap();
        refusal(&bench, &[]);
        let mut after = bench.loaded_versions();
        if !is_image {
            after.retain(|name| name != "host-tls" && name != "image-mlx_compat");
        }
        assert!(after == before || (is_image && after == OURS), "{at}: {after:?} {}", bench.log());
        assert_eq!(bench.read(network::NUMBER).as_deref(), Some("1"), "{at}: {}", bench.log());
        assert_eq!(bench.read(network::SAVED), None, "{at}: {}", bench.log());
    }
    assert!(kills_with_drivers > 0, "no kill came between the drivers and their settings");
}
