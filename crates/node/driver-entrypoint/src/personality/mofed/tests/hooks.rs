//! Programs of the image's author run before and after a replacement, with the names of the interfaces.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use super::*;

const FILE: &str = "/run/mellanox/drivers/.changed-interfaces";
const RESTORE: (&str, &str) = ("RESTORE_DRIVER_ON_POD_TERMINATION", "true");

/// A node with an interface of `mlx5_core` and one of another driver, whose image has both programs.
fn with_hooks() -> Bench {
    let bench = bench();
    interface(&bench, "ens1", "mlx5_core");
    interface(&bench, "ens2", "e1000e");
    for name in ["before", "after"] {
        // The program sees which driver is loaded.
        let said = bench.at("/said");
        let driver = bench.at("/sys/module/mlx5_core/srcversion");
        bench.program(
            name,
            &format!(
                "echo {name} \"$@\" $(cat {}) >> {}\nexit $(cat {}.{name} 2> /dev/null || echo 0)",
                driver.display(),
                said.display(),
                said.display()
            ),
        );
    }
    bench
}

fn interface(bench: &Bench, name: &str, module: &str) {
    let device = bench.at(&format!("/sys/bus/pci/devices/{name}.0"));
    fs::create_dir_all(device.join("driver")).unwrap();
    fs::create_dir_all(device.join("net").join(name)).unwrap();
    symlink(format!("/sys/module/{module}"), device.join("driver/module")).unwrap();
    let link = bench.at(&format!("/sys/class/net/{name}"));
    fs::create_dir_all(&link).unwrap();
    symlink(&device, link.join("device")).unwrap();
}

fn run(bench: &Bench, more: &[(&str, &str)], when_ready: impl FnMut()) -> Result<(), Error> {
    let program = |name: &str| bench.at(&format!("/usr/bin/{name}")).to_str().unwrap().to_owned();
    let (before, after) = (program("before"), program("after"));
    let hooks = [("HOOK_BEFORE", before.as_str()), ("HOOK_AFTER", after.as_str())];
    run_container(bench, &settings(&[&hooks[..], more].concat()), when_ready)
}

