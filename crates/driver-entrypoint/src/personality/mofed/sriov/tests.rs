use std::os::unix::fs::symlink;

use super::*;
use crate::testing::Bench;

const PF: &str = "/sys/bus/pci/devices/0000:08:00.0";
const VF: &str = "/sys/bus/pci/devices/0000:08:00.2";

fn link(bench: &Bench, to: &str, at: &str) {
    let at = bench.at(at);
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    symlink(bench.at(to), at).unwrap();
}

/// A device with a virtual function, as sysfs shows it.
fn bench() -> Bench {
    let bench = Bench::new();
    for (device, name, mac) in
        [(PF, "enp8s0f0", "00:00:00:00:00:01"), (VF, "enp8s0f0v0", "02:00:00:00:00:02")]
    {
        let interface = format!("{device}/net/{name}");
        bench.file(&format!("{device}/vendor"), "0x15b3\n");
        bench.file(&format!("{interface}/address"), &format!("{mac}\n"));
        bench.file(&format!("{interface}/flags"), "0x1003\n");
        bench.file(&format!("{interface}/mtu"), "9000\n");
        link(&bench, device, &format!("{interface}/device"));
        link(&bench, &interface, &format!("/sys/class/net/{name}"));
        link(&bench, "/sys/bus/pci/drivers/mlx5_core", &format!("{device}/driver"));
    }
    bench.file(&format!("{PF}/sriov_numvfs"), "1\n");
    bench.file(&format!("{VF}/infiniband/mlx5_2/node_guid"), "0011:2233:4455:6677\n");
    bench.file("/sys/bus/pci/drivers/mlx5_core/bind", "");
    bench.file("/sys/bus/pci/drivers/mlx5_core/unbind", "");
    link(&bench, VF, &format!("{PF}/virtfn0"));
    link(&bench, PF, &format!("{VF}/physfn"));
    // Another vendor's.
    bench.file("/sys/class/net/eth0/device/vendor", "0x8086\n");
    bench
}

/// What a reload leaves of it.
fn reload(bench: &Bench) {
    bench.file(&format!("{PF}/sriov_numvfs"), "0\n");
    bench.file(&format!("{PF}/net/enp8s0f0/mtu"), "1500\n");
    bench.file(&format!("{PF}/net/enp8s0f0/flags"), "0x1002\n");
    bench.file(&format!("{VF}/net/enp8s0f0v0/mtu"), "1500\n");
    bench.file(&format!("{VF}/net/enp8s0f0v0/flags"), "0x1002\n");
}

#[test]
fn a_device_is_after_a_reload_what_it_was() {
    let bench = bench();
    for file in ["mac", "node", "port"] {
        bench.file(&format!("{PF}/sriov/0/{file}"), "");
    }
    let node = bench.node();
    let state = State::read(&node);
    assert_eq!(state.summary(), "1 device(s), 1 virtual function(s), 0 devlink parameter(s)");
    assert_eq!(State::parse(&state.to_text()), state);
    reload(&bench);
    state.restore(&node, 4);
    let text = |path: String| bench.text(&path).unwrap();
    assert_eq!(text(format!("{PF}/sriov_numvfs")), "1");
    assert_eq!(text(format!("{PF}/net/enp8s0f0/mtu")), "9000");
    assert_eq!(text(format!("{PF}/net/enp8s0f0/flags")), "0x1003");
    assert_eq!(text(format!("{VF}/net/enp8s0f0v0/mtu")), "9000");
    assert_eq!(text(format!("{VF}/net/enp8s0f0v0/flags")), "0x1003");
    assert_eq!(text(format!("{PF}/sriov/0/mac")), "02:00:00:00:00:02");
    assert_eq!(text(format!("{PF}/sriov/0/node")), "00:11:22:33:44:55:66:77");
    assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/unbind".into()), "0000:08:00.2");
    assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/bind".into()), "0000:08:00.2");
    assert_eq!(bench.log(), "INFO  restored 0000:08:00.0 with 1 virtual function(s)");
}

