//! Tests of the `generic` personality on a test bench, from start to stop.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Instant,
};

use rustix::io::Errno;

use super::*;
use crate::{
    kernel::Kernel as _,
    testing::{Bench, EndsWhenReady, Killed},
};

fn bench() -> Bench {
    let bench = Bench::new();
    bench.host_module("firmware_class", "");
    bench.image_module("mst_pci", "firmware_class");
    bench.image_module("mst_pciconf", "mst_pci");
    bench
}

fn run_container(bench: &Bench, arguments: &[&str], mut when_ready: impl FnMut()) -> Result<(), Error> {
    run(&bench.node(), &Options::parse(arguments).unwrap(), &mut EndsWhenReady(&mut when_ready))
}

#[test]
fn modules_are_loaded_until_the_end() {
    let bench = bench();
    run_container(&bench, &["mst-pciconf"], || {
        assert_eq!(bench.read("/run/farrier/mst_pciconf.ready").as_deref(), Some(""));
    })
    .unwrap();
    assert_eq!(bench.read("/run/farrier/mst_pciconf.ready"), None);
    assert_eq!(
        bench.calls(),
        [
            "load firmware_class of the host",
            "load mst_pci of the image",
            "load mst_pciconf of the image",
            "unload mst_pciconf",
            "unload mst_pci",
            "unload firmware_class",
        ]
    );
}

#[test]
fn without_a_name_they_are_those_of_the_conf() {
    let bench = bench();
    let error = run_container(&bench, &["--keep"], || {}).unwrap_err().to_string();
    assert_eq!(error, "no module is named, and the image has no modules.order for this kernel");
    let order = format!("/lib/modules/{}/modules.order", crate::testing::RELEASE);
    bench.write(&order, "updates/dkms/mst_pciconf.ko\nreadme\nupdates/dkms/mst_pci.ko\n");
    run_container(&bench, &[], || assert!(bench.at("/run/farrier/mst_pciconf.ready").exists())).unwrap();
}

#[test]
fn they_stay_where_asked_to() {
    let bench = bench();
    run_container(&bench, &["--keep", "mst_pci", "mst_pciconf"], || {}).unwrap();
    assert_eq!(bench.loaded_versions().len(), 3);
    assert_eq!(bench.read("/run/farrier/mst_pci.ready"), None);
}

#[test]
fn loaded_modules_are_unloaded_if_a_later_one_fails() {
    let bench = bench();
    let error =
        run_container(&bench, &["mst_pci", "absent"], || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().starts_with("module absent is missing for kernel"), "{error}");
    assert_eq!(bench.loaded_versions(), Vec::<String>::new());
}

#[test]
fn a_killed_one_is_followed_by_one_that_ends_clean() {
    let bench = bench();
    run_container(&bench, &["--keep", "mst_pciconf"], || {}).unwrap();
    run_container(&bench, &["mst_pciconf"], || {}).unwrap();
    assert!(bench.log().contains("module mst_pciconf is already loaded"));
    assert_eq!(bench.loaded_versions(), ["host-firmware_class"], "kept, because it is unknown who loaded it");
}

const REPLACE: [&str; 5] = ["--replace", "acme_net", "--replace", "acme", "acme"];

/// In-tree modules, one of which uses the other, and an image that replaces the one in use.
fn in_tree() -> Bench {
    let bench = Bench::new();
    bench.host_module("acme", "");
    bench.host_module("acme_net", "acme");
    bench.image_module("acme", "");
    bench.load_from_host(&["acme", "acme_net"]);
    fs::create_dir_all(bench.at("/host/run/modprobe.d")).unwrap();
    bench
}

fn is_as_before(bench: &Bench) {
    assert_eq!(bench.loaded_versions(), ["host-acme", "host-acme_net"], "{}", bench.log());
    assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
    assert_eq!(bench.read("/run/farrier/acme.replaced"), None);
}