fn said(bench: &Bench) -> Vec<String> {
    let text = bench.read("/said").unwrap_or_default();
    let _ = fs::remove_file(bench.at("/said"));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn the_programs_run_around_the_start_and_the_end() {
    let bench = with_hooks();
    run(&bench, &[RESTORE], || {
        assert_eq!(said(&bench), ["before ens1 host-mlx5_core", "after ens1 image-mlx5_core"]);
        assert_eq!(bench.read(FILE), None);
    })
    .unwrap();
    assert_eq!(said(&bench), ["before ens1 image-mlx5_core", "after ens1 host-mlx5_core"]);
    run(&bench, &[], || {}).unwrap();
    said(&bench);
    run(&bench, &[], || {}).unwrap();
    assert_eq!(said(&bench), Vec::<String>::new(), "the drivers were not replaced");
}

#[test]
fn nothing_is_touched_after_a_program_that_fails() {
    let bench = with_hooks();
    bench.write("/said.before", "3");
    let error = run(&bench, &[], || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.ends_with("/usr/bin/before failed: exit status: 3"), "{error}");
    assert_eq!((said(&bench), bench.calls()), (vec!["before ens1 host-mlx5_core".to_owned()], vec![]));
    assert_eq!(bench.read(FILE), None);
}

#[test]
fn the_program_after_also_runs_if_the_replacement_is_undone() {
    let bench = with_hooks();
    bench.kernel.load_errors.borrow_mut().insert("mlx5_ib of the image".to_owned(), Errno::NODEV);
    run(&bench, &[], || panic!("must not become ready")).unwrap_err();
    assert_eq!(said(&bench), ["before ens1 host-mlx5_core", "after ens1 host-mlx5_core"]);
}

#[test]
fn a_program_after_that_fails_runs_again_in_the_next_container() {
    let bench = with_hooks();
    bench.write("/said.after", "4");
    let error = run(&bench, &[], || panic!("must not become ready")).unwrap_err().to_string();
    assert!(error.ends_with("/usr/bin/after failed: exit status: 4"), "{error}");
    said(&bench);
    fs::remove_file(bench.at("/said.after")).unwrap();
    // The new driver gave the interface another name.
    let device = bench.at("/sys/bus/pci/devices/ens1.0/net");
    fs::rename(device.join("ens1"), device.join("ens1np0")).unwrap();
    run(&bench, &[], || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    assert_eq!(said(&bench), ["after ens1np0 image-mlx5_core"]);
}

/// Kills a container while no driver is loaded and no interface exists. Returns the paths of the interface, and where they are now.
fn killed_between_two_drivers(bench: &Bench) -> [(PathBuf, PathBuf); 2] {
    let places = [("/sys/class/net/ens1", "/gone1"), ("/sys/bus/pci/devices/ens1.0/net", "/gone2")]
        .map(|(at, gone)| (bench.at(at), bench.at(gone)));
    let existing = places.clone();
    bench.kernel.after_unload.replace(Some(Box::new(move |_, name| {
        if name == "mlx5_core" {
            for (at, gone) in &existing {
                fs::rename(at, gone).unwrap();
            }
        }
    })));
    // The seventh call unloads the in-tree mlx5_core.
    bench.kernel.killed_at.set(Some((6, true)));
    assert!(catch_unwind(AssertUnwindSafe(|| run(bench, &[], || {}))).is_err());
    bench.kernel.killed_at.set(None);
    assert_eq!(said(bench), ["before ens1 host-mlx5_core"]);
    places
}

/// Brings the interface back once mlx5_core is loaded, before mlx5_ib is.
fn bring_back_with_driver(bench: &Bench, places: [(PathBuf, PathBuf); 2]) {
    bench.kernel.busy_attempts.borrow_mut().insert("mlx5_ib".to_owned(), 1);
    let driver = bench.at("/sys/module/mlx5_core");
    bench.kernel.at_pause.replace(Some(Box::new(move || {
        for (at, gone) in places.iter().filter(|(_, gone)| driver.exists() && gone.exists()) {
            fs::rename(gone, at).unwrap();
        }
    })));
}

#[test]
fn interfaces_of_a_container_that_is_killed_between_two_drivers_are_not_forgotten() {
    let bench = with_hooks();
    let places = killed_between_two_drivers(&bench);
    bring_back_with_driver(&bench, places);
    run(&bench, &[], || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    assert_eq!(said(&bench), ["before", "after ens1 image-mlx5_core"]);
}

#[test]
fn the_program_after_also_runs_if_a_container_that_cannot_start_restores_the_drivers() {
    let bench = with_hooks();
    let places = killed_between_two_drivers(&bench);
    bring_back_with_driver(&bench, places);
    // The next image was not built for this kernel.
    fs::rename(bench.at("/lib/modules"), bench.at("/lib/other")).unwrap();
    run(&bench, &[], || panic!("must not become ready")).unwrap_err();
    assert_eq!(said(&bench), ["after ens1 host-mlx5_core"], "{}", bench.log());
    assert_eq!(bench.read(FILE), None);
}

#[test]
fn a_program_before_that_fails_forgets_no_interface_of_a_killed_container() {
    for has_driver in [false, true] {
        let bench = with_hooks();
        killed_between_two_drivers(&bench);
        if has_driver {
            bench.load_from_host(&["mlx5_core"]);
            interface(&bench, "ens3", "mlx5_core");
        }
        bench.write("/said.before", "3");
        run(&bench, &[], || panic!("must not become ready")).unwrap_err();
        assert_eq!(bench.read(FILE).as_deref(), Some("ens1 ens1.0"), "{has_driver}: {}", bench.log());
    }
}

#[test]
fn a_hook_is_an_absolute_path() {
    let error = Settings::read(&[], |name| (name == "HOOK_AFTER").then(|| "hook.sh".to_owned())).unwrap_err();
    assert_eq!(error, "HOOK_AFTER must be an absolute path without .., not hook.sh");
}
