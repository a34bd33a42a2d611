//! What a swap ends with: the phases of the way back, what they report, and the reboot.

use super::*;
use crate::kernel::Kernel as _;

/// Brings up the link of the new module as soon as the guard is in a phase.
fn bring_link_up_in(bench: &Rc<Bench>, phase: &'static str) {
    bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
    let other = Rc::clone(bench);
    bench.kernel.at_connect.replace(Some(Box::new(move || {
        let journal = other.read(&format!("{REQUEST}/journal")).unwrap_or_default();
        if journal.contains(phase) {
            other.kernel.without_link.borrow_mut().clear();
        }
    })));
}

/// A process opens a device of the new driver, so that it cannot be unloaded, and its link comes up too late.
#[test]
fn new_modules_that_stay_are_not_reported_as_undone() {
    let bench = bench();
    let used = Rc::clone(&bench);
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| {
        if name == "acme" {
            used.kernel.references.borrow_mut().insert("acme".to_owned(), 1);
        }
    })));
    bring_link_up_in(&bench, "undo-confirming");
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    let state = "the new module acme stays loaded";
    let expected =
        format!("the guard could not undo the swap: {state}; the swap failed: the API server at 10.0.0.9");
    assert!(error.to_string().starts_with(&expected), "{error}\n{}", bench.log());
    assert!(!error.is_transient());
    let log = bench.log();
    assert!(log.contains(&format!("the swap has ended: partly-undone: {state}")), "{log}");
    assert_eq!(bench.loaded_versions()[0], "image-acme", "{log}");
    let again = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    let expected =
        "this image's drivers failed on this node, and are not tried again: the swap failed: the API";
    assert!(again.starts_with(expected), "the state may be another one by now: {again}");
}

/// The process ends before the container does, which restores the host's modules.
#[test]
fn a_state_that_has_passed_is_not_reported() {
    let bench = bench();
    bench.kernel.load_errors.borrow_mut().insert("acme_net of the host".to_owned(), Errno::NODEV);
    bench.kernel.load_errors.borrow_mut().insert("acme of the image".to_owned(), Errno::NOEXEC);
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    let mut guard = bench.kernel.at_pause.take().unwrap();
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        guard();
        other.kernel.load_errors.borrow_mut().clear();
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the swap failed: load acme"), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

#[test]
fn old_modules_that_do_not_load_are_named() {
    let bench = bench();
    bench.kernel.load_errors.borrow_mut().insert("acme_net of the host".to_owned(), Errno::NODEV);
    bench.kernel.load_errors.borrow_mut().insert("acme of the image".to_owned(), Errno::NOEXEC);
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    let expected =
        "the guard could not undo the swap: module acme_net is not loaded; the swap failed: load acme";
    assert!(error.starts_with(expected), "{error}");
}

/// Neither driver has a link.
#[test]
fn a_node_that_is_cut_off_is_reported_as_such_and_not_tried_again() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
        kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
        assert_eq!(other.read("/run/farrier/swap/failed-acme"), None);
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    let expected = "the node was cut off even after the guard undid the swap: the API server at 10.0.0.9:6443 did not \
                    answer within 120 s";
    assert!(error.starts_with(expected), "{error}");
    let journal = bench.read(&format!("{REQUEST}/journal")).unwrap();
    assert!(journal.lines().last().unwrap().contains(" lost lasting the API server at"), "{journal}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
    bench.calls();
    bench.kernel.silent_servers.borrow_mut().clear();
    run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert_eq!(bench.calls(), Vec::<String>::new(), "the same image is not tried again");
}

/// Runs a container that cuts the node off, with a guard that reboots such a node or not. Then boots the node.
fn cut_off_and_boot(bench: &Rc<Bench>, reboots: bool) {
    bench.program("systemctl", &format!("echo \"$@\" >> {}", bench.at("/said").display()));
    drop(Guard::start(&bench.node()).unwrap());
    let other = Rc::clone(bench);
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        let node = other.node();
        let mut guard = Guard::start(&node).unwrap();
        guard.reboots = reboots;
        guard.serve_once();
    })));
    bench.kernel.after_unload.replace(Some(Box::new(|kernel, _| {
        kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
    })));
    run_container(bench, || panic!("must not become ready")).unwrap_err();
    fs::remove_dir_all(bench.at("/run")).unwrap();
    bench.kernel.silent_servers.borrow_mut().clear();
    bench.kernel.after_unload.replace(None);
    drop(Guard::start(&bench.node()).unwrap());
}

