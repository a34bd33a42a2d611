//! Tests of forecasts over recorded `/proc` and `/sys`.

use std::os::unix::fs::symlink;

use super::*;
use crate::{disruption::read_allowed, testing::Bench};

const ROUTES: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                      eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                      eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n";
// 192.168.7.9:6443 is established; 10.0.0.5:6443 is closing (TIME_WAIT).
const CONNECTIONS: &str = "  sl  local_address rem_address   st\n\
                           0: 0100007F:9C40 0907A8C0:192B 01 00000000:00000000\n\
                           1: 0100007F:9C41 0500000A:192B 06 00000000:00000000\n";

fn bench() -> Bench {
    let bench = Bench::new();
    for (name, depends) in [("mlx5_core", ""), ("mlx5_ib", "mlx5_core"), ("nvme", ""), ("dummy", "")] {
        bench.host_module(name, depends);
    }
    bench.load_from_host(&["mlx5_core", "mlx5_ib", "nvme", "dummy"]);
    bench
}

/// Creates a device below `/sys` whose driver is the module.
fn device(bench: &Bench, path: &str, module: &str) {
    let driver = bench.at(path).join("driver");
    fs::create_dir_all(&driver).unwrap();
    symlink(format!("../../../module/{module}"), driver.join("module")).unwrap();
}

fn forecast_lines(bench: &Bench, names: &[&str]) -> Vec<String> {
    forecast(&bench.node(), names, None, &[]).unwrap().iter().map(ToString::to_string).collect()
}

#[test]
fn interfaces_that_go_down_are_listed() {
    let bench = bench();
    bench.write("/proc/1/net/route", ROUTES);
    bench.write("/proc/1/net/tcp", CONNECTIONS);
    for name in ["eth0", "eth1", "eth2"] {
        device(&bench, &format!("/sys/class/net/{name}/device"), "mlx5_core");
    }
    fs::create_dir_all(bench.at("/sys/class/net/lo")).unwrap();
    assert_eq!(
        forecast_lines(&bench, &["mlx5-core", "absent"]),
        [
            "module mlx5_ib can be unloaded",
            "the unload of module mlx5_core would disrupt interface eth0 (the node's default route); interface eth1 (the \
             connection to the API server at 192.168.7.9:6443)",
        ]
    );
    let uplink = read_allowed(|_| Some("uplink".to_owned())).unwrap();
    let forecasts = forecast(&bench.node(), &["mlx5_core"], None, &uplink).unwrap();
    assert_eq!(
        forecasts[1].to_string(),
        "module mlx5_core can be unloaded, which takes down interface eth0 (the node's default route); interface eth1 (routes, the \
         connection to the API server at 192.168.7.9:6443); interface eth2",
    );
}

/// Before a drain begins, the Job's exit code and message say what the driver's container would refuse.
#[test]
fn refused_disruptions_are_reported_to_farrier() {
    let bench = bench();
    bench.write("/proc/1/net/route", ROUTES);
    bench.write("/dev/termination-log", "");
    device(&bench, "/sys/class/net/eth0/device", "mlx5_core");
    let words = ["--message", "/dev/termination-log", "mlx5_core"];
    let run_forecast = |allowed: &str| {
        let allowed = read_allowed(|_| Some(allowed.to_owned())).unwrap();
        let result = run(&bench.node(), &ForecastRequest::parse(&words, None, allowed).unwrap());
        (
            result.map_err(|error| format!("{error} | {}", error.hint())),
            bench.read("/dev/termination-log").unwrap(),
        )
    };
    let (refused, message) = run_forecast("pods");
    let refused = refused.unwrap_err();
    let lost = "interface eth0 (the node's default route)";
    assert!(
        refused.starts_with(&format!("refused, because the unload of the driver would disrupt {lost} | ")),
        "{refused}"
    );
    assert!(refused.contains("ALLOW_DISRUPTION=uplink in the definition's runtime.env"), "{refused}");
    assert_eq!(message, format!("- mlx5_core: {lost}\n"));
    assert_eq!(run_forecast("uplink"), (Ok(()), String::new()));
}

/// They are known before a drain begins, and not only when the driver is gone.
#[test]
fn settings_that_are_not_restored_are_named_before_the_unload() {
    let bench = bench();
    fs::create_dir_all(bench.at("/sys/bus/auxiliary/devices/mlx5_core.sf.4")).unwrap();
    assert_eq!(
        forecast_lines(&bench, &["mlx5_core", "dummy"]),
        [
            "module mlx5_ib can be unloaded",
            "module mlx5_core can be unloaded; lost with it, and not restored: 1 sub-function(s)",
            "module dummy can be unloaded",
        ]
    );
}

/// Storage of the network is lost with the interface that leads to its server.
#[test]
fn storage_is_lost_with_its_device_or_its_interface() {
    let bench = bench();
    bench.write("/proc/1/net/route", ROUTES);
    device(&bench, "/sys/class/net/eth1/device", "mlx5_core");
    bench.write("/proc/1/mountinfo", "30 1 0:40 / /var/lib/kubelet rw - nfs4 a:/b rw,addr=192.168.7.5\n");
    assert_eq!(
        forecast_lines(&bench, &["mlx5_core"])[1],
        "the unload of module mlx5_core would disrupt the file system mounted at /var/lib/kubelet"
    );
}

