//! Tests of the `mofed` personality on a test bench, from start to stop.

mod connectivity;
mod hooks;
mod network;
mod safety;

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use rustix::io::Errno;

use super::*;
use crate::{
    kernel::Kernel as _,
    module_file::{ModuleFile, Origin},
    testing::{Bench, EndsNow, EndsWhenReady, Killed, RELEASE},
};

const READY: &str = "/run/mellanox/drivers/.driver-ready";
const BLACKLIST: &str = "/host/etc/modprobe.d/blacklist-ofed-modules.conf";
const VOLATILE: &str = "/host/run/modprobe.d/blacklist-ofed-modules.conf";
const CONTENTS: &str = "/run/mellanox/drivers/.blacklist";
/// Modules that are loaded while the container runs: each module's `srcversion`, sorted by module name.
const OURS: [&str; 9] = [
    "image-ib_cm",
    "image-ib_core",
    "image-ib_uverbs",
    "image-mlx5_core",
    "image-mlx5_ib",
    "image-mlx_compat",
    "host-psample",
    "image-rdma_cm",
    "host-tls",
];
const IN_TREE: [&str; 7] = ["psample", "ib_core", "ib_uverbs", "ib_cm", "rdma_cm", "mlx5_core", "mlx5_ib"];

/// A node with the in-tree stack loaded, and an image that has another stack.
fn bench() -> Bench {
    let bench = Bench::new();
    for (name, depends) in [
        ("psample", ""),
        ("tls", ""),
        ("ib_core", ""),
        ("ib_uverbs", "ib_core"),
        ("ib_cm", "ib_core"),
        ("rdma_cm", "ib_core,ib_cm"),
        ("mlx5_core", "psample"),
        ("mlx5_ib", "mlx5_core,ib_core,ib_uverbs"),
        ("ib_srp", "ib_core,rdma_cm"),
        ("rdma_rxe", "ib_core"),
        ("mlx5_dpll", "mlx5_core"),
        ("smc", "ib_core"),
        ("nvidia_peermem", "ib_core"),
    ] {
        bench.host_module(name, depends);
    }
    for (name, depends) in [
        ("mlx_compat", ""),
        ("ib_core", "mlx_compat"),
        ("ib_uverbs", "ib_core,mlx_compat"),
        ("ib_cm", "ib_core"),
        ("rdma_cm", "ib_core,ib_cm"),
        ("mlx5_core", "mlx_compat,psample,tls"),
        ("mlx5_ib", "mlx5_core,ib_core,ib_uverbs"),
        ("ib_srp", "ib_core,rdma_cm"),
    ] {
        bench.image_module(name, depends);
    }
    bench.load_from_host(&IN_TREE);
    bench.write("/usr/src/ofa_kernel/Module.symvers", "");
    bench
}

fn settings(environment: &[(&str, &str)]) -> Settings {
    let value =
        |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
    Settings::read(&[], value).unwrap()
}

/// Runs a container until it is ready, calls `look`, and stops the container.
fn run_container(bench: &Bench, settings: &Settings, mut when_ready: impl FnMut()) -> Result<(), Error> {
    run(&bench.node(), settings, &mut EndsWhenReady(&mut when_ready))
}

/// Lists the existing blacklist files, including dangling symlinks.
fn blacklists(bench: &Bench) -> Vec<String> {
    let there = |path: &&&str| bench.at(path).symlink_metadata().is_ok();
    [BLACKLIST, VOLATILE, CONTENTS].iter().filter(there).map(ToString::to_string).collect()
}

/// Kills a container after it has unloaded the first module.
fn kill_on_the_way(bench: &Bench) {
    bench.kernel.killed_at.set(Some((2, true)));
    assert!(catch_unwind(AssertUnwindSafe(|| run_container(bench, &settings(&[]), || {}))).is_err());
    bench.kernel.killed_at.set(None);
}

