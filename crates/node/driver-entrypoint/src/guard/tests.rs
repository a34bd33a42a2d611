//! Tests of a container and a guard on a test bench. The guard runs whenever the container pauses.

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
    modules::{index::Index, load::Loader, parameters::Parameters},
    personality::{generic, mofed},
    testing::{Bench, EndsWhenReady, Killed},
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

/// Between the last phase and `done`, the guard still removes files of the request. The next request has the same directory.
#[test]
fn a_request_is_not_replaced_before_the_guard_has_left_it() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let killed = catch_unwind(AssertUnwindSafe(|| run_container(&bench, || panic_any(Killed))));
    assert!(killed.is_err());
    fs::remove_file(bench.at(&format!("{REQUEST}/done"))).unwrap();
    let other = Rc::clone(&bench);
    let journals = Rc::new(RefCell::new(Vec::new()));
    let seen = Rc::clone(&journals);
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        seen.borrow_mut().push(other.read(&format!("{REQUEST}/journal")).unwrap_or_default());
        let node = other.node();
        Guard::start(&node).unwrap().serve_once();
    })));
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log())).unwrap();
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
    assert!(journals.borrow()[0].ends_with("committed\n"), "{:?}", journals.borrow()[0]);
}

#[test]
fn a_request_that_the_guard_has_left_is_not_waited_for() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    run_container(&bench, || {}).unwrap();
    fs::remove_file(bench.at(&format!("{REQUEST}/journal"))).unwrap();
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log())).unwrap();
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
    assert!(!bench.log().contains("an earlier container asked the guard for a swap"), "{}", bench.log());
}

/// The directory may have no room for `done`.
#[test]
fn a_swap_counts_whose_guard_cannot_say_that_it_has_left() {
    let bench = bench();
    drop(Guard::start(&bench.node()).unwrap());
    let (other, mut lock) = (Rc::clone(&bench), None);
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        lock.take();
        let _ = symlink("/dev/null/file", other.at(&format!("{REQUEST}/done")));
        let node = other.node();
        Guard::start(&node).unwrap().serve_once();
        // The guard runs while the container looks.
        let file = fs::File::open(other.at("/run/farrier/swap/lock")).unwrap();
        flock(&file, FlockOperation::LockExclusive).unwrap();
        lock = Some(file);
    })));
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log())).unwrap();
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
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
fn a_request_that_others_can_write_is_refused() {
    for (path, mode) in [("request", 0o666), ("new/acme.ko", 0o620), ("new", 0o777)] {
        let bench = bench();
        drop(Guard::start(&bench.node()).unwrap());
        let other = Rc::clone(&bench);
        bench.kernel.at_pause.replace(Some(Box::new(move || {
            let file = other.at(&format!("{REQUEST}/{path}"));
            if file.exists() {
                fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
            }
            let node = other.node();
            Guard::start(&node).unwrap().serve_once();
        })));
        let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
        let name = path.rsplit('/').next().unwrap();
        assert_eq!(error, format!("the guard refused the swap: {name} can be changed by others than root"));
        assert_eq!(bench.calls(), Vec::<String>::new());
    }
}

#[test]
fn a_symlink_is_not_followed() {
    let bench = bench();
    drop(Guard::start(&bench.node()).unwrap());
    fs::create_dir_all(bench.at("/elsewhere")).unwrap();
    bench.write("/elsewhere/request", "farrier swap 1\n");
    symlink(bench.at("/elsewhere"), bench.at(REQUEST)).unwrap();
    let node = bench.node();
    Guard::start(&node).unwrap().serve_once();
    assert!(
        bench.log().contains("acme is neither a file nor a directory with a plain name"),
        "{}",
        bench.log()
    );
    assert_eq!(files::entries(bench.at("/elsewhere")).len(), 1);
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
    assert_eq!(error, "SWAP_GUARD is an absolute path without .., not ../swap");
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

/// A guard that has begun, while the container has waited too long for one and takes its request back.
#[test]
fn a_request_is_either_begun_or_taken_back() {
    let bench = bench();
    let node = bench.node();
    drop(Guard::start(&node).unwrap());
    let client = GuardClient { node: &node, directory: DIRECTORY, name: "acme" };
    bench.write(&format!("{REQUEST}/request"), "farrier swap 1\n");
    let begun = lock_request(&bench.at(REQUEST)).unwrap();
    assert!(!client.withdraw(), "the guard has begun");
    drop(begun);
    // The guard has opened the request, and the container takes it back before the guard can lock it.
    let opened = fs::File::open(bench.at(&format!("{REQUEST}/request"))).unwrap();
    assert!(client.withdraw());
    assert!(lock_request(&bench.at(REQUEST)).is_none());
    bench.write(&format!("{REQUEST}/request"), "farrier swap 1\n");
    assert!(lock_request(&bench.at(REQUEST)).is_some(), "another file");
    drop(opened);
    bench.write(&format!("{REQUEST}/journal"), "1 saving\n");
    assert!(!client.withdraw(), "a guard that was killed has begun");
    bench.write(&format!("{REQUEST}/journal"), "");
    assert!(client.withdraw(), "a guard was killed before it began");
}

/// The guard finds the request that a container takes back at the same time, and the next container asks at once.
#[test]
fn a_request_that_is_taken_back_does_not_delay_the_next() {
    let bench = bench();
    drop(Guard::start(&bench.node()).unwrap());
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert_eq!(error.to_string(), "no guard serves /run/farrier/swap");
    let node = bench.node();
    Guard::start(&node).unwrap().serve_once();
    assert!(!bench.at(&format!("{REQUEST}/journal")).exists(), "{}", bench.log());
    run_guard_at_pauses(&bench);
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE)).unwrap();
    assert!(!bench.log().contains("an earlier container"), "{}", bench.log());
}

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
        assert_eq!(other.read("/run/farrier/swap/failed"), None);
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