#[test]
fn the_host_s_modules_make_way_and_come_back() {
    let bench = in_tree();
    run_container(&bench, &REPLACE, || assert_eq!(bench.loaded_versions(), ["image-acme"])).unwrap();
    let calls = ["unload acme_net", "unload acme", "load acme of the image"];
    let back = ["unload acme", "load acme of the host", "load acme_net of the host"];
    assert_eq!(bench.calls(), [calls, back].concat());
    assert!(bench.log().contains("wrote /host/run/modprobe.d/farrier-acme.conf"), "{}", bench.log());
    is_as_before(&bench);
}

#[test]
fn after_a_kill_at_any_step_the_next_container_restores_the_node() {
    for takes_place in [false, true] {
        for step in 0.. {
            let bench = in_tree();
            bench.kernel.killed_at.set(Some((step, takes_place)));
            let first = catch_unwind(AssertUnwindSafe(|| run_container(&bench, &REPLACE, || {})));
            if first.is_ok() {
                assert!(step > 4, "the container was killed at each step");
                break;
            }
            bench.kernel.killed_at.set(None);
            run_container(&bench, &REPLACE, || assert_eq!(bench.loaded_versions(), ["image-acme"])).unwrap();
            is_as_before(&bench);
        }
    }
}

#[test]
fn modules_that_cannot_be_replaced_are_found_before_any_change() {
    let bench = in_tree();
    let refused = |arguments: &[&str]| {
        let error = run_container(&bench, arguments, || panic!("must not become ready")).unwrap_err();
        assert_eq!(bench.calls(), Vec::<String>::new());
        is_as_before(&bench);
        error
    };
    let error = refused(&["--replace", "acme", "acme"]);
    assert_eq!(error.to_string(), "module acme_net uses modules to be replaced: acme");
    assert!(error.hint().starts_with("add --replace acme_net"), "{}", error.hint());
    let error = refused(&["--replace", "acme_net", "--replace", "acme", "acme", "absent"]);
    assert!(error.to_string().starts_with("module absent is missing for kernel"), "{error}");
}

#[test]
fn a_refused_load_is_undone() {
    let bench = in_tree();
    bench.image_module("acme_more", "acme");
    bench.kernel.load_errors.borrow_mut().insert("acme_more".to_owned(), Errno::NOEXEC);
    run_container(&bench, &[&REPLACE[..], &["acme_more"]].concat(), || panic!("must not become ready"))
        .unwrap_err();
    is_as_before(&bench);
}

#[test]
fn unloaded_modules_are_restored_if_a_later_one_stays() {
    let bench = in_tree();
    // A user that no visible process accounts for: only the reference count shows it.
    bench.kernel.references.borrow_mut().insert("acme".to_owned(), 1);
    let error = run_container(&bench, &REPLACE, || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().starts_with("unload acme: 1 reference(s)"), "{error}");
    assert_eq!(bench.calls(), ["unload acme_net", "load acme_net of the host"]);
    is_as_before(&bench);
}

#[test]
fn the_host_s_modules_are_not_forgotten_while_the_image_s_stay() {
    let bench = in_tree();
    run_container(&bench, &[&["--keep"], &REPLACE[..]].concat(), || {}).unwrap();
    assert_eq!(bench.loaded_versions(), ["image-acme"]);
    run_container(&bench, &[&REPLACE[..], &["absent"]].concat(), || panic!("must not become ready"))
        .unwrap_err();
    assert_eq!(bench.loaded_versions(), ["image-acme"], "{}", bench.log());
    run_container(&bench, &REPLACE, || {}).unwrap();
    is_as_before(&bench);
}

#[test]
fn a_module_of_another_build_is_logged() {
    let bench = in_tree();
    run_container(&bench, &["--keep", "acme"], || {}).unwrap();
    let expected = "module acme is already loaded, and is not the image's: --replace would unload it first";
    assert!(bench.log().contains(expected), "{}", bench.log());
}

