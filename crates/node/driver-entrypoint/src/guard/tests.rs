//! Tests of a container and a guard on a test bench. The guard runs whenever the container pauses.

mod outcomes;
mod requests;

use std::{
    cell::RefCell,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    panic::{AssertUnwindSafe, catch_unwind, panic_any},
    rc::Rc,
    time::Duration,
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use super::{
    DIRECTORY,
    client::{GuardClient, Swap, read_directory},
    lock_request,
    serve::Guard,
};
use crate::{
    error::Error,
    files,
    host_modules::HostModules,
    modules::load::Loader,
    personality::{generic, mofed},
    testing::{Bench, EndsNow, EndsWhenReady, Killed},
};

const REQUEST: &str = "/run/farrier/swap/acme";
const HOST: [&str; 2] = ["host-acme", "host-acme_net"];
const IMAGE: [&str; 1] = ["image-acme"];

/// A node whose module `acme` drives the interface with the routes to the API server, and an image that replaces it.
fn bench() -> Rc<Bench> {
    let bench = Bench::new();
    bench.host_module("acme", "");
    bench.host_module("acme_net", "acme");
    bench.image_module("acme", "");
    bench.load_from_host(&["acme", "acme_net"]);
    fs::create_dir_all(bench.at("/host/run/modprobe.d")).unwrap();
    fs::create_dir_all(bench.at("/host/etc/modprobe.d")).unwrap();
    bench.write("/proc/uptime", "10.5 3.1\n");
    connect(&bench, "acme");
    Rc::new(bench)
}

/// Gives a module the interface to the API server.
fn connect(bench: &Bench, module: &str) {
    let driver = bench.at("/sys/class/net/ens1/device/driver");
    fs::create_dir_all(&driver).unwrap();
    symlink(format!("/sys/module/{module}"), driver.join("module")).unwrap();
    bench.write("/proc/1/net/route", "head\nens1\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n");
    bench.write("/proc/1/net/tcp", "head\n0: 0200000A:A000 0900000A:192B 01 0:0 0:0 0 0 0 5 1\n");
}

/// Runs the guard at each pause of the container. A guard that is killed is started again at the next pause.
fn run_guard_at_pauses(bench: &Rc<Bench>) {
    drop(Guard::start(&bench.node()).unwrap());
    let other = Rc::clone(bench);
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        let node = other.node();
        if catch_unwind(AssertUnwindSafe(|| Guard::start(&node).unwrap().serve_once())).is_err() {
            other.kernel.killed_at.set(None);
        }
    })));
}

fn environment(name: &str) -> Option<String> {
    match name {
        "SWAP_GUARD" => Some(DIRECTORY.to_owned()),
        "ALLOW_DISRUPTION" => Some("uplink".to_owned()),
        _ => None,
    }
}

fn run_container(bench: &Bench, mut when_ready: impl FnMut()) -> Result<(), Error> {
    let arguments = ["--replace", "acme_net", "--replace", "acme", "acme"];
    let options = generic::Options::read(&arguments, environment).unwrap();
    generic::run(&bench.node(), &options, &mut EndsWhenReady(&mut when_ready))
}

#[test]
fn the_guard_swaps_the_modules_for_the_container() {
    let bench = bench();
    bench.write("/host/etc/modprobe.d/site.conf", "options acme debug=1\n");
    run_guard_at_pauses(&bench);
    let (mut journal, mut has_files) = (String::new(), true);
    run_container(&bench, || {
        assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log());
        journal = bench.read(&format!("{REQUEST}/journal")).unwrap();
        has_files = bench.at(&format!("{REQUEST}/new")).exists();
    })
    .unwrap();
    let log = bench.log();
    assert!(log.contains("guard: INFO  saving: 120 s left"), "{log}");
    assert!(log.contains("guard: INFO  the swap has ended: committed"), "{log}");
    assert_eq!(journal, "10 saving\n10 unloading\n10 loading\n10 replaying\n10 confirming\n10 committed\n");
    assert!(!has_files, "the modules' files take memory");
    assert_eq!(bench.loaded_versions(), HOST, "the end of the container restores the host's modules");
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
}

