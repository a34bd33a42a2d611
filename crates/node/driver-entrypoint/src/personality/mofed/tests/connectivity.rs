//! A `mofed` container keeps its drivers only once the API servers answer with them.

use std::{fs, os::unix::fs::symlink};

use super::{network, safety::uplink, *};

const RECORD: &str = "/run/mellanox/drivers/.api-servers";

/// Allows the replacement under the uplink.
const ALLOWED: (&str, &str) = ("ALLOW_DISRUPTION", "uplink");

const NO_ANSWER: &str =
    "the API server at 10.0.0.9:6443 did not answer within 120 s after the drivers were replaced";

/// A node with a connection to the API server by the interface of `mlx5_core`, and with settings of the device.
fn connected() -> Bench {
    let bench = bench();
    network::device(&bench);
    uplink(&bench);
    bench.write("/proc/1/net/tcp", "head\n0: 0200000A:A000 0900000A:192B 01 0:0 0:0 0 0 0 5 1\n");
    bench
}

/// Drivers of the host, without the dependency that the image's had.
fn host_drivers(bench: &Bench) -> Vec<String> {
    bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect()
}

fn assert_restored(bench: &Bench, before: &[String]) {
    assert_eq!(host_drivers(bench), before, "{}", bench.log());
    assert_eq!(bench.read(network::NUMBER).as_deref(), Some("1"), "{}", bench.log());
    assert_eq!((bench.read(network::SAVED), bench.read(RECORD)), (None, None));
    assert_eq!(blacklists(bench), Vec::<String>::new());
}

/// Kills a container while it waits for the API server, which does not answer with the image's driver.
fn kill_while_waiting(bench: &Bench) {
    bench.kernel.without_link.borrow_mut().push("image-mlx5_core".to_owned());
    bench.kernel.at_pause.replace(Some(Box::new(|| std::panic::panic_any(Killed))));
    let killed = catch_unwind(AssertUnwindSafe(|| run_container(bench, &settings(&[ALLOWED]), || {})));
    assert!(killed.is_err());
    bench.kernel.at_pause.replace(None);
}

#[test]
fn drivers_that_reach_the_api_server_stay() {
    let bench = connected();
    run_container(&bench, &settings(&[ALLOWED]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    assert!(bench.log().contains("waiting for the API server at 10.0.0.9:6443"), "{}", bench.log());
    assert_eq!(bench.read(RECORD), None);
}

#[test]
fn drivers_without_a_link_make_way_for_the_hosts_and_are_not_tried_again() {
    let bench = connected();
    let before = host_drivers(&bench);
    bench.kernel.without_link.borrow_mut().push("image-mlx5_core".to_owned());
    let refusal = refusal(&bench, &[ALLOWED]);
    assert!(refusal.starts_with(NO_ANSWER), "{refusal}");
    assert_restored(&bench, &before);
    bench.calls();
    let again = super::refusal(&bench, &[ALLOWED]);
    assert!(
        again.starts_with("this image's drivers failed on this node, and are not tried again"),
        "{again}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
}

/// The kubelet connects to another replica of the control plane while the first one restarts.
#[test]
fn drivers_that_reach_another_api_server_stay() {
    let bench = connected();
    let table = bench.at("/proc/1/net/tcp");
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
        kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
        fs::write(&table, "head\n0: 0200000A:A000 0800000A:192B 01 0:0 0:0 0 0 0 5 1\n").unwrap();
    })));
    run_container(&bench, &settings(&[ALLOWED]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    let log = bench.log();
    assert!(log.contains("10.0.0.9:6443 did not answer within 120 s"), "{log}");
    assert!(log.contains("; but other API servers do: 10.0.0.8:6443"), "{log}");
    assert_eq!((bench.read(RECORD), bench.read("/run/mellanox/drivers/.failed")), (None, None));
}

/// Adds a connection to a second API server, and silences one server during the replacement.
fn silence(bench: &Bench, second: &str, silent: &'static str) {
    let first = "0: 0200000A:A000 0900000A:192B 01 0:0 0:0 0 0 0 5 1";
    bench.write(
        "/proc/1/net/tcp",
        &format!("head\n{first}\n1: 0200000A:A001 {second}:192B 01 0:0 0:0 0 0 0 6 1\n"),
    );
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
        kernel.silent_servers.borrow_mut().push(silent.parse().unwrap());
    })));
}

