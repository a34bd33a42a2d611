mod namespace;

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

/// A device with one virtual function, as sysfs shows it.
fn bench() -> Bench {
    let bench = Bench::new();
    for (device, name, mac) in
        [(PF, "enp8s0f0", "00:00:00:00:00:01"), (VF, "enp8s0f0v0", "02:00:00:00:00:02")]
    {
        let interface = format!("{device}/net/{name}");
        bench.write(&format!("{device}/vendor"), "0x15b3\n");
        bench.write(&format!("{interface}/address"), &format!("{mac}\n"));
        bench.write(&format!("{interface}/flags"), "0x1003\n");
        bench.write(&format!("{interface}/mtu"), "9000\n");
        link(&bench, device, &format!("{interface}/device"));
        link(&bench, &interface, &format!("/sys/class/net/{name}"));
        link(&bench, "/sys/bus/pci/drivers/mlx5_core", &format!("{device}/driver"));
        let pci = device.rsplit('/').next().unwrap();
        link(&bench, device, &format!("/sys/bus/pci/drivers/mlx5_core/{pci}"));
    }
    bench.write(&format!("{PF}/sriov_numvfs"), "1\n");
    bench.write(&format!("{VF}/infiniband/mlx5_2/node_guid"), "0011:2233:4455:6677\n");
    bench.write("/sys/bus/pci/drivers/mlx5_core/bind", "");
    bench.write("/sys/bus/pci/drivers/mlx5_core/unbind", "");
    link(&bench, VF, &format!("{PF}/virtfn0"));
    link(&bench, PF, &format!("{VF}/physfn"));
    // A device of another driver.
    bench.write("/sys/bus/pci/drivers/ice/0000:09:00.0/net/eth0/mtu", "1500\n");
    bench
}

const REPRESENTOR: &str = "/sys/class/net/a_representor";