#[test]
fn modules_that_cannot_be_restored_are_not_unloaded() {
    let refused = |bench: &Bench| {
        let error = run_container(bench, &REPLACE, || panic!("must not become ready")).unwrap_err();
        assert_eq!(bench.calls(), Vec::<String>::new());
        assert_eq!(bench.read("/run/farrier/acme.replaced"), None);
        assert!(error.hint().starts_with("mount the host's /lib/modules at /host/lib/modules"));
        error.to_string()
    };
    let tree = format!("/host/lib/modules/{}", crate::testing::RELEASE);
    let bench = in_tree();
    fs::remove_file(bench.at(&format!("{tree}/kernel/acme_net.ko"))).unwrap();
    let lost = "belongs to the host and cannot be restored: it is not below";
    assert_eq!(refused(&bench), format!("module acme_net {lost} {tree}"));
    fs::remove_dir_all(bench.at("/host/lib")).unwrap();
    assert!(refused(&bench).contains(lost));
}

/// The next container does not have the host's modules mounted.
#[test]
fn a_failed_restore_is_an_error_and_stays_recorded() {
    let bench = in_tree();
    run_container(&bench, &[&["--keep"], &REPLACE[..]].concat(), || {}).unwrap();
    fs::rename(bench.at("/host/lib"), bench.at("/away")).unwrap();
    let error = run_container(&bench, &REPLACE, || {}).unwrap_err();
    assert_eq!(
        error.to_string().split(':').next(),
        Some("module acme_net belongs to the host and cannot be restored")
    );
    assert_eq!(bench.loaded_versions(), Vec::<String>::new());
    fs::rename(bench.at("/away"), bench.at("/host/lib")).unwrap();
    run_container(&bench, &REPLACE, || {}).unwrap();
    is_as_before(&bench);
}

/// Modules that an earlier image left have no file on the host; they are unloaded and not loaded again.
#[test]
fn modules_of_another_image_go_for_good() {
    let bench = Bench::new();
    bench.host_module("acme", "");
    bench.image_module("acme_lib", "");
    bench.image_module("acme", "acme_lib");
    for (name, depends) in [("acme_lib", ""), ("acme", "acme_lib"), ("acme_more", "acme")] {
        bench.module(&format!("/old/{name}.ko"), depends, &format!("old-{name}"));
        bench.load_from(&format!("/old/{name}.ko"));
    }
    let error = run_container(&bench, &["acme"], || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().starts_with("module acme_more uses modules to be replaced: "), "{error}");
    run_container(&bench, &["--replace", "acme_more", "acme"], || {
        assert_eq!(bench.loaded_versions(), ["image-acme", "image-acme_lib"]);
    })
    .unwrap();
    assert_eq!(bench.loaded_versions(), Vec::<String>::new());
    assert!(bench.log().contains("module acme is already loaded, from another image: unloading it first"));
}

/// The previous container was killed while the host's modules were unloaded.
#[test]
fn the_host_s_modules_are_not_forgotten_while_another_image_s_stay() {
    let bench = in_tree();
    bench.module("/old/acme.ko", "", "old-acme");
    run_container(&bench, &[&["--keep"], &REPLACE[..]].concat(), || {}).unwrap();
    bench.kernel.unload("acme", &mut |_| {}).unwrap();
    bench.load_from("/old/acme.ko");
    bench.set_references("acme", 1);
    let error = run_container(&bench, &REPLACE, || panic!("must not become ready")).unwrap_err();
    assert!(error.to_string().starts_with("unload acme: 1 reference(s)"), "{error}");
    bench.set_references("acme", 0);
    run_container(&bench, &REPLACE, || assert_eq!(bench.loaded_versions(), ["image-acme"])).unwrap();
    is_as_before(&bench);
}

const REPLACE_BOTH: [&str; 5] = ["--replace", "acme_net", "--replace", "acme", "acme_net"];

/// An image that has both modules, one as a dependency of the other.
fn image_of_both() -> Bench {
    let bench = in_tree();
    bench.image_module("acme_net", "acme");
    bench
}