#[test]
fn modules_without_a_link_make_way_for_the_host_s_with_their_parameters() {
    let bench = bench();
    bench.write("/host/etc/modprobe.d/site.conf", "options acme debug=1\n");
    bench.write("/sys/module/acme/parameters/queues", "4\n");
    bench.write("/sys/module/acme/parameters/name", "(null)\n");
    bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    let expected = "the guard undid the swap: the API server at 10.0.0.9:6443 did not answer within 120 s";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
    let calls = bench.calls();
    assert!(calls.contains(&"load acme of the host debug=1 queues=4".to_owned()), "{calls:?}");
    let again = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        again.starts_with("this image's drivers failed on this node, and are not tried again"),
        "{again}"
    );
    // The guard itself does not try the image again either, if the container's record is lost.
    fs::remove_file(bench.at("/run/farrier/acme.failed")).unwrap();
    let again = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        again.starts_with("the guard refused the swap: this image's drivers failed on this node"),
        "{again}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn parameters_that_the_host_s_module_refuses_are_left_out() {
    let bench = bench();
    bench.write("/sys/module/acme/parameters/queues", "4\n");
    bench.kernel.load_errors.borrow_mut().insert("acme of the image".to_owned(), Errno::NOEXEC);
    bench.kernel.refused_parameters.borrow_mut().push("queues=4".to_owned());
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: load acme from"), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// LoadPin, for example, refuses each file that is not from the host's root file system.
#[test]
fn modules_that_the_kernel_refuses_come_back_by_the_host_s_modprobe() {
    let bench = bench();
    let said = bench.at("/said");
    bench.program("modprobe", &format!("echo \"$@\" >> {}", said.display()));
    bench.kernel.load_errors.borrow_mut().insert("acme".to_owned(), Errno::PERM);
    run_guard_at_pauses(&bench);
    run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert_eq!(files::text(said).as_deref(), Some("acme\nacme_net"), "{}", bench.log());
}

#[test]
fn a_module_that_a_process_uses_may_be_tried_again() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let used = Rc::clone(&bench);
    // The process opens the device after the container has looked.
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| {
        if name == "acme_net" {
            used.set_references("acme", 1);
        }
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
    bench.set_references("acme", 0);
    bench.kernel.after_unload.replace(None);
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE)).unwrap();
}

#[test]
fn a_guard_that_is_killed_at_any_call_of_the_kernel_ends_the_swap_later() {
    for (has_link, versions) in [(true, &IMAGE[..]), (false, &HOST[..])] {
        for takes_place in [false, true] {
            for step in 0.. {
                let bench = bench();
                if !has_link {
                    bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
                }
                run_guard_at_pauses(&bench);
                bench.kernel.killed_at.set(Some((step, takes_place)));
                // The container stays as it is once it is ready.
                let mut versions_then = Vec::new();
                let is_ready = &mut versions_then;
                let ended = catch_unwind(AssertUnwindSafe(|| {
                    run_container(&bench, || {
                        *is_ready = bench.loaded_versions();
                        panic_any(Killed);
                    })
                }));
                let (log, journal) = (bench.log(), bench.read(&format!("{REQUEST}/journal")).unwrap());
                assert_eq!(ended.is_err(), has_link, "{step}: {log}");
                if !has_link {
                    versions_then = bench.loaded_versions();
                }
                assert_eq!(versions_then, versions, "{step}: {log}");
                let expected = if has_link { "committed\n" } else { "undone\n" };
                assert!(journal.ends_with(expected), "{step}: {journal}");
                if bench.kernel.killed_at.take().is_some() {
                    assert!(step > 2, "the guard was killed at each call");
                    break;
                }
            }
        }
    }
}

