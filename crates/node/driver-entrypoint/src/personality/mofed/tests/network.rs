//! Devices and their network interfaces from start to stop of a container.

use std::{fs, os::unix::fs::symlink};

use super::*;

const DEVICE: &str = "/sys/bus/pci/devices/0000:08:00.0";
pub(super) const NUMBER: &str = "/sys/bus/pci/devices/0000:08:00.0/sriov_numvfs";
pub(super) const SAVED: &str = "/run/mellanox/drivers/.sriov";

/// Creates an interface of a device with the mlx5_core driver. udev's database has the name that it has without the rules.
fn interface(bench: &Bench, name: &str) {
    bench.write(&format!("/sys/class/net/{name}/device/vendor"), "0x15b3\n");
    bench.write(&format!("/sys/class/net/{name}/ifindex"), "3\n");
    bench.write("/run/udev/data/n3", "I:1\nE:ID_NET_NAME_PATH=enp8s0f0np0\n");
}

#[test]
fn interfaces_keep_names_without_ports() {
    const RULES: &str = "/host/etc/udev/rules.d/77-mlnx-net-names.rules";
    for (name, written) in [("enp8s0f0", true), ("enp8s0f0np0", false)] {
        let bench = bench();
        interface(&bench, name);
        // The second container keeps the drivers of the first.
        for _ in 0..2 {
            run_container(&bench, &settings(&[("CREATE_IFNAMES_UDEV", "true")]), || {
                assert_eq!(bench.read(RULES).is_some(), written, "{name}");
            })
            .unwrap();
            assert_eq!(bench.read(RULES), None, "{name}");
        }
    }
    let bench = bench();
    interface(&bench, "enp8s0f0");
    bench.kernel.load_errors.borrow_mut().insert("mlx_compat".to_owned(), Errno::NOEXEC);
    refusal(&bench, &[("CREATE_IFNAMES_UDEV", "true")]);
    assert_eq!(bench.read(RULES), None, "the host's drivers are back");
    let bench = self::bench();
    interface(&bench, "enp8s0f0");
    run_container(&bench, &settings(&[]), || assert_eq!(bench.read(RULES), None)).unwrap();
}

/// Creates a device with virtual functions, which disappear when its driver is unloaded.
pub(super) fn device(bench: &Bench) {
    bench.write(&format!("{DEVICE}/net/ens1/mtu"), "9000\n");
    bench.write("/sys/bus/pci/devices/0000:08:00.2/vendor", "0x15b3\n");
    bench.write("/sys/bus/pci/drivers/mlx5_core/bind", "");
    for (to, at) in [
        (DEVICE, "/sys/bus/pci/drivers/mlx5_core/0000:08:00.0"),
        ("/sys/bus/pci/devices/0000:08:00.2", &format!("{DEVICE}/virtfn0")),
    ] {
        symlink(bench.at(to), bench.at(at)).unwrap();
    }
    bench.write(NUMBER, "1");
    let number = bench.at(NUMBER);
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| {
        if name == "mlx5_core" {
            fs::write(&number, "0").unwrap();
        }
    })));
}

#[test]
fn virtual_functions_outlive_a_container_that_is_killed_between_two_drivers() {
    let bench = bench();
    device(&bench);
    // State that was saved before the driver was unloaded must not overwrite later changes.
    for (call, saved, later, then) in [(1, "2", "1", "1"), (6, "1", "0", "1")] {
        bench.write(NUMBER, saved);
        // The sixth call unloads the in-tree mlx5_core.
        bench.kernel.killed_at.set(Some((call, true)));
        assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, &settings(&[]), || {}))).is_err());
        bench.kernel.killed_at.set(None);
        assert!(bench.read(SAVED).is_some());
        bench.write(NUMBER, later);
        run_container(&bench, &settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]), || {
            assert_eq!(bench.read(NUMBER).as_deref(), Some(then), "{call}");
        })
        .unwrap();
        assert_eq!(bench.read(SAVED), None);
    }
}

/// The root is mounted over the directory with the saved state.
#[test]
fn virtual_functions_come_back_where_the_root_is_exposed() {
    let bench = bench();
    device(&bench);
    let settings = Settings::read(&["--expose-root"], |_| None).unwrap();
    run_container(&bench, &settings, || assert_eq!(bench.read(NUMBER).as_deref(), Some("1"))).unwrap();
    assert_eq!(bench.read(SAVED), None);
}