#[test]
fn dependencies_are_unloaded_if_the_module_fails_to_load() {
    let bench = image_of_both();
    bench.kernel.load_errors.borrow_mut().insert("acme_net of the image".to_owned(), Errno::NOEXEC);
    run_container(&bench, &REPLACE_BOTH, || panic!("must not become ready")).unwrap_err();
    assert_eq!(bench.loaded_versions(), ["host-acme", "host-acme_net"], "{}", bench.log());
}

#[test]
fn dependencies_left_by_a_killed_container_are_unloaded_for_the_hosts() {
    for step in 0..=4 {
        let bench = image_of_both();
        bench.kernel.killed_at.set(Some((step, false)));
        assert!(catch_unwind(AssertUnwindSafe(|| run_container(&bench, &REPLACE_BOTH, || {}))).is_err());
        bench.kernel.killed_at.set(None);
        run_container(&bench, &REPLACE_BOTH, || {
            assert_eq!(bench.loaded_versions(), ["image-acme", "image-acme_net"]);
        })
        .unwrap();
        assert_eq!(bench.loaded_versions(), ["host-acme", "host-acme_net"], "{step}: {}", bench.log());
        assert_eq!(bench.read("/run/farrier/acme_net.replaced"), None);
    }
}

#[test]
fn a_module_that_stays_does_not_prevent_restoring_the_others() {
    let bench = in_tree();
    bench.image_module("acme_lib", "");
    bench.image_module("acme", "acme_lib");
    bench.kernel.permanent.borrow_mut().push("acme_lib".to_owned());
    run_container(&bench, &REPLACE, || {}).unwrap();
    assert_eq!(bench.loaded_versions(), ["host-acme", "image-acme_lib", "host-acme_net"]);
    assert!(bench.log().contains("WARN  unload acme_lib: it is being loaded or unloaded"), "{}", bench.log());
}

#[test]
fn a_failed_restore_does_not_prevent_restoring_the_others() {
    let bench = in_tree();
    bench.host_module("zeta", "");
    bench.load_from_host(&["zeta"]);
    bench.kernel.load_errors.borrow_mut().insert("zeta of the host".to_owned(), Errno::NODEV);
    let error =
        run_container(&bench, &[&REPLACE[..4], &["--replace", "zeta", "acme"]].concat(), || {}).unwrap_err();
    assert!(error.to_string().starts_with("load zeta from"), "{error}");
    assert_eq!(bench.loaded_versions(), ["host-acme", "host-acme_net"]);
    assert_eq!(bench.read("/run/farrier/acme.replaced").as_deref(), Some("acme_net\nacme\nzeta"));
}

#[test]
fn firmware_is_there_while_the_container_runs() {
    const SEARCH_PATH: &str = "/sys/module/firmware_class/parameters/path";
    let bench = in_tree();
    bench.image_module("mst", "");
    bench.write(SEARCH_PATH, "");
    bench.write("/lib/firmware/acme/card.fw", "firmware");
    run_container(&bench, &["--firmware", "mst"], || {
        let directory = bench.read(SEARCH_PATH).unwrap();
        assert_eq!(directory, "/run/farrier/mst.firmware");
        assert_eq!(bench.read(&format!("{directory}/acme/card.fw")).as_deref(), Some("firmware"));
    })
    .unwrap();
    assert_eq!(bench.read(SEARCH_PATH).as_deref(), Some("\0"));
}