#[test]
fn a_device_without_virtual_functions_keeps_what_it_has() {
    let bench = bench();
    fs::remove_file(bench.at(&format!("{PF}/sriov_numvfs"))).unwrap();
    let mode = format!("{PF}/net/enp8s0f0/compat/devlink/mode");
    bench.file(&mode, "legacy");
    bench.file(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
    let node = bench.node();
    let state = State::parse(&State::read(&node).to_text());
    assert_eq!(state.summary(), "1 device(s), 0 virtual function(s), 0 devlink parameter(s)");
    reload(&bench);
    state.restore(&node, 4);
    let text = |file: &str| bench.text(&format!("{PF}/{file}")).unwrap();
    assert_eq!((text("net/enp8s0f0/mtu"), text("net/enp8s0f0/flags")), ("9000".into(), "0x1003".into()));
    assert_eq!((bench.text(&mode).unwrap(), text("sriov_numvfs")), ("switchdev".into(), "0\n".into()));
}

#[test]
fn what_sysfs_cannot_do_is_said() {
    let bench = bench();
    bench.file(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
    let state = State::read(&bench.node());
    reload(&bench);
    state.restore(&bench.node(), 4);
    let log = bench.log();
    assert!(log.contains("WARN  0000:08:00.0: this driver has no files for the addresses"), "{log}");
    assert!(log.contains("devlink dev eswitch set pci/0000:08:00.0 mode switchdev"), "{log}");
}

#[test]
fn a_switch_comes_back_with_its_parameters_and_representors() {
    let bench = bench();
    let representor = "/sys/class/net/enp8s0f0_0";
    bench.file(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
    for (file, text) in
        [("phys_switch_id", "ec0d9a"), ("phys_port_name", "pf0vf0"), ("mtu", "9000"), ("flags", "0x1003")]
    {
        bench.file(&format!("{representor}/{file}"), text);
    }
    bench.file("/sys/bus/pci/drivers/mlx5_core/0000:08:00.0/vendor", "");
    let asked = bench.at("/asked").display().to_string();
    let shown = "name flow_steering_mode\n cmode runtime value ";
    let devlink = |value: &str| {
        let script =
            format!("case \"$*\" in *show*) printf '{shown}{value}' ;; *) echo \"$*\" >> {asked} ;; esac");
        bench.program("devlink", &script);
    };
    devlink("smfs");
    let state = State::read(&bench.node());
    assert_eq!(State::parse(&state.to_text()), state);
    reload(&bench);
    bench.file(&format!("{representor}/mtu"), "1500");
    bench.file(&format!("{representor}/flags"), "0x1002");
    devlink("dmfs");
    state.restore(&bench.node(), 4);
    let wanted = "dev param set pci/0000:08:00.0 name flow_steering_mode value smfs cmode runtime\n\
                  dev eswitch set pci/0000:08:00.0 mode switchdev\n";
    assert_eq!(bench.text("/asked").unwrap(), wanted);
    assert_eq!(bench.text(&format!("{representor}/mtu")).unwrap(), "9000");
    assert_eq!(bench.text(&format!("{representor}/flags")).unwrap(), "0x1003");
}

#[test]
fn a_device_that_does_not_come_up_is_waited_for_and_said() {
    let bench = bench();
    let state = State::read(&bench.node());
    fs::remove_dir_all(bench.at(&format!("{PF}/net"))).unwrap();
    state.restore(&bench.node(), 2);
    assert_eq!(bench.kernel.pauses.get(), 20);
    assert!(bench.log().contains("WARN  0000:08:00.0 has no network interface"));
}

#[test]
fn text_of_another_form_is_left_out() {
    assert!(State::parse("physical ../../x true 1500 false\nvirtual 0000:08:00.2 true 1 - -\n").is_empty());
}
