//! Devices during the exchange of their driver. The kernel's netdevsim simulates the devices under the name `mlx5_core`.

use super::{LIMIT, MOFED, newest};
use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

/// Runs the image's devlink on the node.
const DEVLINK: &str = "devlink() { chroot /images/mofed /sbin/devlink \"$@\"; }\n\
                       device=netdevsim/netdevsim1\nsysfs=/sys/bus/netdevsim/devices/netdevsim1\n";

/// Returns the restored settings: parameters, mode, number of virtual functions, and each interface's MTU and flags by port.
fn facts(node: &mut Node) -> Vec<String> {
    let script = "for name in max_macs test1; do\n\
                  echo $name $(devlink dev param show $device name $name | sed -n 's/.*value //p'); done\n\
                  devlink dev eswitch show $device | sed 's/.*: mode //; s/ .*//'\n\
                  cat $sysfs/sriov_numvfs\n\
                  cd $sysfs/net; for name in *; do\n\
                  echo $(cat $name/phys_port_name) $(cat $name/mtu) $(cat $name/flags); done | sort";
    node.sh(&format!("{DEVLINK}{script}")).lines().map(str::to_owned).collect()
}

/// The node booted with one driver, and the image has another one with other defaults. After each exchange, killed ones
/// included, user settings are restored, and defaults of the previous driver are not.
#[test]
fn devices_have_after_each_exchange_of_their_driver_what_people_set() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["psample"]);
    tree.module(&ofed::netdevsim(&release).join("host/mlx5_core.ko"));
    let image = image_tree(&entrypoint());
    ofed::program(image.path(), "/sbin/devlink");
    ofed::add_other_netdevsim(image.path(), &release, &kernel);
    tree.image("mofed", image.path());
    let mut node = Node::boot(&kernel, tree);
    let spec = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");

    node.sh("modprobe mlx5_core");
    let untouched = facts(&mut node);
    assert_eq!(untouched[..4], ["max_macs 32", "test1 true", "legacy", "0"]);
    // The renamed representors sort before the device's own interface.
    let set = "devlink dev param set $device name max_macs value 16 cmode driverinit\ndevlink dev reload $device\n\
               echo 2 > $sysfs/sriov_numvfs\ndevlink dev eswitch set $device mode switchdev\n\
               cd $sysfs/net; for name in *; do case $(cat $name/phys_port_name) in pf0vf*) ip link set $name name a$name; esac; done\n\
               for name in *; do echo 1400 > $name/mtu; ip link set $name up; done\n\
               for name in *; do [ $(cat $name/phys_port_name) != pf0vf1 ] || ip link set $name down mtu 1450; done";
    node.sh(&format!("set -e\n{DEVLINK}{set}"));
    let before = facts(&mut node);
    assert_eq!(before[..4], ["max_macs 16", "test1 true", "switchdev", "2"]);
    assert_eq!(before.len(), 7, "{before:?}");

    // `test1` was true by default, and the image's driver defaults to false.
    let mut wanted = before.clone();
    wanted[1] = "test1 false".to_owned();
    let started = node.start(&spec, "mofed", &MOFED);
    node.await_startup(&started, LIMIT);
    let log = node.log(&started);
    println!("{log}");
    assert_eq!(facts(&mut node), wanted, "{log}");
    assert!(log.contains("test1 was true, and is false"), "{log}");
    assert!(log.contains("saved 1 device(s), 2 virtual function(s)"), "{log}");

    // A user sets `test1`. From here on the defaults of both drivers are recorded.
    node.sh(&format!("{DEVLINK}devlink dev param set $device name test1 value true cmode driverinit"));
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
    assert_eq!(facts(&mut node), before, "{}", node.log(&started));
    let killed = node.start(&spec, "mofed", &MOFED);
    node.kill_when(&killed, "[ ! -e /sys/module/mlx5_core ]", LIMIT);
    let started = node.start(&spec, "mofed", &MOFED);
    node.await_startup(&started, LIMIT);
    assert_eq!(facts(&mut node), before, "{}", node.log(&started));
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));

    // An attempt that fails before it unloads anything has saved settings that are stale when the next attempt starts.
    node.sh("mkdir -p /run/mellanox/drivers/.replaced.new/x");
    let failed = node.start(&spec, "mofed", &MOFED);
    assert_eq!(node.await_end(&failed), 1, "{}", node.log(&failed));
    assert!(node.succeeds("[ -e /run/mellanox/drivers/.sriov ]"), "{}", node.log(&failed));
    node.sh("rm -r /run/mellanox/drivers/.replaced.new");
    node.sh(&format!("{DEVLINK}devlink dev param set $device name max_macs value 24 cmode driverinit"));
    let mut wanted = before;
    wanted[0] = "max_macs 24".to_owned();
    let started = node.start(&spec, "mofed", &MOFED);
    node.await_startup(&started, LIMIT);
    assert_eq!(facts(&mut node), wanted, "{}", node.log(&started));
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
    assert_eq!(facts(&mut node), wanted, "{}", node.log(&started));
}