/// Creates the representor of the virtual function, as in switchdev mode. Its directory is below the physical
/// function's device.
fn representor(bench: &Bench) {
    bench.write(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
    let interface = format!("{PF}/net/a_representor");
    for (file, text) in
        [("phys_switch_id", "ec0d9a"), ("phys_port_name", "pf0vf0"), ("mtu", "9000"), ("flags", "0x1003")]
    {
        bench.write(&format!("{interface}/{file}"), text);
    }
    link(bench, &interface, REPRESENTOR);
}

/// A `devlink` program that shows this mode and a parameter's value, and records the requested changes.
fn devlink(bench: &Bench, mode: &str, value: &str) {
    let asked = bench.at("/asked").display().to_string();
    let shown = format!("{DEVICE}:\n name enable_x type generic\n cmode runtime value {value}");
    let script = format!(
        "case \"$*\" in *eswitch\\ show*) echo {DEVICE}: mode {mode} inline-mode none ;;\n\
         'dev param show') printf '{shown}' ;; *) echo \"$*\" >> {asked} ;; esac"
    );
    bench.program("devlink", &script);
}

const DEVICE: &str = "pci/0000:08:00.0";
const FRESH: &str = "/run/mellanox/drivers/.devlink";

fn saved(bench: &Bench) -> NetworkState {
    NetworkState::read(&bench.node(), FRESH)
}

/// Changes the state as a reload of the driver does.
fn reload(bench: &Bench) {
    bench.write(&format!("{PF}/sriov_numvfs"), "0\n");
    bench.write(&format!("{PF}/net/enp8s0f0/mtu"), "1500\n");
    bench.write(&format!("{PF}/net/enp8s0f0/flags"), "0x1002\n");
    bench.write(&format!("{VF}/net/enp8s0f0v0/mtu"), "1500\n");
    bench.write(&format!("{VF}/net/enp8s0f0v0/flags"), "0x1002\n");
}

#[test]
fn a_device_is_restored_after_a_reload() {
    let bench = bench();
    for file in ["mac", "node", "port"] {
        bench.write(&format!("{PF}/sriov/0/{file}"), "");
    }
    let node = bench.node();
    let state = saved(&bench);
    assert_eq!(state.summary(), "1 device(s), 1 virtual function(s), 0 devlink parameter(s)");
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    reload(&bench);
    state.restore(&node, 4, FRESH);
    let text = |path: String| bench.read(&path).unwrap();
    assert_eq!(text(format!("{PF}/sriov_numvfs")), "1");
    assert_eq!(text(format!("{PF}/net/enp8s0f0/mtu")), "9000");
    assert_eq!(text(format!("{PF}/net/enp8s0f0/flags")), "0x1003");
    assert_eq!(text(format!("{VF}/net/enp8s0f0v0/mtu")), "9000");
    assert_eq!(text(format!("{VF}/net/enp8s0f0v0/flags")), "0x1003");
    assert_eq!(text(format!("{PF}/sriov/0/mac")), "02:00:00:00:00:02");
    assert_eq!(text(format!("{PF}/sriov/0/node")), "00:11:22:33:44:55:66:77");
    assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/unbind".into()), "0000:08:00.2");
    assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/bind".into()), "0000:08:00.2");
    assert_eq!(bench.log(), "INFO  restored pci/0000:08:00.0 with 1 virtual function(s)");
}

#[test]
fn a_device_without_virtual_functions_is_restored() {
    let bench = bench();
    fs::remove_file(bench.at(&format!("{PF}/sriov_numvfs"))).unwrap();
    let mode = format!("{PF}/net/enp8s0f0/compat/devlink/mode");
    bench.write(&mode, "switchdev\n");
    let node = bench.node();
    let state = NetworkState::parse(&saved(&bench).to_text());
    assert_eq!(state.summary(), "1 device(s), 0 virtual function(s), 0 devlink parameter(s)");
    reload(&bench);
    bench.write(&mode, "legacy");
    state.restore(&node, 4, FRESH);
    let text = |file: &str| bench.read(&format!("{PF}/{file}")).unwrap();
    assert_eq!((text("net/enp8s0f0/mtu"), text("net/enp8s0f0/flags")), ("9000".into(), "0x1003".into()));
    assert_eq!((bench.read(&mode).unwrap(), text("sriov_numvfs")), ("switchdev".into(), "0\n".into()));
}

#[test]
fn settings_that_sysfs_cannot_restore_are_logged() {
    let bench = bench();
    representor(&bench);
    let state = saved(&bench);
    reload(&bench);
    state.restore(&bench.node(), 4, FRESH);
    let log = bench.log();
    assert!(log.contains("WARN  pci/0000:08:00.0: this driver has no files for the addresses"), "{log}");
    assert!(log.contains("devlink dev eswitch set pci/0000:08:00.0 mode switchdev"), "{log}");
}

/// Physical functions of mlx5 show their switch ID in both modes.
#[test]
fn a_switch_in_legacy_mode_stays_in_it() {
    let bench = bench();
    bench.write(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
    assert!(!saved(&bench).physical[0].switchdev);
    representor(&bench);
    assert!(saved(&bench).physical[0].switchdev);
    devlink(&bench, "legacy", "true");
    assert!(!saved(&bench).physical[0].switchdev);
}

/// Values present when the driver was loaded do not count as settings until the driver is loaded again.
#[test]
fn fresh_parameters_are_known_until_the_driver_is_unloaded() {
    let bench = bench();
    let module = "/sys/module/mlx5_core/srcversion";
    bench.write(module, "");
    devlink(&bench, "legacy", "true");
    let values = || saved(&bench).parameters.into_iter().map(|found| found.value).collect::<Vec<_>>();
    assert_eq!(values(), ["true"], "the user may have set the value");
    NetworkState::default().restore(&bench.node(), 4, FRESH);
    assert_eq!(values(), [""; 0]);
    devlink(&bench, "legacy", "false");
    assert_eq!(values(), ["false"]);
    // The directory of the previous load still exists, so its inode number is not reused.
    fs::rename(bench.at("/sys/module/mlx5_core"), bench.at("/sys/gone")).unwrap();
    bench.write(module, "");
    devlink(&bench, "legacy", "true");
    assert_eq!(values(), ["true"]);
}

/// A container that fails before it unloads the driver leaves its saved state behind. That state must not overwrite
/// later changes.
#[test]
fn saved_state_is_ignored_while_the_driver_stays_loaded() {
    const KEPT: &str = "/run/mellanox/drivers/.sriov";
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    let state = saved(&bench);
    state.save(&bench.node(), KEPT).unwrap();
    assert_eq!(NetworkState::load_if_unloaded(&bench.node(), KEPT), None);
    fs::rename(bench.at("/sys/module/mlx5_core"), bench.at("/sys/gone")).unwrap();
    assert_eq!(NetworkState::load_if_unloaded(&bench.node(), KEPT).as_ref(), Some(&state));
    bench.write("/sys/module/mlx5_core/srcversion", "");
    assert_eq!(NetworkState::load_if_unloaded(&bench.node(), KEPT), Some(state));
}

#[test]
fn a_driver_that_is_reloaded_during_the_read_is_restored() {
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    let [module, gone] =
        ["/sys/module/mlx5_core", "/sys/gone"].map(|path| bench.at(path).display().to_string());
    bench.program("ip", &format!("[ -e {gone} ] || {{ mv {module} {gone}; mkdir {module}; }}"));
    let state = saved(&bench);
    assert!(bench.at("/sys/gone").exists() && !state.are_drivers_loaded(&bench.node()));
}

#[test]
fn containers_of_0_2_0_can_read_the_load_of_mlx5_core() {
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    let load = module_load(&bench.node(), "mlx5_core").unwrap();
    let (state, expected) = (saved(&bench), format!("load {load}\n"));
    assert!(state.to_text().starts_with(&expected), "{}", state.to_text());
    assert_eq!(NetworkState::parse(&state.to_text()), state);
}

/// A node with devices of two vendors, whose guard swaps the other driver.
#[test]
fn a_reload_of_another_driver_is_seen_while_mlx5_core_stays_loaded() {
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    link(&bench, PF, "/sys/module/ice/drivers/pci:ice/0000:08:00.0");
    let modules = ["ib_core", "ice"].map(str::to_owned);
    let state = NetworkState::read_of_modules(&bench.node(), FRESH, &modules);
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    reload(&bench);
    fs::rename(bench.at("/sys/module/ice"), bench.at("/sys/gone")).unwrap();
    bench.write("/sys/module/ice/srcversion", "");
    state.restore(&bench.node(), 1, FRESH);
    assert_eq!(bench.read(&format!("{PF}/sriov_numvfs")).as_deref(), Some("1"), "{}", bench.log());
}

/// The guard's time limit passes meanwhile.
#[test]
fn missing_interfaces_of_a_driver_that_stayed_loaded_share_one_wait() {
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    let state = saved(&bench);
    for device in [PF, VF] {
        fs::remove_dir_all(bench.at(&format!("{device}/net"))).unwrap();
    }
    state.restore(&bench.node(), 2, FRESH);
    assert_eq!(bench.kernel.pauses.get(), 20, "{}", bench.log());
}

/// A device may have many virtual functions, whose interfaces appear one after the other.
#[test]
fn each_interface_that_appears_extends_the_wait() {
    let bench = bench();
    bench.write("/sys/module/mlx5_core/srcversion", "");
    let state = saved(&bench);
    reload(&bench);
    let places =
        [VF, PF].map(|device| (bench.at(&format!("{device}/net")), bench.at(&format!("{device}/gone"))));
    for (at, gone) in &places {
        fs::rename(at, gone).unwrap();
    }
    let (mut pauses, mut places) = (0, places.into_iter());
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        pauses += 1;
        if pauses % 8 == 0
            && let Some((at, gone)) = places.next()
        {
            fs::rename(gone, at).unwrap();
        }
    })));
    state.restore(&bench.node(), 1, FRESH);
    assert_eq!(bench.read(&format!("{PF}/net/enp8s0f0/mtu")).as_deref(), Some("9000"), "{}", bench.log());
}