/// The guard does not need the container that asked for the swap.
#[test]
fn a_container_that_is_killed_finds_the_result_later() {
    for has_link in [true, false] {
        let bench = bench();
        if !has_link {
            bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
        }
        drop(Guard::start(&bench.node()).unwrap());
        bench.kernel.at_pause.replace(Some(Box::new(|| panic_any(Killed))));
        assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, || {}))).is_err());
        bench.kernel.at_pause.replace(None);
        assert_eq!(bench.loaded_versions(), HOST, "nothing was unloaded yet");
        assert_eq!(files::entries(bench.at("/host/run/modprobe.d")).len(), 1);
        run_guard_at_pauses(&bench);
        let result = run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE));
        assert_eq!(result.is_ok(), has_link, "{}", bench.log());
        assert!(bench.log().contains("an earlier container asked the guard for a swap"), "{}", bench.log());
        assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
        assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
    }
}

/// The end of a container also takes the uplink's driver away.
#[test]
fn the_end_of_a_container_is_undone_if_the_host_s_module_has_no_link() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || bench.kernel.without_link.borrow_mut().push("host-acme".to_owned()));
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: the API server at 10.0.0.9:6443"), "{error}");
    assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log());
    // The next container of the image keeps its modules.
    bench.kernel.without_link.borrow_mut().clear();
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log())).unwrap_err();
    assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log());
}

#[test]
fn without_a_guard_nothing_is_swapped() {
    let bench = bench();
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().contains("where no guard has been"), "{error}");
    drop(Guard::start(&bench.node()).unwrap());
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert_eq!(error.to_string(), "no guard serves /run/farrier/swap");
    assert_eq!(bench.calls(), Vec::<String>::new());
    assert_eq!(files::entries(bench.at(REQUEST)), Vec::<std::path::PathBuf>::new(), "modules take memory");
    // A guard that starts later must not begin the swap that the container has given up.
    let node = bench.node();
    Guard::start(&node).unwrap().serve_once();
    assert_eq!(bench.calls(), Vec::<String>::new());
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
}

#[test]
fn a_guard_that_cannot_write_its_journal_touches_nothing() {
    let bench = bench();
    drop(Guard::start(&bench.node()).unwrap());
    let other = Rc::clone(&bench);
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        let _ = fs::create_dir(other.at(&format!("{REQUEST}/journal")));
        let node = other.node();
        Guard::start(&node).unwrap().serve_once();
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert_eq!(error.to_string(), "the guard could not begin the swap, and nothing was touched");
    assert!(!bench.at(&format!("{REQUEST}/new")).exists(), "modules take memory");
    assert!(error.is_transient());
    assert_eq!(bench.calls(), Vec::<String>::new());
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
}

#[test]
fn only_one_guard_serves_a_node() {
    let bench = bench();
    let node = bench.node();
    let guard = Guard::start(&node).unwrap();
    let error = Guard::start(&node).map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "another guard serves this node");
    drop(guard);
    Guard::start(&node).unwrap();
}

#[test]
fn the_directory_is_an_absolute_path() {
    assert_eq!(read_directory(|_| None), Ok(None));
    assert_eq!(read_directory(|_| Some(" ".to_owned())), Ok(None));
    assert_eq!(read_directory(environment), Ok(Some(DIRECTORY.to_owned())));
    let error = read_directory(|_| Some("../swap".to_owned())).unwrap_err();
    assert_eq!(error, "SWAP_GUARD must be an absolute path without .., not ../swap");
}

/// A node with `mlx5_core` and `ib_core`, for containers of `mofed`.
fn mofed_bench() -> Rc<Bench> {
    let bench = Bench::new();
    bench.host_module("ib_core", "");
    bench.host_module("mlx5_core", "");
    bench.host_module("mlx5_ib", "mlx5_core,ib_core");
    bench.host_module("tls", "");
    bench.image_module("mlx_compat", "");
    bench.image_module("ib_core", "mlx_compat");
    bench.image_module("mlx5_core", "mlx_compat,tls");
    bench.image_module("mlx5_ib", "mlx5_core,ib_core");
    bench.load_from_host(&["ib_core", "mlx5_core", "mlx5_ib"]);
    fs::create_dir_all(bench.at("/host/run/modprobe.d")).unwrap();
    bench.write("/usr/src/ofa_kernel/Module.symvers", "");
    bench.write("/proc/uptime", "10.5 3.1\n");
    connect(&bench, "mlx5_core");
    Rc::new(bench)
}