#[test]
fn a_guard_that_may_reboots_a_node_that_is_cut_off_and_does_not_try_the_image_after_the_boot() {
    for reboots in [false, true] {
        let bench = bench();
        cut_off_and_boot(&bench, reboots);
        let expected = reboots.then_some("--force reboot");
        assert_eq!(files::text(bench.at("/said")).as_deref(), expected, "{}", bench.log());
        let result = run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log()));
        assert_eq!(result.is_err(), reboots, "{}", bench.log());
        if let Err(error) = result {
            let expected = "the guard refused the swap: this image's drivers failed on this node, and are not tried \
                            again: the node is cut off: the API server at 10.0.0.9:6443";
            assert!(error.to_string().starts_with(expected), "{error}");
            // Another image replaces the record.
            bench.module("/lib/modules/6.1.0-56-amd64/updates/acme.ko", "", "second-acme");
            run_container(&bench, || assert_eq!(bench.loaded_versions(), ["second-acme"])).unwrap();
            assert_eq!(bench.read("/var/lib/farrier/swap-failed-acme"), None);
        }
    }
}

/// With one record for the node, both containers would take turns: one removes the record, the other has the node rebooted.
#[test]
fn the_swap_of_another_container_allows_no_other_try() {
    let bench = bench();
    cut_off_and_boot(&bench, true);
    bench.host_module("other", "");
    bench.image_module("other", "");
    bench.load_from_host(&["other"]);
    let options = generic::Options::read(&["--replace", "other", "other"], environment).unwrap();
    generic::run(&bench.node(), &options, &mut EndsWhenReady(&mut || {})).unwrap();
    bench.calls();
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        error.starts_with("the guard refused the swap: this image's drivers failed on this node"),
        "{error}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    assert_eq!(files::text(bench.at("/said")).as_deref(), Some("--force reboot"), "{}", bench.log());
}

/// Otherwise each end of the container would cut the node off again.
#[test]
fn a_start_allows_no_other_try_to_the_end_that_failed() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    run_container(&bench, || bench.kernel.without_link.borrow_mut().push("host-acme".to_owned()))
        .unwrap_err();
    bench.kernel.without_link.borrow_mut().clear();
    // As after a boot.
    bench.kernel.unload("acme", &mut |_| {}).unwrap();
    bench.load_from_host(&["acme", "acme_net"]);
    let error = run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log()));
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("the guard refused the swap: this image's drivers failed on this node"),
        "{error}"
    );
    assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log());
}