#[test]
fn a_switch_is_restored_with_its_parameters_and_representors() {
    let bench = bench();
    representor(&bench);
    devlink(&bench, "switchdev", "true");
    let state = saved(&bench);
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    reload(&bench);
    bench.write(&format!("{REPRESENTOR}/mtu"), "1500");
    bench.write(&format!("{REPRESENTOR}/flags"), "0x1002");
    devlink(&bench, "legacy", "false");
    state.restore(&bench.node(), 4, FRESH);
    let wanted = "dev param set pci/0000:08:00.0 name enable_x value true cmode runtime\n\
                  dev eswitch set pci/0000:08:00.0 mode switchdev\n";
    assert_eq!(bench.read("/asked").unwrap(), wanted);
    assert_eq!(bench.read(&format!("{REPRESENTOR}/mtu")).unwrap(), "9000");
    assert_eq!(bench.read(&format!("{REPRESENTOR}/flags")).unwrap(), "0x1003");
}

#[test]
fn a_missing_interface_is_waited_for_and_logged() {
    let bench = bench();
    let state = saved(&bench);
    fs::remove_dir_all(bench.at(&format!("{PF}/net"))).unwrap();
    state.restore(&bench.node(), 2, FRESH);
    assert_eq!(bench.kernel.pauses.get(), 20);
    assert!(bench.log().contains("WARN  pci/0000:08:00.0 has no network interface"));
}