/// A replica of the control plane restarts, and takes longer than the time limit.
#[test]
fn one_of_two_api_servers_is_enough() {
    let bench = connected();
    silence(&bench, "0800000A", "10.0.0.9:6443");
    run_container(&bench, &settings(&[ALLOWED]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    let log = bench.log();
    assert!(log.contains("WARN  the API server at 10.0.0.9:6443 does not answer"), "{log}");
    assert!(log.contains("; but other API servers do: 10.0.0.8:6443"), "{log}");
    assert_eq!((bench.read(RECORD), bench.read("/run/mellanox/drivers/.failed")), (None, None));
}

#[test]
fn one_dead_uplink_of_two_undoes_the_replacement() {
    let bench = connected();
    let before = host_drivers(&bench);
    let driver = bench.at("/sys/class/net/ens2/device/driver");
    fs::create_dir_all(&driver).unwrap();
    symlink("/sys/module/mlx5_core", driver.join("module")).unwrap();
    let routes = bench.read("/proc/1/net/route").unwrap();
    let route = "ens2\t0001000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    bench.write("/proc/1/net/route", &format!("{routes}{route}"));
    silence(&bench, "0901000A", "10.0.1.9:6443");
    let refusal = refusal(&bench, &[ALLOWED]);
    assert!(refusal.starts_with("the API server at 10.0.1.9:6443 did not answer"), "{refusal}");
    assert_eq!(host_drivers(&bench), before, "{}", bench.log());
}

/// A container that is killed while it waits leaves the decision to the next one.
#[test]
fn a_killed_container_does_not_make_the_drivers_stay() {
    for has_link in [false, true] {
        let bench = connected();
        let before = host_drivers(&bench);
        kill_while_waiting(&bench);
        assert_eq!(bench.loaded_versions(), OURS);
        assert_eq!(bench.read(RECORD).as_deref(), Some("10.0.0.9:6443"));
        if has_link {
            bench.kernel.without_link.borrow_mut().clear();
            run_container(&bench, &settings(&[]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
            assert_eq!(bench.read(RECORD), None);
        } else {
            let refusal = refusal(&bench, &[]);
            assert!(refusal.starts_with(NO_ANSWER), "{refusal}");
            assert_restored(&bench, &before);
        }
    }
}

/// A pod that is deleted while the API server does not answer.
#[test]
fn a_container_that_ends_while_it_waits_restores_the_hosts_drivers() {
    let bench = connected();
    let before = host_drivers(&bench);
    // A start asks for signals before it replaces the drivers, so this is the wait of the next container.
    kill_while_waiting(&bench);
    let error = run(&bench.node(), &settings(&[]), &mut EndsNow).unwrap_err();
    assert_eq!(error.to_string(), "received SIGTERM before the drivers were ready");
    assert_restored(&bench, &before);
    // It is no failure of the drivers.
    bench.kernel.without_link.borrow_mut().clear();
    run_container(&bench, &settings(&[ALLOWED]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
}

#[test]
fn only_servers_that_answered_before_are_waited_for() {
    let bench = connected();
    bench.kernel.without_link.borrow_mut().extend(["host-mlx5_core", "image-mlx5_core"].map(str::to_owned));
    run_container(&bench, &settings(&[ALLOWED]), || {}).unwrap();
    let log = bench.log();
    assert!(
        log.contains("10.0.0.9:6443 does not answer now") && !log.contains("waiting for the API"),
        "{log}"
    );
    // The time limit 0 disables the check.
    let bench = connected();
    bench.kernel.without_link.borrow_mut().push("image-mlx5_core".to_owned());
    run_container(&bench, &settings(&[ALLOWED, ("API_SERVER_TIMEOUT_SEC", "0")]), || {}).unwrap();
    // Also for a container that finds the record of another one.
    let bench = connected();
    kill_while_waiting(&bench);
    run_container(&bench, &settings(&[("API_SERVER_TIMEOUT_SEC", "0")]), || {}).unwrap();
    assert_eq!(bench.read(RECORD), None);
}