#[test]
fn holders_of_a_module_are_listed() {
    let bench = bench();
    device(&bench, "/sys/devices/pci0/nvme0", "nvme");
    let disk = bench.at("/sys/devices/pci0/nvme0/block/nvme0n1/nvme0n1p1");
    fs::create_dir_all(&disk).unwrap();
    fs::create_dir_all(bench.at("/sys/dev/block")).unwrap();
    symlink(&disk, bench.at("/sys/dev/block/259:1")).unwrap();
    let volume = bench.at("/sys/devices/virtual/block/dm-1");
    for (device, part) in [("dm-0", &disk), ("dm-1", &volume.with_file_name("dm-0"))] {
        let parts = volume.with_file_name(device).join("slaves");
        fs::create_dir_all(&parts).unwrap();
        symlink(part, parts.join("part")).unwrap();
    }
    symlink(&volume, bench.at("/sys/dev/block/253:1")).unwrap();
    bench.write(
        "/proc/1/mountinfo",
        "30 1 259:1 / /var/lib/data rw - ext4 /dev/nvme0n1p1 rw\n31 1 0:5 / /dev rw - devtmpfs none rw\n\
         32 1 253:1 / /var/lib/volume rw - xfs /dev/mapper/volume rw\n",
    );
    bench.kernel.references.borrow_mut().extend([
        ("mlx5_ib".into(), 1),
        ("nvme".into(), 1),
        ("dummy".into(), 2),
    ]);
    bench.host_module("x", "");
    bench.load_from_host(&["x"]);
    bench.write("/proc/12/comm", "ucx\n");
    bench.write("/proc/12/maps", "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
    let departures = forecast(&bench.node(), &["mlx5_core", "nvme", "dummy"], None, &[]).unwrap();
    assert_eq!(
        departures.iter().map(UnloadForecast::is_blocked).collect::<Vec<_>>(),
        [true, false, true, true]
    );
    assert_eq!(
        forecast_lines(&bench, &["mlx5_core", "nvme", "dummy"]),
        [
            "module mlx5_ib cannot be unloaded: used by process 12 (ucx) with /dev/infiniband/uverbs1 open",
            "module mlx5_core can be unloaded",
            "the unload of module nvme would disrupt the file system mounted at /var/lib/data; the file system mounted at /var/lib/volume",
            "module dummy cannot be unloaded: 2 reference(s) of an unknown user",
        ]
    );
}

#[test]
fn users_of_a_virtual_function_are_listed() {
    let bench = bench();
    bench.virtual_function("mlx5_core", "vfio_pci");
    bench.host_module("vfio_pci", "");
    bench.load_from_host(&["vfio_pci"]);
    bench.set_references("vfio_pci", 1);
    bench.write("/proc/12/comm", "qemu\n");
    fs::create_dir_all(bench.at("/proc/12/fd")).unwrap();
    symlink("/dev/vfio/17", bench.at("/proc/12/fd/9")).unwrap();
    assert_eq!(
        forecast_lines(&bench, &["mlx5_core"]),
        [
            "module mlx5_ib can be unloaded",
            "module mlx5_core cannot be unloaded: used by process 12 (qemu) with /dev/vfio/17 open"
        ]
    );
}

/// farrier evicts the named pods, except the driver's own pod. Holders without a pod stay.
#[test]
fn pods_that_hold_a_module_are_reported_to_farrier() {
    const TRAINING: &str = "0f3a2b1c-0000-4000-8000-000000000001";
    const DRIVER: &str = "0f3a2b1c-0000-4000-8000-000000000002";
    let bench = bench();
    bench.kernel.references.borrow_mut().insert("mlx5_ib".into(), 1);
    let user = |id: u32, group: &str| {
        bench.write(&format!("/proc/{id}/comm"), "ucx\n");
        bench.write(&format!("/proc/{id}/maps"), "7f00-7f01 rw-s 0000 00:05 1 /dev/infiniband/uverbs1\n");
        bench.write(&format!("/proc/{id}/cgroup"), group);
    };
    bench.host_module("x", "");
    bench.load_from_host(&["x"]);
    let systemd = TRAINING.replace('-', "_");
    user(12, &format!("0::/../../kubepods-burstable-pod{systemd}.slice/cri-containerd-1.scope\n"));
    user(13, &format!("0::/kubepods/besteffort/pod{DRIVER}/1\n"));
    user(14, "0::/system.slice/opensm.service\n");
    bench.write("/dev/termination-log", "");
    let run_forecast = |driver: &str| {
        let words = ["--message", "/dev/termination-log", "mlx5_ib"];
        let result =
            run(&bench.node(), &ForecastRequest::parse(&words, Some(driver.to_owned()), Vec::new()).unwrap());
        (result.is_ok(), fs::read_to_string(bench.at("/dev/termination-log")).unwrap())
    };
    let stays = format!(
        "{TRAINING} mlx5_ib: used by process 12 (ucx) of pod {TRAINING} with /dev/infiniband/uverbs1 open\n\
         - mlx5_ib: used by process 14 (ucx) with /dev/infiniband/uverbs1 open\n"
    );
    assert_eq!(run_forecast(DRIVER), (false, stays));
    for gone in [12, 14] {
        fs::remove_dir_all(bench.at(&format!("/proc/{gone}"))).unwrap();
    }
    assert_eq!(run_forecast(DRIVER), (true, String::new()));
    assert!(!run_forecast(TRAINING).0, "only processes of the driver's own pod are ignored");
    for wrong in [&["--message", "x", "a"][..], &["--message", "/x"], &["a b"], &[]] {
        assert!(ForecastRequest::parse(wrong, None, Vec::new()).is_none(), "{wrong:?}");
    }
}

#[test]
fn a_container_without_host_access_lists_no_users() {
    let bench = bench();
    assert_eq!(
        forecast_lines(&bench, &["mlx5_core"]),
        ["module mlx5_ib can be unloaded", "module mlx5_core can be unloaded"]
    );
}