/// InfiniBand without IPoIB, or an interface in a pod's network namespace.
#[test]
fn virtual_functions_do_not_need_an_interface() {
    let bench = bench();
    bench.write(&format!("{PF}/sriov/0/mac"), "");
    fs::remove_dir_all(bench.at(&format!("{PF}/net"))).unwrap();
    let state = saved(&bench);
    assert_eq!(state.summary(), "1 device(s), 1 virtual function(s), 0 devlink parameter(s)");
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    bench.write(&format!("{PF}/sriov_numvfs"), "0\n");
    state.restore(&bench.node(), 4, FRESH);
    assert_eq!(bench.read(&format!("{PF}/sriov_numvfs")).unwrap(), "1");
    assert_eq!(bench.read(&format!("{PF}/sriov/0/mac")).unwrap(), "02:00:00:00:00:02");
    assert_eq!(bench.read("/sys/bus/pci/drivers/mlx5_core/bind").unwrap(), "0000:08:00.2");
    assert_eq!(bench.log(), "INFO  restored pci/0000:08:00.0 with 1 virtual function(s)");
    assert_eq!(bench.kernel.pauses.get(), 0);
}

/// Old kernels cannot rename an interface that is up.
#[test]
fn interfaces_are_set_up_when_udev_has_named_them() {
    let bench = bench();
    bench.write("/run/udev/control", "");
    for (interface, number) in [(format!("{PF}/net/enp8s0f0"), 7), (format!("{VF}/net/enp8s0f0v0"), 8)] {
        bench.write(&format!("{interface}/ifindex"), &format!("{number}\n"));
        bench.write(&format!("/run/udev/data/n{number}"), "E:ID_NET_NAME=x\n");
    }
    let state = saved(&bench);
    reload(&bench);
    bench.write("/run/udev/data/n7", "E:ID_RENAMING=1\n");
    let [before, after] = ["eth0", "enp8s0f0"].map(|name| bench.at(&format!("{PF}/net/{name}")));
    fs::rename(&after, &before).unwrap();
    let data = bench.at("/run/udev/data/n7");
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        if flags(&before) & 1 == 0 && before.exists() {
            fs::rename(&before, &after).unwrap();
        }
        fs::write(&data, "E:ID_NET_NAME=enp8s0f0\n").unwrap();
    })));
    state.restore(&bench.node(), 4, FRESH);
    assert_eq!(bench.kernel.pauses.get(), 1);
    let text = |file: &str| bench.read(&format!("{PF}/net/enp8s0f0/{file}"));
    assert_eq!((text("mtu").as_deref(), text("flags").as_deref()), (Some("9000"), Some("0x1003")));
}

#[test]
fn text_in_another_format_is_ignored() {
    assert!(NetworkState::parse("physical pci/../../x true 1500 false 1\nphysical pci true 1500 false 1\nvirtual 0000:08:00.2 true 1 - -\n").is_empty());
}

/// An `ip` program whose node has these addresses and routes, and which records the requested changes.
fn ip(bench: &Bench, addresses: &str, routes: &str) {
    bench.write("/addresses", addresses);
    bench.write("/routes", routes);
    let [addresses, routes, asked] =
        ["/addresses", "/routes", "/asked"].map(|path| bench.at(path).display().to_string());
    bench.program(
        "ip",
        &format!(
            "case \"$*\" in '-o address show') cat {addresses} ;; '-o -4 route show table all') cat {routes} ;; \
             *show*) ;; *) echo \"$*\" >> {asked} ;; esac"
        ),
    );
}