fn run_mofed(bench: &Bench, when_ready: impl FnMut()) -> Result<(), Error> {
    run_mofed_with(bench, &[], when_ready)
}

fn run_mofed_with(bench: &Bench, more: &[(&str, &str)], mut when_ready: impl FnMut()) -> Result<(), Error> {
    let value = |name: &str| more.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    let settings = mofed::Settings::read(&[], |name| value(name).or_else(|| environment(name))).unwrap();
    mofed::run(&bench.node(), &settings, &mut EndsWhenReady(&mut when_ready))
}

#[test]
fn mofed_has_the_guard_replace_its_drivers() {
    let bench = mofed_bench();
    run_guard_at_pauses(&bench);
    let image = ["image-ib_core", "image-mlx5_core", "image-mlx5_ib", "image-mlx_compat", "host-tls"];
    run_mofed(&bench, || assert_eq!(bench.loaded_versions(), image, "{}", bench.log())).unwrap();
    assert!(bench.log().contains("guard: INFO  the swap has ended: committed"), "{}", bench.log());
    assert_eq!(bench.read("/run/mellanox/drivers/.replacing"), None);
    assert_eq!(bench.loaded_versions(), image, "RESTORE_DRIVER_ON_POD_TERMINATION is not set");
    run_mofed_with(&bench, &[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")], || {}).unwrap();
    let host = ["host-ib_core", "host-mlx5_core", "host-mlx5_ib"];
    let versions = bench.loaded_versions();
    assert!(host.iter().all(|name| versions.contains(&(*name).to_owned())), "{versions:?}");
    assert!(!versions.contains(&"image-mlx5_core".to_owned()), "{versions:?}");
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
}

#[test]
fn mofed_fails_if_the_guard_undoes_its_swap() {
    let bench = mofed_bench();
    bench.kernel.without_link.borrow_mut().push("image-mlx5_core".to_owned());
    run_guard_at_pauses(&bench);
    let error = run_mofed(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: the API server at 10.0.0.9:6443"), "{error}");
    let host = ["host-ib_core", "host-mlx5_core", "host-mlx5_ib", "host-tls"];
    assert_eq!(bench.loaded_versions(), host, "{}", bench.log());
    let again = run_mofed(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        again.starts_with("this image's drivers failed on this node, and are not tried again"),
        "{again}"
    );
    let node = bench.node();
    assert!(!GuardClient { node: &node, directory: DIRECTORY, name: "mofed" }.is_busy());
}

/// Adds a program for `HOOK_BEFORE` that writes `/said`. Returns its path.
fn add_hook(bench: &Bench) -> String {
    bench.program("before", &format!("echo \"$@\" >> {}", bench.at("/said").display()));
    bench.at("/usr/bin/before").to_str().unwrap().to_owned()
}

#[test]
fn mofed_touches_nothing_without_a_guard() {
    let bench = mofed_bench();
    let hook = add_hook(&bench);
    let error = run_mofed_with(&bench, &[("HOOK_BEFORE", hook.as_str())], || panic!("must not become ready"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("where no guard has been"), "{error}");
    assert_eq!((bench.read("/said"), bench.calls()), (None, vec![]), "{}", bench.log());
}

/// Otherwise each turn of CrashLoopBackOff would run the hooks and unload nvidia_peermem. The record outlives a boot.
#[test]
fn mofed_touches_nothing_for_a_swap_that_the_guard_would_refuse() {
    let bench = mofed_bench();
    bench.host_module("nvidia_peermem", "ib_core");
    bench.kernel.without_link.borrow_mut().push("image-mlx5_core".to_owned());
    run_guard_at_pauses(&bench);
    run_mofed(&bench, || panic!("must not become ready")).unwrap_err();
    let record = "/var/lib/farrier/swap-failed-mofed";
    bench.write(record, &bench.read("/run/farrier/swap/failed-mofed").unwrap());
    fs::remove_dir_all(bench.at("/run")).unwrap();
    drop(Guard::start(&bench.node()).unwrap());
    bench.load_from_host(&["nvidia_peermem"]);
    let hook = add_hook(&bench);
    let again = run_mofed_with(&bench, &[("HOOK_BEFORE", hook.as_str())], || panic!("must not become ready"));
    let again = again.unwrap_err();
    assert!(
        again.to_string().starts_with("this image's drivers failed on this node, and are not tried again"),
        "{again}"
    );
    let removal = "remove /run/farrier/swap/failed-mofed and /var/lib/farrier/swap-failed-mofed on the node";
    assert!(again.hint().ends_with(removal), "{}", again.hint());
    assert_eq!((bench.read("/said"), bench.calls()), (None, vec![]), "{}", bench.log());
}

/// A node whose log of a swap cannot be written still has its network.
#[test]
fn a_swap_ends_without_its_log() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    let mut guard = bench.kernel.at_pause.take().unwrap();
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        let _ = fs::create_dir(other.at(&format!("{REQUEST}/log")));
        guard();
    })));
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log())).unwrap();
}