/// An in-tree module or a module of the image whose interface carries the default route.
#[test]
fn the_uplink_is_not_taken_from_the_node() {
    let bench = in_tree();
    interface(&bench);
    let route = DEFAULT_ROUTE;
    let refused =
        "refused, because the unload of the driver would disrupt interface acme0 (the node's default route)";
    bench.write("/proc/1/net/route", route);
    let error = run_container(&bench, &REPLACE, || panic!("must not become ready")).unwrap_err();
    assert_eq!(error.to_string(), refused);
    assert_eq!(bench.calls(), Vec::<String>::new());
    is_as_before(&bench);

    bench.write("/proc/1/net/route", "");
    let error = run_container(&bench, &REPLACE, || bench.write("/proc/1/net/route", route)).unwrap_err();
    assert_eq!(error.to_string(), refused);
    assert_eq!(
        bench.loaded_versions(),
        ["image-acme"],
        "the image's modules serve the node until it is drained"
    );
    assert_eq!(bench.read("/run/farrier/acme.ready"), None);

    run(&bench.node(), &with_uplink_allowed(), &mut EndsWhenReady(&mut || {})).unwrap();
    is_as_before(&bench);
}

/// Gives the module `acme` an interface.
fn interface(bench: &Bench) {
    let driver = bench.at("/sys/class/net/acme0/device/driver");
    fs::create_dir_all(&driver).unwrap();
    std::os::unix::fs::symlink("/sys/module/acme", driver.join("module")).unwrap();
}

const DEFAULT_ROUTE: &str = "acme0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";

fn with_uplink_allowed() -> Options {
    let variable = |name: &str| (name == "ALLOW_DISRUPTION").then(|| "uplink".to_owned());
    Options::read(&REPLACE, variable).unwrap()
}

/// Also by the next container, if this one is killed while it waits for the API server.
#[test]
fn a_replacement_with_which_the_api_server_does_not_answer_is_undone() {
    for is_killed in [false, true] {
        let bench = in_tree();
        interface(&bench);
        bench.write("/proc/1/net/route", DEFAULT_ROUTE);
        bench.write("/proc/1/net/tcp", "head\n0: 0200000A:A000 0900000A:192B 01 0:0 0:0 0 0 0 5 1\n");
        bench.kernel.without_link.borrow_mut().push("image-acme".to_owned());
        let start = || run(&bench.node(), &with_uplink_allowed(), &mut EndsWhenReady(&mut || {}));
        if is_killed {
            bench.kernel.at_pause.replace(Some(Box::new(|| std::panic::panic_any(Killed))));
            assert!(catch_unwind(AssertUnwindSafe(start)).is_err());
            bench.kernel.at_pause.replace(None);
            assert_eq!(bench.loaded_versions(), ["image-acme"]);
        }
        let error = start().unwrap_err().to_string();
        assert!(error.starts_with("the API server at 10.0.0.9:6443 did not answer within 120 s"), "{error}");
        is_as_before(&bench);
        assert_eq!(bench.read("/run/farrier/acme.api-servers"), None);
        let again = start().unwrap_err().to_string();
        assert!(again.starts_with("this image's drivers failed on this node"), "{again}");
    }
}

#[test]
fn the_host_s_options_are_honored_or_missed() {
    let bench = in_tree();
    bench.write("/etc/modprobe.d/image.conf", "options acme mode=3\n");
    run_container(&bench, &REPLACE, || {
        assert!(bench.calls().contains(&"load acme of the image mode=3".to_owned()));
    })
    .unwrap();
    assert!(bench.calls().contains(&"load acme of the host".to_owned()));
    assert!(bench.log().contains("WARN  the host's /etc is not visible"), "{}", bench.log());
    bench.write("/proc/1/root/etc/modprobe.d/site.conf", "options acme mode=1\n");
    run_container(&bench, &REPLACE, || {}).unwrap();
    assert!(bench.calls().contains(&"load acme of the host mode=1".to_owned()));
}