const ADDRESSES: &str = "\
2: enp8s0f0    inet 10.9.0.2/24 brd 10.9.0.255 scope global enp8s0f0\\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet 10.8.0.9/24 scope global dynamic enp8s0f0\\       valid_lft 300sec preferred_lft 300sec
2: enp8s0f0    inet6 fe80::1/64 scope link \\       valid_lft forever preferred_lft forever
";
const ROUTES: &str = "\
default via 10.9.0.1 dev enp8s0f0 proto static metric 100 linkdown
10.8.0.0/24 dev enp8s0f0 proto dhcp scope link src 10.8.0.9
10.9.0.0/24 dev enp8s0f0 proto kernel scope link src 10.9.0.2
10.7.0.0/24 dev eth1 proto static scope link
";

#[test]
fn settings_that_no_network_manager_restores_are_restored() {
    let bench = bench();
    bench.write(&format!("{PF}/sriov/0/mac"), "");
    ip(&bench, ADDRESSES, ROUTES);
    bench.write("/sys/class/net/bond0/bonding/slaves", "enp8s0f0\n");
    link(&bench, "/sys/class/net/bond0", &format!("{PF}/net/enp8s0f0/master"));
    bench.write(
        "/proc/1/net/vlan/config",
        "VLAN Dev name | VLAN ID\nName-Type: VLAN_NAME_TYPE_RAW_PLUS_VID_NO_PAD\nenp8s0f0.7 | 7 | enp8s0f0\neth1.8 | 8 | eth1\n",
    );
    let state = saved(&bench);
    let text = state.to_text();
    assert_eq!(NetworkState::parse(&text), state, "{text}");
    ip(&bench, "", "");
    bench.write("/proc/1/net/vlan/config", "");
    fs::remove_file(bench.at(&format!("{PF}/net/enp8s0f0/master"))).unwrap();
    reload(&bench);
    state.restore(&bench.node(), 1, "/run/fresh");
    assert_eq!(bench.read("/sys/class/net/bond0/bonding/slaves").as_deref(), Some("+enp8s0f0"));
    assert_eq!(
        bench.read("/asked").unwrap(),
        "link add link enp8s0f0 name enp8s0f0.7 type vlan id 7\nlink set enp8s0f0.7 up\n\
         address replace 10.9.0.2/24 brd 10.9.0.255 dev enp8s0f0\n\
         -4 route replace default via 10.9.0.1 proto static metric 100 dev enp8s0f0\n"
    );
    let log = bench.log();
    assert!(log.contains("added enp8s0f0 to bond0 again, because no network manager did"), "{log}");
}

/// A DHCP server would give the node another address.
#[test]
fn a_bond_without_ports_gets_its_address_again() {
    let bench = bench();
    ip(&bench, "", "");
    bench.write("/sys/class/net/bond0/bonding/slaves", "enp8s0f0\n");
    bench.write("/sys/class/net/bond0/address", "02:00:00:00:00:01\n");
    link(&bench, "/sys/class/net/bond0", &format!("{PF}/net/enp8s0f0/master"));
    let state = saved(&bench);
    assert_eq!(NetworkState::parse(&state.to_text()), state);

    bench.write("/sys/class/net/bond0/address", "02:00:00:00:00:99\n");
    state.keep_bond_addresses(&bench.node());
    assert_eq!(bench.read("/asked"), None, "it has a port of another driver");
    bench.write("/sys/class/net/bond0/bonding/slaves", "\n");
    state.keep_bond_addresses(&bench.node());
    assert_eq!(bench.read("/asked").unwrap(), "link set dev bond0 address 02:00:00:00:00:01\n");
    assert!(
        bench.log().contains("bond0 keeps its address 02:00:00:00:00:01 without ports"),
        "{}",
        bench.log()
    );

    // A network manager could not add an interface that is up.
    reload(&bench);
    state.restore(&bench.node(), 0, FRESH);
    assert_eq!(
        bench.read(&format!("{PF}/net/enp8s0f0/flags")).as_deref(),
        Some("0x1002\n"),
        "{}",
        bench.log()
    );
}