/// Without `srcversion` and build ID, modules of the same name cannot be told apart.
#[test]
fn new_modules_without_an_identity_make_way_too() {
    let bench = bench();
    for tree in ["/lib/modules/6.1.0-56-amd64/updates", "/host/lib/modules/6.1.0-56-amd64/kernel"] {
        bench.module(&format!("{tree}/acme.ko"), "", "");
    }
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    bench.kernel.at_connect.replace(Some(Box::new(move || {
        let journal = other.read(&format!("{REQUEST}/journal")).unwrap_or_default();
        let is_new = journal.contains("loading") && !journal.contains("undo-loading");
        let servers = if is_new { vec!["10.0.0.9:6443".parse().unwrap()] } else { vec![] };
        other.kernel.silent_servers.replace(servers);
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: the API server"), "{error}");
    let calls = bench.calls();
    let unloads = calls.iter().filter(|call| *call == "unload acme").count();
    assert_eq!(unloads, 2, "{calls:?}");
}

/// As after a guard that was killed while its journal could not be written.
#[test]
fn a_swap_is_not_committed_with_the_old_modules() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    let mut guard = bench.kernel.at_pause.take().unwrap();
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        let journal = other.at(&format!("{REQUEST}/journal"));
        if !journal.exists() {
            let phases = "1 saving\n2 unloading\n3 loading\n4 replaying\n5 confirming\n";
            fs::write(journal, phases).unwrap();
        }
        guard();
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        error.starts_with("the guard undid the swap: module acme is not loaded, or not in the build"),
        "{error}"
    );
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// udev loads the host's module while the new one is loaded.
#[test]
fn a_module_that_udev_loads_in_between_is_not_committed() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    bench.kernel.load_errors.borrow_mut().insert("acme of the image".to_owned(), Errno::EXIST);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: module acme is not loaded"), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// The load balancer of the API servers has another address after the swap.
#[test]
fn an_api_server_may_move_during_the_swap() {
    for (with_new, versions) in [(true, IMAGE.to_vec()), (false, HOST.to_vec())] {
        let bench = bench();
        run_guard_at_pauses(&bench);
        let other = Rc::clone(&bench);
        bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
            kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
            if with_new {
                let socket = "0: 0200000A:A000 0800000A:192B 01 0:0 0:0 0 0 0 5 1\n";
                other.write("/proc/1/net/tcp", &format!("head\n{socket}"));
            }
        })));
        let mut loaded = Vec::new();
        let result = run_container(&bench, || loaded = bench.loaded_versions());
        assert_eq!(result.is_ok(), with_new, "{}", bench.log());
        let loaded = if with_new { loaded } else { bench.loaded_versions() };
        assert_eq!(loaded, versions, "{}", bench.log());
    }
}

/// On the way back, one API server is enough: the node is not cut off.
#[test]
fn a_node_that_reaches_another_api_server_is_not_lost() {
    let bench = bench();
    let both = "head\n0: 0200000A:A000 0900000A:192B 01 0:0 0:0 0 0 0 5 1\n\
                1: 0200000A:A001 0800000A:192B 01 0:0 0:0 0 0 0 6 1\n";
    bench.write("/proc/1/net/tcp", both);
    run_guard_at_pauses(&bench);
    bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
        kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: the API server at 10.0.0.8:6443"), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

#[test]
fn a_swap_that_could_not_be_checked_is_refused() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    bench.kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    let expected = "the guard refused the swap: no API server answers before the swap: 10.0.0.9:6443";
    assert_eq!(error.to_string(), expected);
    assert!(error.is_transient(), "the image is not to blame");
    assert_eq!(bench.calls(), Vec::<String>::new());
    bench.kernel.silent_servers.borrow_mut().clear();
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE)).unwrap();
}

#[test]
fn an_api_server_with_an_ipv6_address_decides_alone() {
    for (has_link, versions) in [(true, &IMAGE[..]), (false, &HOST[..])] {
        let bench = bench();
        bench.write("/proc/1/net/route", "head\n");
        bench.write("/proc/1/net/tcp", "head\n");
        let zero = "0".repeat(32);
        let address = "fd000000000000000000000000000001";
        bench.write(
            "/proc/1/net/ipv6_route",
            &format!("{zero} 00 {zero} 00 {address} 00000400 00000001 00000000 00000003 ens1\n"),
        );
        bench.write("/etc/kubernetes/kubelet.conf", "    server: https://[fd00::9]:6443\n");
        if !has_link {
            bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
        }
        run_guard_at_pauses(&bench);
        let mut loaded = Vec::new();
        let result = run_container(&bench, || loaded = bench.loaded_versions());
        assert_eq!(result.is_ok(), has_link, "{}", bench.log());
        let loaded = if has_link { loaded } else { bench.loaded_versions() };
        assert_eq!(loaded, versions, "{}", bench.log());
        assert!(bench.log().contains("waiting for the API server at [fd00::9]:6443"), "{}", bench.log());
    }
}