#[test]
fn an_image_that_failed_is_not_tried_again_until_it_changes() {
    let bench = in_tree();
    let failing = [&REPLACE[..4], &["--then", "/absent", "acme"]].concat();
    run_container(&bench, &failing, || panic!("must not become ready")).unwrap_err();
    is_as_before(&bench);
    bench.calls();
    let error = run_container(&bench, &failing, || panic!("must not become ready")).unwrap_err().to_string();
    assert!(
        error.starts_with("this image's drivers failed on this node, and are not tried again: run /absent"),
        "{error}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    run_container(&bench, &REPLACE, || {}).unwrap();
    is_as_before(&bench);
}

#[test]
fn firmware_of_another_program_s_search_path_is_refused_before_anything_is_touched() {
    let bench = in_tree();
    bench.write("/sys/module/firmware_class/parameters/path", "/var/lib/kmm\n");
    bench.write("/lib/firmware/acme/card.fw", "firmware");
    let words = [&["--firmware"], &REPLACE[..]].concat();
    let error = run_container(&bench, &words, || panic!("must not become ready")).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the kernel looks for firmware at /var/lib/kmm, which another program has set"),
        "{error}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    is_as_before(&bench);
}

/// A device that appears at the third poll.
struct Appears<'a>(&'a Bench, u32);

impl Signals for Appears<'_> {
    fn received(&mut self) -> Option<&'static str> {
        self.1 += 1;
        if self.1 == 3 {
            self.0.write("/sys/class/acme/state", "up\n");
        }
        (self.1 > 20).then_some("SIGTERM")
    }

    fn wait(&mut self) -> &'static str {
        "SIGTERM"
    }
}

#[test]
fn a_device_is_waited_for() {
    let bench = bench();
    let start =
        |arguments: &[&str]| run(&bench.node(), &Options::parse(arguments).unwrap(), &mut Appears(&bench, 0));
    start(&["--wait-for", "/sys/class/acme", "--ready-when", "/sys/class/acme/state=up", "mst_pci"]).unwrap();
    assert!(bench.log().contains("waiting for /sys/class/acme, to load"), "{}", bench.log());
    let error = start(&["--ready-when", "/sys/class/acme/state=down", "mst_pci"]).unwrap_err();
    assert_eq!(error.to_string(), "received SIGTERM before the drivers were ready");
    assert_eq!(bench.loaded_versions(), Vec::<String>::new());
}

#[test]
fn a_program_runs_after_the_modules_are_loaded() {
    let bench = bench();
    let program = bench.at("/setup").to_str().unwrap().to_owned();
    bench.write("/setup", "#!/bin/sh\necho \"$@\" > \"$0.done\"; exit $(cat \"$0.code\")\n");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    bench.write("/setup.code", "0");
    run_container(&bench, &["--then", &program, "mst_pci", "mst_pciconf"], || {
        assert_eq!(bench.read("/setup.done").as_deref(), Some("mst_pci mst_pciconf\n"));
    })
    .unwrap();
    bench.write("/setup.code", "3");
    let error = run_container(&bench, &["--then", &program, "mst_pci"], || panic!("must not become ready"))
        .unwrap_err();
    assert_eq!(error.to_string(), format!("{program} failed: exit status: 3"));
    assert_eq!(bench.loaded_versions(), Vec::<String>::new());
}

/// Asks the container to end at the n-th poll.
struct EndsAt(u32);

impl Signals for EndsAt {
    fn received(&mut self) -> Option<&'static str> {
        self.0 = self.0.saturating_sub(1);
        (self.0 == 0).then_some("SIGTERM")
    }

    fn wait(&mut self) -> &'static str {
        "SIGTERM"
    }
}

#[test]
fn a_program_ends_when_the_container_is_to_end() {
    let bench = in_tree();
    let program = bench.at("/setup").to_str().unwrap().to_owned();
    bench.write("/setup", "#!/bin/sh\nsleep 100\n");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let arguments = [&["--then", program.as_str()], &REPLACE[..]].concat();
    let begun = Instant::now();
    let error = run(&bench.node(), &Options::parse(&arguments).unwrap(), &mut EndsAt(9)).unwrap_err();
    assert_eq!(error.to_string(), "received SIGTERM before the drivers were ready");
    assert!(begun.elapsed() < Duration::from_mins(1));
    is_as_before(&bench);
}