#[test]
fn settings_that_a_network_manager_restores_are_left_to_it() {
    let bench = bench();
    bench.write(&format!("{PF}/sriov/0/mac"), "");
    ip(&bench, ADDRESSES, ROUTES);
    let state = saved(&bench);
    reload(&bench);
    // It adds the same addresses and routes, with another metric.
    ip(&bench, ADDRESSES, &ROUTES.replace("metric 100", "metric 5"));
    state.restore(&bench.node(), 1, "/run/fresh");
    assert_eq!(bench.read("/asked"), None, "{}", bench.log());
}

/// Another node may have the address by now.
#[test]
fn virtual_addresses_are_left_to_the_program_that_moves_them() {
    let bench = bench();
    bench.write(&format!("{PF}/sriov/0/mac"), "");
    let addresses = "\
2: enp8s0f0    inet 10.9.0.2/24 brd 10.9.0.255 scope global dynamic enp8s0f0\\       valid_lft 300sec preferred_lft 300sec
2: enp8s0f0    inet 10.9.0.3/24 scope global secondary enp8s0f0\\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet 10.9.0.100/32 scope global enp8s0f0\\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet 10.9.0.101/24 scope global secondary proto 0x12 enp8s0f0\\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet 192.0.2.7/32 scope global enp8s0f0\\       valid_lft forever preferred_lft forever
3: eth1    inet 192.0.2.1/24 scope global eth1\\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet6 2001:db8::2/64 scope global \\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet6 2001:db8::100/128 scope global \\       valid_lft forever preferred_lft forever
2: enp8s0f0    inet6 2001:db8::42/128 scope global dynamic noprefixroute \\       valid_lft 300sec preferred_lft 300sec
";
    ip(&bench, addresses, "");
    let state = saved(&bench);
    ip(&bench, "", "");
    reload(&bench);
    state.restore(&bench.node(), 1, FRESH);
    let asked = ["10.9.0.3/24", "192.0.2.7/32", "2001:db8::2/64"]
        .map(|address| format!("address replace {address} dev enp8s0f0\n"));
    assert_eq!(bench.read("/asked").unwrap(), asked.concat());
    for address in ["10.9.0.100/32", "10.9.0.101/24", "2001:db8::100/128"] {
        let left = format!("{address} of enp8s0f0 is left to the program that moves it between nodes");
        assert!(bench.log().contains(&left), "{}", bench.log());
    }
    assert!(!bench.log().contains("2001:db8::42"), "the DHCP client's: {}", bench.log());
}

#[test]
fn addresses_are_set_by_ip_where_the_driver_has_no_files() {
    let bench = bench();
    ip(&bench, "", "");
    let state = saved(&bench);
    reload(&bench);
    state.restore(&bench.node(), 1, FRESH);
    assert_eq!(bench.read("/asked").as_deref(), Some("link set dev enp8s0f0 vf 0 mac 02:00:00:00:00:02\n"));
    assert!(!bench.log().contains("WARN"), "{}", bench.log());
}

/// The mode limits the MTU. IPoIB interfaces of other partitions are below the same device.
#[test]
fn the_mode_of_ipoib_is_restored() {
    let bench = bench();
    ip(&bench, "", "");
    let interface = format!("{PF}/net/enp8s0f0");
    let child = format!("{PF}/net/a.8001");
    bench.write(&format!("{child}/type"), "32\n");
    bench.write(&format!("{child}/parent"), "enp8s0f0\n");
    bench.write(&format!("{interface}/type"), "32\n");
    bench.write(&format!("{interface}/mode"), "connected\n");
    let state = saved(&bench);
    reload(&bench);
    bench.write(&format!("{interface}/mode"), "datagram\n");
    state.restore(&bench.node(), 1, FRESH);
    assert_eq!(bench.read(&format!("{interface}/mode")).as_deref(), Some("connected"));
    assert_eq!(bench.read(&format!("{interface}/mtu")).as_deref(), Some("9000"));
}

