//! Requests that containers make, wait for and take back.

use super::*;

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

/// The pod is deleted before the guard has looked.
#[test]
fn a_container_that_ends_takes_its_request_back() {
    let bench = bench();
    let node = bench.node();
    drop(Guard::start(&node).unwrap());
    let arguments = ["--replace", "acme_net", "--replace", "acme", "acme"];
    let options = generic::Options::read(&arguments, environment).unwrap();
    let error = generic::run(&node, &options, &mut EndsNow).unwrap_err();
    assert_eq!(error.to_string(), "received SIGTERM before the drivers were ready");
    Guard::start(&node).unwrap().serve_once();
    assert_eq!(bench.calls(), Vec::<String>::new(), "{}", bench.log());
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
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
    let host = HostModules::read(&node, "/run/replaced".to_owned()).unwrap().host;
    let swap = Swap {
        digest: "1".to_owned(),
        limit: Duration::ZERO,
        unload: &["acme_net".to_owned(), "acme".to_owned()],
        new_modules: (&Loader::of_node(&node).unwrap(), vec!["acme".to_owned()], vec![]),
        old_modules: (&host, vec!["absent".to_owned()]),
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