#[test]
fn a_blacklist_is_gone_at_the_next_boot() {
    // With the host's /run/modprobe.d, no other file is written.
    let bench = bench();
    std::fs::create_dir_all(bench.at("/host/run/modprobe.d")).unwrap();
    kill_on_the_way(&bench);
    assert_eq!(blacklists(&bench), [VOLATILE]);
    assert!(bench.read(VOLATILE).unwrap().contains("\nblacklist mlx5_core\n"));
    run_container(&bench, &settings(&[]), || assert_eq!(blacklists(&bench), Vec::<String>::new())).unwrap();

    // Without it, the file on disk is only a symlink to the volume.
    let bench = self::bench();
    kill_on_the_way(&bench);
    assert_eq!(blacklists(&bench), [BLACKLIST, CONTENTS]);
    assert_eq!(std::fs::read_link(bench.at(BLACKLIST)).unwrap().to_str(), Some(CONTENTS));
    assert!(bench.read(CONTENTS).unwrap().contains("\nblacklist mlx5_core\n"));
    let written = std::fs::read_dir(bench.at("/host/etc/modprobe.d")).unwrap().count();
    assert_eq!(written, 1);
    run_container(&bench, &settings(&[]), || assert_eq!(blacklists(&bench), Vec::<String>::new())).unwrap();

    // A container of an earlier version was killed.
    let bench = self::bench();
    bench.write(BLACKLIST, "blacklist mlx5_core\n");
    run_container(&bench, &settings(&[]), || assert_eq!(blacklists(&bench), Vec::<String>::new())).unwrap();
}

fn refusal(bench: &Bench, environment: &[(&str, &str)]) -> String {
    let error = run_container(bench, &settings(environment), || panic!("must not become ready")).unwrap_err();
    assert_eq!(bench.read(READY), None);
    assert_eq!(blacklists(bench), Vec::<String>::new());
    format!("{error} | {}", error.hint())
}

#[test]
fn the_stack_is_replaced_and_exposed_step_by_step() {
    let bench = bench();
    bench.write(READY, "");
    run_container(&bench, &settings(&[]), || {
        assert_eq!(bench.loaded_versions(), OURS);
        assert_eq!(bench.read(READY).as_deref(), Some(""));
        assert_eq!(blacklists(&bench), Vec::<String>::new());
    })
    .unwrap();
    assert_eq!(
        bench.calls(),
        [
            "load tls of the host",
            "unload rdma_cm",
            "unload ib_cm",
            "unload mlx5_ib",
            "unload ib_uverbs",
            "unload ib_core",
            "unload mlx5_core",
            "load mlx_compat of the image",
            "load mlx5_core of the image",
            "load ib_core of the image",
            "load ib_uverbs of the image",
            "load mlx5_ib of the image",
            "load ib_cm of the image",
            "load rdma_cm of the image",
            "bind /usr/src /run/mellanox/drivers/usr/src",
            "unmount /run/mellanox/drivers/usr/src",
        ]
    );
    assert_eq!(bench.read(READY), None);
    assert_eq!(bench.loaded_versions(), OURS, "the drivers stay loaded unless restoring is requested");
}

#[test]
fn the_same_drivers_are_not_reloaded() {
    let bench = bench();
    run_container(&bench, &settings(&[]), || {}).unwrap();
    bench.calls();
    run_container(&bench, &settings(&[]), || assert!(bench.read(READY).is_some())).unwrap();
    assert_eq!(
        bench.calls(),
        ["bind /usr/src /run/mellanox/drivers/usr/src", "unmount /run/mellanox/drivers/usr/src"]
    );
}

#[test]
fn the_hosts_drivers_come_back_where_asked_to() {
    let bench = bench();
    let before = bench.loaded_versions();
    run_container(&bench, &settings(&[("RESTORE_DRIVER_ON_POD_TERMINATION", "true")]), || {
        assert_eq!(bench.loaded_versions(), OURS);
    })
    .unwrap();
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
    assert_eq!(bench.read("/run/mellanox/drivers/.replaced"), None);
}