/// An InfiniBand node with the host's and the image's IPoIB module. Unloading either resets the interface.
fn with_ipoib() -> Bench {
    let bench = bench();
    device(&bench);
    bench.host_module("ib_ipoib", "ib_core");
    bench.image_module("ib_ipoib", "ib_core");
    bench.load_from_host(&["ib_ipoib"]);
    let (interface, number) = (bench.at(&format!("{DEVICE}/net/ens1")), bench.at(NUMBER));
    set_up(&bench);
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| match name {
        "ib_ipoib" => {
            fs::write(interface.join("mtu"), "2044").unwrap();
            fs::write(interface.join("flags"), "0x1002").unwrap();
        }
        "mlx5_core" => fs::write(&number, "0").unwrap(),
        _ => {}
    })));
    bench
}

fn set_up(bench: &Bench) {
    bench.write(&format!("{DEVICE}/net/ens1/mtu"), "4092");
    bench.write(&format!("{DEVICE}/net/ens1/flags"), "0x1003");
}

fn is_up(bench: &Bench) {
    let text = |file: &str| bench.read(&format!("{DEVICE}/net/ens1/{file}")).unwrap();
    assert_eq!((text("mtu"), text("flags")), ("4092".to_owned(), "0x1003".to_owned()), "{}", bench.log());
}

/// A process that this container cannot see has the device open, so the reference is never dropped.
#[test]
fn modules_in_use_are_found_before_interfaces_go_down() {
    let bench = with_ipoib();
    bench.set_references("mlx5_ib", 1);
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with("unload mlx5_ib: 1 reference(s) that no module holds"), "{refusal}");
    assert!(bench.kernel.pauses.get() > 0, "the check retries, because the reference may be dropped soon");
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn interfaces_are_restored_if_the_drivers_stay() {
    let bench = with_ipoib();
    bench.set_references("ib_core", 1);
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with("unload ib_core: 1 reference(s)"), "{refusal}");
    assert!(bench.calls().contains(&"load ib_ipoib of the host".to_owned()));
    is_up(&bench);
    // No function is bound again: the driver was not unloaded, and its functions may be in use.
    assert_eq!(bench.read("/sys/bus/pci/drivers/mlx5_core/bind").as_deref(), Some(""));

    // The same at the stop, with the image's modules.
    bench.set_references("ib_core", 0);
    let restoring = settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]);
    let error = run_container(&bench, &restoring, || {
        is_up(&bench);
        bench.set_references("ib_core", 1);
    });
    assert!(error.unwrap_err().to_string().starts_with("unload ib_core: 1 reference(s)"));
    assert!(bench.loaded_versions().contains(&"image-ib_ipoib".to_owned()));
    is_up(&bench);
}

#[test]
fn settings_are_restored_although_a_module_is_not() {
    let bench = bench();
    device(&bench);
    let error = run_container(&bench, &settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]), || {
        bench.kernel.load_errors.borrow_mut().insert("ib_core of the host".to_owned(), Errno::NODEV);
    });
    assert!(error.unwrap_err().to_string().starts_with("load ib_core from /host"));
    assert!(bench.loaded_versions().contains(&"host-mlx5_core".to_owned()), "{}", bench.log());
    assert_eq!(bench.read(NUMBER).as_deref(), Some("1"));
    assert!(bench.read("/run/mellanox/drivers/.replaced").is_some(), "the next container tries again");
}

/// Without a driver, the saved settings are left to the next container.
#[test]
fn settings_wait_for_a_driver() {
    let bench = bench();
    device(&bench);
    let refused = |bench: &Bench, errno: Option<Errno>| {
        let mut refuses = bench.kernel.load_errors.borrow_mut();
        refuses.clear();
        refuses.extend(errno.map(|errno| ("mlx5_core".to_owned(), errno)));
    };
    refused(&bench, Some(Errno::NODEV));
    refusal(&bench, &[]);
    assert!(bench.read(SAVED).is_some());
    refused(&bench, None);
    run_container(&bench, &settings(&[]), || assert_eq!(bench.read(NUMBER).as_deref(), Some("1"))).unwrap();
    assert_eq!(bench.read(SAVED), None);
}