#[test]
fn a_guard_that_may_reboots_a_node_that_is_cut_off_and_does_not_try_the_image_after_the_boot() {
    for reboots in [false, true] {
        let bench = bench();
        let said = bench.at("/said");
        bench.program("systemctl", &format!("echo \"$@\" >> {}", said.display()));
        drop(Guard::start(&bench.node()).unwrap());
        let other = Rc::clone(&bench);
        bench.kernel.at_pause.replace(Some(Box::new(move || {
            let node = other.node();
            let mut guard = Guard::start(&node).unwrap();
            guard.reboots = reboots;
            guard.serve_once();
        })));
        bench.kernel.after_unload.replace(Some(Box::new(|kernel, _| {
            kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
        })));
        run_container(&bench, || panic!("must not become ready")).unwrap_err();
        let expected = reboots.then_some("--force reboot");
        assert_eq!(files::text(said).as_deref(), expected, "{}", bench.log());
        // The node boots.
        fs::remove_dir_all(bench.at("/run")).unwrap();
        bench.kernel.silent_servers.borrow_mut().clear();
        bench.kernel.after_unload.replace(None);
        drop(Guard::start(&bench.node()).unwrap());
        let result = run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE, "{}", bench.log()));
        assert_eq!(result.is_err(), reboots, "{}", bench.log());
        if let Err(error) = result {
            let expected = "the guard refused the swap: this image's drivers failed on this node, and are not tried \
                            again: the node is cut off: the API server at 10.0.0.9:6443";
            assert!(error.to_string().starts_with(expected), "{error}");
            // Another image replaces the record.
            bench.module("/lib/modules/6.1.0-56-amd64/updates/acme.ko", "", "second-acme");
            run_container(&bench, || assert_eq!(bench.loaded_versions(), ["second-acme"])).unwrap();
            assert_eq!(bench.read("/var/lib/farrier/swap-failed"), None);
        }
    }
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
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, _| {
        kernel.silent_servers.borrow_mut().push("10.0.0.9:6443".parse().unwrap());
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.starts_with("the guard undid the swap: the API server at 10.0.0.9:6443"), "{error}");
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

/// As on a full file system.
#[test]
fn a_request_that_cannot_be_written_does_not_blame_the_image() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    bench.write(&format!("{REQUEST}.new"), "a file where a directory has to be");
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().starts_with("create "), "{error}");
    assert_eq!((error.is_transient(), bench.calls()), (true, vec![]));
    fs::remove_file(bench.at(&format!("{REQUEST}.new"))).unwrap();
    run_container(&bench, || assert_eq!(bench.loaded_versions(), IMAGE)).unwrap();
}

#[test]
fn an_incomplete_request_does_not_stay_in_memory() {
    let bench = bench();
    let node = bench.node();
    drop(Guard::start(&node).unwrap());
    let (image, host) = (Index::of_node(&node).unwrap(), Index::of_host(&node).unwrap());
    let parameters = Parameters::read(&node.paths);
    let loader = |index| Loader { node: &node, index, parameters: &parameters };
    let swap = Swap {
        digest: "1".to_owned(),
        limit: Duration::ZERO,
        unload: &["acme_net".to_owned(), "acme".to_owned()],
        new_modules: (&loader(&image), vec!["acme".to_owned()], vec![]),
        old_modules: (&loader(&host), vec!["absent".to_owned()]),
    };
    let client = GuardClient { node: &node, directory: DIRECTORY, name: "acme" };
    let mut signals = EndsWhenReady(&mut || {});
    client.swap(&swap, &mut signals).unwrap_err();
    let names: Vec<String> =
        files::entries(bench.at(DIRECTORY)).iter().map(|path| files::name_of(path)).collect();
    assert_eq!(names, ["lock"]);
}

#[test]
fn a_second_image_waits_for_the_swap_of_the_first() {
    let bench = bench();
    drop(Guard::start(&bench.node()).unwrap());
    bench.kernel.at_pause.replace(Some(Box::new(|| panic_any(Killed))));
    assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, || {}))).is_err());
    bench.kernel.at_pause.replace(None);
    // The next image has another build of the module.
    bench.module("/lib/modules/6.1.0-56-amd64/updates/acme.ko", "", "second-acme");
    run_guard_at_pauses(&bench);
    run_container(&bench, || assert_eq!(bench.loaded_versions(), ["second-acme"], "{}", bench.log()))
        .unwrap();
    assert!(bench.log().contains("an earlier container asked the guard"), "{}", bench.log());
    assert_eq!(bench.loaded_versions(), HOST, "{}", bench.log());
}

/// The guard performs the swap of another container between the plan of this one and its request.
#[test]
fn a_swap_that_was_planned_for_other_modules_is_refused() {
    let bench = bench();
    run_guard_at_pauses(&bench);
    let other = Rc::clone(&bench);
    let mut guard = bench.kernel.at_pause.take().unwrap();
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        if other.loaded_versions() == HOST {
            other.write("/sys/module/acme/srcversion", "others-acme\n");
        }
        guard();
    })));
    let error = run_container(&bench, || panic!("must not become ready")).unwrap_err();
    let expected = "the guard refused the swap: module acme is not the one for which the swap was planned";
    assert_eq!((error.to_string().as_str(), error.is_transient()), (expected, true));
    assert_eq!(bench.calls(), Vec::<String>::new());
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