/// Functions of `vfio-pci` have no interface whose address could be read.
#[test]
fn settings_of_virtual_functions_are_restored() {
    const FUNCTION: &str = "    vf 0     link/ether 02:00:00:00:00:07 brd ff:ff:ff:ff:ff:ff, vlan 5, qos 3, vlan protocol 802.1ad, \
                            max_tx_rate 100Mbps, min_tx_rate 10Mbps, spoof checking off, link-state enable, trust on, query_rss off";
    const FRESH_FUNCTION: &str = "    vf 0     link/ether 00:00:00:00:00:00 brd ff:ff:ff:ff:ff:ff, spoof checking on, \
                                  link-state auto, trust off, query_rss off";
    let bench = bench();
    let program = |shown: &str| {
        let asked = bench.at("/asked").display().to_string();
        bench.program(
            "ip",
            &format!(
                "case \"$*\" in 'link show dev enp8s0f0') echo '{shown}' ;; *show*) ;; *trust*) echo no >&2; exit 1 ;; \
                 *) echo \"$*\" >> {asked} ;; esac"
            ),
        );
    };
    program(FUNCTION);
    for directory in ["net", "infiniband"] {
        fs::remove_dir_all(bench.at(&format!("{VF}/{directory}"))).unwrap();
    }
    let state = saved(&bench);
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    reload(&bench);
    program(FRESH_FUNCTION);
    state.restore(&bench.node(), 1, FRESH);
    let set = "link set dev enp8s0f0 vf 0";
    assert_eq!(
        bench.read("/asked").unwrap(),
        [
            "mac 02:00:00:00:00:07",
            "vlan 5 qos 3 proto 802.1ad",
            "max_tx_rate 100 min_tx_rate 10",
            "spoofchk off",
            "state enable"
        ]
        .map(|words| format!("{set} {words}\n"))
        .concat()
    );
    assert!(bench.log().contains(&format!("WARN  ip {set} trust on: no")), "{}", bench.log());
}

#[test]
fn a_function_for_virtual_machines_gets_its_driver_back() {
    let bench = bench();
    let driver = format!("{VF}/driver");
    fs::remove_file(bench.at(&driver)).unwrap();
    link(&bench, "/sys/bus/pci/drivers/vfio-pci", &driver);
    let state = saved(&bench);
    assert_eq!(NetworkState::parse(&state.to_text()), state);
    // The kernel creates the functions again, and binds them to the driver of the device.
    fs::remove_file(bench.at(&driver)).unwrap();
    link(&bench, "/sys/bus/pci/drivers/mlx5_core", &driver);
    bench.write(&format!("{VF}/driver_override"), "(null)\n");
    bench.write("/sys/bus/pci/drivers_probe", "");
    state.restore(&bench.node(), 1, FRESH);
    assert_eq!(bench.read(&format!("{VF}/driver_override")).as_deref(), Some("vfio-pci"));
    assert_eq!(bench.read("/sys/bus/pci/drivers_probe").as_deref(), Some("0000:08:00.2"));
}

#[test]
fn settings_lost_with_the_driver_are_named() {
    let bench = bench();
    assert_eq!(
        lost_settings(&bench.node()),
        [
            "addresses, routes, neighbors and the settings of virtual functions, because this image has no ip (iproute2)"
        ]
    );
    ip(&bench, "", "");
    assert_eq!(lost_settings(&bench.node()), [""; 0]);
    fs::create_dir_all(bench.at("/sys/bus/auxiliary/devices/mlx5_core.sf.4")).unwrap();
    fs::create_dir_all(bench.at("/sys/bus/auxiliary/devices/mlx5_core.eth.0")).unwrap();
    fs::create_dir_all(bench.at(&format!("{PF}/net/enp8s0f0/upper_macvlan0"))).unwrap();
    fs::create_dir_all(bench.at(&format!("{PF}/net/enp8s0f0/upper_br0"))).unwrap();
    link(&bench, "/sys/class/net/br0", &format!("{PF}/net/enp8s0f0/master"));
    for (name, file, text) in
        [("ib0", "iflink", "4\n"), ("ib0.8001", "parent", "ib0\n"), ("storage", "iflink", "4\n")]
    {
        bench.write(&format!("/sys/class/net/{name}/type"), "32\n");
        bench.write(&format!("/sys/class/net/{name}/ifindex"), if name == "ib0" { "4\n" } else { "5\n" });
        bench.write(&format!("/sys/class/net/{name}/{file}"), text);
    }
    assert_eq!(
        lost_settings(&bench.node()),
        ["1 sub-function(s)", "IPoIB interface ib0.8001", "IPoIB interface storage", "macvlan0 on enp8s0f0",]
    );
}