#[test]
fn names_with_hyphens_are_those_of_the_kernel() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let arguments = ["--replace", "acme-net", "--replace", "acme", "acme"];
    let options = generic::Options::read(&arguments, environment).unwrap();
    let mut loaded = Vec::new();
    generic::run(&bench.node(), &options, &mut EndsWhenReady(&mut || loaded = bench.loaded_versions()))
        .unwrap();
    assert_eq!(loaded, IMAGE, "{}", bench.log());
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// The kernel refuses the image's module with `EINVAL`, because the built-in one has its place in sysfs.
#[test]
fn a_module_that_was_built_in_is_not_replaced() {
    let bench = bench();
    bench.write("/host/lib/modules/6.1.0-56-amd64/modules.builtin", "kernel/acme_built_in.ko\n");
    bench.image_module("acme_built_in", "");
    bench.kernel.load_errors.borrow_mut().insert("acme_built_in".to_owned(), Errno::INVAL);
    run_guard_at_pauses(&bench);
    let arguments = ["--replace", "acme_net", "--replace", "acme", "acme", "acme_built_in"];
    let options = generic::Options::read(&arguments, environment).unwrap();
    let result =
        generic::run(&bench.node(), &options, &mut EndsWhenReady(&mut || panic!("must not become ready")));
    let error = result.unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: load acme_built_in from"), "{error}");
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// Such a module cannot come back.
#[test]
fn a_driver_that_only_the_initramfs_has_is_not_unloaded() {
    let bench = bench();
    fs::remove_file(bench.at("/host/lib/modules/6.1.0-56-amd64/kernel/acme.ko")).unwrap();
    run_guard_at_pauses(&bench);
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("module acme belongs to the host and cannot be restored"), "{error}");
    assert_eq!(bench.calls(), Vec::<String>::new());
}

/// The owner is asked also if the interface has no PCI device, such as one of virtio.
#[test]
fn owners_of_interfaces_on_other_buses_configure_them() {
    let bench = bench();
    bench.write("/sys/class/net/ens1/ifindex", "7\n");
    bench.write("/run/systemd/netif/links/7", "ADMIN_STATE=configured\n");
    let said = bench.at("/said");
    bench.program("networkctl", &format!("echo \"$@\" >> {}", said.display()));
    run_guard_at_pauses(&bench);
    run_container(&bench, || assert_eq!(files::text(&said).as_deref(), Some("reconfigure ens1"))).unwrap();
}