#[test]
fn storage_modules_are_unloaded_only_with_leave() {
    let bench = bench();
    bench.load_from_host(&["ib_srp"]);
    assert_eq!(
        refusal(&bench, &[]),
        "storage modules are loaded, and would be unloaded with the drivers to be replaced: ib_srp | set \
         UNLOAD_STORAGE_MODULES=true to have them unloaded, or unload them on the node"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    run_container(&bench, &settings(&[("UNLOAD_STORAGE_MODULES", "true")]), || {
        assert!(bench.loaded_versions().contains(&"image-ib_srp".to_owned()));
    })
    .unwrap();
}

#[test]
fn other_vendors_modules_are_unloaded_and_kept_away_only_with_leave() {
    let bench = bench();
    bench.load_from_host(&["rdma_rxe"]);
    assert_eq!(
        refusal(&bench, &[]),
        "third-party RDMA modules are loaded, and would be unloaded with the drivers to be replaced: rdma_rxe | set \
         UNLOAD_THIRD_PARTY_RDMA_MODULES=true to have them unloaded, or unload them on the node"
    );
    run_container(&bench, &settings(&[("UNLOAD_THIRD_PARTY_RDMA_MODULES", "true")]), || {
        assert_eq!(bench.loaded_versions(), OURS);
    })
    .unwrap();
    assert!(
        bench.log().contains("WARN  module rdma_rxe was loaded before, but is not loaded now"),
        "{}",
        bench.log()
    );
}

#[test]
fn an_unknown_user_of_the_stack_is_named_before_anything_is_touched() {
    let bench = bench();
    bench.load_from_host(&["smc"]);
    let refusal = refusal(&bench, &[]);
    assert!(
        refusal.starts_with("module smc uses ib_core, and this image has no replacement for it"),
        "{refusal}"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn peer_memory_goes_first_and_in_use_it_ends_the_start() {
    let bench = bench();
    bench.load_from_host(&["nvidia_peermem"]);
    bench.set_references("nvidia_peermem", 2);
    assert_eq!(
        refusal(&bench, &[]).split(" | ").next().unwrap(),
        "unload nvidia_peermem: 2 reference(s) that no module holds; in use by an unknown user (no process that this \
         container can see)"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    bench.set_references("nvidia_peermem", 0);
    run_container(&bench, &settings(&[]), || assert_eq!(bench.loaded_versions(), OURS)).unwrap();
    assert_eq!(bench.calls()[0], "unload nvidia_peermem");
}

#[test]
fn a_process_that_uses_a_device_is_named() {
    let bench = bench();
    bench.kernel.references.borrow_mut().insert("ib_uverbs".to_owned(), 1);
    bench.load_from_host(&["tls"]);
    bench.write("/proc/4711/comm", "ib_write_bw\n");
    std::fs::create_dir_all(bench.at("/proc/4711/fd")).unwrap();
    std::os::unix::fs::symlink("/dev/infiniband/uverbs0", bench.at("/proc/4711/fd/7")).unwrap();
    assert_eq!(
        refusal(&bench, &[]).split(" | ").next().unwrap(),
        "unload ib_uverbs: 1 reference(s) that no module holds; in use by process 4711 (ib_write_bw) with \
         /dev/infiniband/uverbs0 open"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn unloaded_modules_are_restored_if_the_rest_stays() {
    let bench = bench();
    let before = bench.loaded_versions();
    bench.kernel.references.borrow_mut().insert("ib_core".to_owned(), 1);
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with("unload ib_core: 1 reference(s) that no module holds"), "{refusal}");
    assert!(bench.kernel.pauses.get() > 0, "the unload retries, because references are often dropped soon");
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
}

#[test]
fn the_hosts_drivers_come_back_when_the_kernel_refuses_ours() {
    let bench = bench();
    let before = bench.loaded_versions();
    // Only the image has mlx_compat, and it is the first module to be loaded.
    bench.kernel.load_errors.borrow_mut().insert("mlx_compat".to_owned(), Errno::NOKEY);
    let refusal = refusal(&bench, &[]);
    assert!(
        refusal.contains(&format!(
            "load mlx_compat from /lib/modules/{RELEASE}/updates/mlx_compat.ko: it is not signed, and this \
             kernel requires signatures (Secure Boot)"
        )) && refusal.contains("\n    kernel: mlx_compat: no |")
            && refusal.contains("mokutil"),
        "{refusal}"
    );
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
}

/// Without the host's files, the unloaded drivers could not be loaded again.
#[test]
fn without_the_host_s_modules_nothing_is_taken_away() {
    let bench = bench();
    bench.image_module("mlx5_core", "mlx_compat");
    std::fs::remove_dir_all(bench.at("/host/lib")).unwrap();
    let refusal = refusal(&bench, &[]);
    let lost = format!(
        "module rdma_cm belongs to the host and cannot be restored: it is not below /host/lib/modules/{RELEASE}"
    );
    assert!(refusal.starts_with(&lost), "{refusal}");
    assert_eq!(bench.calls(), Vec::<String>::new());
    // The operators of the first generation do not mount the host's modules.
    let first = Settings::read(&["--expose-root"], |_| None).unwrap();
    run_container(&bench, &first, || {
        assert!(bench.loaded_versions().contains(&"image-mlx5_core".to_owned()));
    })
    .unwrap();
}

#[test]
fn drivers_that_something_else_loads_meanwhile_are_not_called_ready() {
    let bench = bench();
    let before = bench.loaded_versions();
    let path = bench.at(&format!("/host/lib/modules/{RELEASE}/kernel/mlx5_core.ko"));
    let (_, file) = ModuleFile::of(&path, Origin::Host).unwrap();
    bench.kernel.after_unload.replace(Some(Box::new(move |kernel, name| {
        if name == "mlx5_core" {
            let _ = kernel.load(&file, "", &mut |_| {});
        }
    })));
    let refusal = refusal(&bench, &[]);
    assert!(
        refusal
            .starts_with("something else on the node has loaded a mlx5_core that is not the image's | mount"),
        "{refusal}"
    );
    let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
    assert_eq!(after, before);
}

#[test]
fn an_image_for_another_kernel_touches_nothing() {
    let bench = Bench::new();
    bench.host_module("mlx5_core", "");
    bench.module("/lib/modules/6.1.0-1/updates/mlx5_core.ko", "", "image-mlx5_core");
    let refusal = refusal(&bench, &[]);
    assert!(
        refusal.starts_with(&format!("module mlx5_core is missing for kernel {RELEASE}: looked in")),
        "{refusal}"
    );
    assert!(refusal.contains("this image was not built for the running kernel"), "{refusal}");
}

#[test]
fn built_in_modules_are_not_replaced() {
    let bench = bench();
    bench.write(
        &format!("/host/lib/modules/{RELEASE}/modules.builtin"),
        "kernel/drivers/infiniband/core/ib_core.ko\n",
    );
    let refusal = refusal(&bench, &[]);
    assert!(refusal.starts_with("ib_core is built into this kernel, and cannot be replaced"), "{refusal}");
    assert_eq!(bench.calls(), Vec::<String>::new());
}

#[test]
fn an_image_without_headers_exposes_none() {
    let bench = bench();
    std::fs::remove_dir_all(bench.at("/usr/src")).unwrap();
    run_container(&bench, &settings(&[]), || assert!(bench.read(READY).is_some())).unwrap();
    assert!(bench.log().contains("WARN  this image has no /usr/src: no peer memory can be built"));
    assert!(!bench.calls().iter().any(|call| call.starts_with("bind")));
}

#[test]
fn the_blacklist_follows_the_variables() {
    let bench = bench();
    let text = |environment: &[(&str, &str)]| {
        let settings = settings(environment);
        let node = bench.node();
        settings.blacklist(&node).text()
    };
    assert!(
        text(&[])
            .ends_with("blacklist ib_cm\nblacklist mlx5_vdpa\nblacklist mlx5_fwctl\nblacklist mlx5_dpll\n")
    );
    let all = [
        ("OFED_BLACKLIST_MODULES", "mlx5_core"),
        ("THIRD_PARTY_RDMA_MODULES", "siw"),
        ("UNLOAD_THIRD_PARTY_RDMA_MODULES", "1"),
        ("MLX5_AUXILIARY_MODULES", ""),
    ];
    assert!(
        text(&all).ends_with("removed afterwards.\nblacklist mlx5_core\nblacklist siw\n"),
        "{}",
        text(&all)
    );
}

#[test]
fn the_first_generation_exposes_the_root() {
    let bench = bench();
    let settings = Settings::read(&["--expose-root"], |_| None).unwrap();
    run_container(&bench, &settings, || assert!(bench.read("/.driver-ready").is_some())).unwrap();
    assert_eq!(
        bench.calls()[14..],
        [
            "make /sys runbindable",
            "make /sys private",
            "make / private",
            "bind / /run/mellanox/drivers",
            "unmount /run/mellanox/drivers",
        ]
    );
    assert_eq!(bench.read("/.driver-ready"), None);
}

#[test]
fn nfs_over_rdma_is_loaded_on_request_if_the_image_has_it() {
    let bench = bench();
    let enabled = settings(&[("ENABLE_NFSRDMA", "true"), ("UNLOAD_STORAGE_MODULES", "true")]);
    run_container(&bench, &enabled, || {}).unwrap();
    assert!(bench.log().contains("WARN  ENABLE_NFSRDMA is set, but this image was built without rpcrdma"));
    bench.image_module("rpcrdma", "rdma_cm");
    run_container(&bench, &enabled, || {
        assert!(bench.loaded_versions().contains(&"image-rpcrdma".to_owned()));
    })
    .unwrap();
}

#[test]
fn a_signal_before_the_replacement_stops_the_start() {
    let bench = bench();
    let error = run(&bench.node(), &settings(&[]), &mut EndsNow).unwrap_err();
    assert_eq!(error.to_string(), "received SIGTERM before the drivers were ready");
    assert_eq!(bench.calls(), Vec::<String>::new());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever step a container is killed at, the next one reaches the same state, and so does its stop.
    #[test]
    fn after_a_kill_at_any_step_the_next_start_ends_the_same(
        first in 0usize..40,
        second in 0usize..40,
        takes_place in any::<bool>(),
        storage in any::<bool>(),
    ) {
        let bench = bench();
        let mut before = bench.loaded_versions();
        let settings = settings(&[
            ("RESTORE_DRIVER_ON_POD_TERMINATION", "true"),
            ("UNLOAD_STORAGE_MODULES", "true"),
        ]);
        let mut ours: Vec<String> = OURS.map(str::to_owned).to_vec();
        if storage {
            bench.load_from_host(&["ib_srp"]);
            before = bench.loaded_versions();
            ours.push("image-ib_srp".to_owned());
        }
        ours.sort_by_key(|name| name.split_once('-').map(|(_, name)| name.to_owned()));
        for at in [first, second] {
            bench.kernel.killed_at.set(Some((at, takes_place)));
            let life = catch_unwind(AssertUnwindSafe(|| run_container(&bench, &settings, || {})));
            let fine = life.map_or_else(|death| death.is::<Killed>(), |life| life.is_ok());
            prop_assert!(fine, "{}", bench.log());
        }
        bench.kernel.killed_at.set(None);
        run_container(&bench, &settings, || {
            assert_eq!(bench.loaded_versions(), ours, "{}", bench.log());
            assert!(bench.read(READY).is_some());
            let mounts = bench.read("/proc/self/mountinfo").unwrap();
            assert_eq!(mounts.matches("/run/mellanox/drivers/usr/src").count(), 1);
        }).unwrap();
        let after: Vec<String> = bench.loaded_versions().into_iter().filter(|name| name != "host-tls").collect();
        prop_assert_eq!(after, before);
        prop_assert_eq!(bench.read(READY), None);
        prop_assert_eq!(blacklists(&bench), Vec::<String>::new());
    }
}
