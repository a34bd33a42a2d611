mod fabric_manager;

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

use super::*;
use crate::testing::{Bench, EndsWhenReady, Killed, RELEASE, elf_module};

const SEARCH_PATH: &str = "/sys/module/firmware_class/parameters/path";
const MOUNTS: &str =
    "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /run/nvidia rw shared:5 - tmpfs tmpfs rw\n";

/// Calls of a start on a node without a driver.
const LOADS: [&str; 6] = [
    "load ipmi_msghandler of the host",
    "load ipmi_devintf of the host",
    "load nvidia of the image",
    "load nvidia_uvm of the image",
    "load video of the host",
    "load nvidia_modeset of the image",
];
const EXPOSES: [&str; 4] =
    ["make /sys runbindable", "make /sys private", "make / private", "bind / /run/nvidia/driver"];
const STOPS: [&str; 4] =
    ["unload nvidia_modeset", "unload nvidia_uvm", "unload nvidia", "unmount /run/nvidia/driver"];

/// Helper modules of the host, which stay loaded.
const LEFT: [&str; 3] = ["host-ipmi_devintf", "host-ipmi_msghandler", "host-video"];

/// Asks the container to end at the n-th poll, from 0 on.
struct EndsAt(usize);

impl Signals for EndsAt {
    fn received(&mut self) -> Option<&'static str> {
        match self.0.checked_sub(1) {
            Some(left) => {
                self.0 = left;
                None
            }
            None => Some("SIGINT"),
        }
    }

    fn wait(&mut self) -> &'static str {
        "SIGTERM"
    }
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench.write("/proc/self/mountinfo", MOUNTS);
    bench.write(SEARCH_PATH, "\n");
    bench.write("/lib/firmware/nvidia/535.1/gsp_ga10x.bin", "firmware");
    bench.image_module("nvidia", "");
    bench.image_module("nvidia_uvm", "nvidia");
    bench.image_module("nvidia_modeset", "nvidia,video");
    bench.image_module("nvidia_peermem", "nvidia,ib_core");
    for (name, depends) in [("ipmi_msghandler", ""), ("ipmi_devintf", "ipmi_msghandler"), ("video", "")] {
        bench.host_module(name, depends);
    }
    bench
}

/// Adds OFED: its core module is loaded, the node has a Mellanox adapter, and OFED's ready file exists.
fn with_ofed(bench: &Bench) {
    bench.host_module("ib_core", "");
    bench.load_from_host(&["ib_core"]);
    bench.write("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x15b3\n");
    bench.write(state::OFED_READY, "");
}

fn digest(text: &str) -> Settings {
    Settings { config_digest: Some(text.into()), ..Settings::default() }
}

fn start_and_stop(bench: &Bench, settings: &Settings) -> Result<(), Error> {
    run(&bench.node(), settings, &mut EndsWhenReady(&mut || {}))
}

/// Starts a container and kills it once it is ready; its modules, mounts and files stay.
fn start_and_kill(bench: &Bench, settings: &Settings) {
    let killed = catch_unwind(AssertUnwindSafe(|| {
        run(&bench.node(), settings, &mut EndsWhenReady(&mut || std::panic::resume_unwind(Box::new(Killed))))
    }));
    assert!(killed.is_err());
    bench.calls();
}

fn assert_gone(bench: &Bench) {
    assert!(
        bench.loaded_versions().iter().all(|module| !module.starts_with("image-")),
        "{:?}",
        bench.loaded_versions()
    );
    assert_eq!(bench.read("/proc/self/mountinfo").unwrap().trim_end(), MOUNTS.trim_end());
    assert_eq!(bench.read(SEARCH_PATH).unwrap().trim_matches(['\0', '\n']), "");
    for path in [state::PID_FILE, state::DAEMONS_STATUS_FILE, state::PROBE_FILE, state::DIGEST_FILE] {
        assert_eq!(bench.read(path), None, "{path}");
    }
}

#[test]
fn the_driver_is_loaded_and_unloaded_in_the_operators_order() {
    let bench = bench();
    let mut seen = None;
    let mut look = || {
        let text = |path| bench.read(path).unwrap();
        seen = Some((
            text(state::PID_FILE),
            text(state::DAEMONS_STATUS_FILE),
            text(state::DIGEST_FILE),
            text(SEARCH_PATH),
        ));
        bench.write(state::PROBE_FILE, "");
    };
    run(&bench.node(), &digest("1234"), &mut EndsWhenReady(&mut look)).unwrap();
    let pid = format!("{}\n", std::process::id());
    assert_eq!(seen, Some((pid, "Ready\n".into(), "1234\n".into(), FIRMWARE.host_path.into())));
    assert_eq!(
        bench.read(&format!("{}/nvidia/535.1/gsp_ga10x.bin", FIRMWARE.host_path)).unwrap(),
        "firmware"
    );
    let expected: Vec<&str> = LOADS.into_iter().chain(EXPOSES).chain(STOPS).collect();
    assert_eq!(bench.calls(), expected);
    assert_eq!(bench.loaded_versions(), LEFT);
    assert_gone(&bench);
}

#[test]
fn parameters_go_to_their_module() {
    let bench = bench();
    bench.write("/drivers/nvidia.conf", "NVreg_EnableGpuFirmware=0 NVreg_A=1\nNVreg_B=\"x y\"\n");
    bench.write("/drivers/nvidia-uvm.conf", "uvm_debug_prints=1");
    start_and_stop(&bench, &Settings::default()).unwrap();
    let calls = bench.calls();
    let nvidia = "load nvidia of the image NVreg_EnableGpuFirmware=0 NVreg_A=1 NVreg_B=\"x y\"";
    assert!(calls.iter().any(|call| call == nvidia), "{calls:?}");
    assert!(calls.iter().any(|call| call == "load nvidia_uvm of the image uvm_debug_prints=1"), "{calls:?}");
    assert!(!bench.at(FIRMWARE.host_path).exists(), "no firmware is copied");
}

#[test]
fn memory_of_coherent_gpus_stays_with_the_driver_unless_configured() {
    let bench = bench();
    let info = "depends=\0srcversion=image-nvidia\0parmtype=NVreg_CoherentGPUMemoryMode:charp\0";
    let file = format!("/lib/modules/{RELEASE}/updates/nvidia.ko");
    std::fs::write(bench.at(&file), elf_module(info)).unwrap();
    let default = "load nvidia of the image NVreg_CoherentGPUMemoryMode=driver";
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert_eq!(bench.calls()[2], default);
    bench.write("/drivers/nvidia.conf", "NVreg_CoherentGPUMemoryMode=numa");
    start_and_stop(&bench, &Settings::default()).unwrap();
    let calls = bench.calls();
    assert!(calls.contains(&format!("{default} NVreg_CoherentGPUMemoryMode=numa")), "{calls:?}");
}

#[test]
fn modules_of_another_type_than_the_operator_asks_for_are_named() {
    for (license, open_modules, is_named) in [
        ("Dual MIT/GPL", Some(false), true),
        ("NVIDIA", Some(true), true),
        ("Dual MIT/GPL", Some(true), false),
        ("NVIDIA", Some(false), false),
        ("NVIDIA", None, false),
    ] {
        let bench = bench();
        let info = format!("depends=\0srcversion=image-nvidia\0license={license}\0");
        let file = format!("/lib/modules/{RELEASE}/updates/nvidia.ko");
        std::fs::write(bench.at(&file), elf_module(&info)).unwrap();
        start_and_stop(&bench, &Settings { open_modules, ..Settings::default() }).unwrap();
        let is_warned = bench.log().contains("WARN  kernelModuleType is ");
        assert_eq!(is_warned, is_named, "{license} {open_modules:?}: {}", bench.log());
    }
}

#[test]
fn bad_parameters_end_the_start_before_the_old_driver_goes() {
    let bench = bench();
    start_and_kill(&bench, &digest("1"));
    bench.write("/drivers/nvidia.conf", "NVreg_A=\"1");
    let error = start_and_stop(&bench, &digest("2")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the parameters of nvidia in /drivers/nvidia.conf cannot be used: a quotation mark in line 1 is not closed"
    );
    assert_eq!(bench.calls(), [""; 0]);
}

#[test]
fn an_image_that_cannot_be_loaded_leaves_the_old_driver() {
    let refused = |change: &dyn Fn(&Bench)| {
        let bench = bench();
        start_and_kill(&bench, &digest("1"));
        let loaded = bench.loaded_versions();
        change(&bench);
        let error = start_and_stop(&bench, &digest("2")).unwrap_err();
        assert_eq!((bench.calls(), bench.loaded_versions()), (vec![], loaded));
        assert_eq!(bench.read(state::DAEMONS_STATUS_FILE).unwrap(), "Ready\n");
        error.to_string()
    };
    let modules = format!("/lib/modules/{RELEASE}");
    let error = refused(&|bench| std::fs::remove_dir_all(bench.at(&modules)).unwrap());
    let missing = format!("module nvidia is missing for kernel {RELEASE}: looked in ");
    assert!(error.starts_with(&missing), "{error}");
    let error = refused(&|bench| bench.write(&format!("{modules}/updates/nvidia.ko"), "cut off"));
    assert!(error.ends_with("nvidia.ko is not a kernel module: not a 64-bit ELF file"), "{error}");
    let error = refused(&|bench| bench.image_module("nvidia_uvm", "nvidia,other"));
    let missing =
        format!("module other, which nvidia_uvm needs, is missing for kernel {RELEASE}: looked in ");
    assert!(error.starts_with(&missing), "{error}");
    // A driver of the host does not count as the image's.
    let error = refused(&|bench| {
        std::fs::remove_dir_all(bench.at(&modules)).unwrap();
        bench.host_module("nvidia", "");
        bench.host_module("nvidia_uvm", "nvidia");
    });
    assert!(error.starts_with("module nvidia is missing for kernel"), "{error}");
}

#[test]
fn the_same_configuration_leaves_the_modules_alone() {
    let bench = bench();
    start_and_kill(&bench, &digest("1234"));
    // Pods start to use the driver.
    bench.kernel.references.borrow_mut().insert("nvidia".into(), 3);
    let mut free = || {
        bench.kernel.references.borrow_mut().clear();
    };
    run(&bench.node(), &digest("1234"), &mut EndsWhenReady(&mut free)).unwrap();
    let expected: Vec<&str> =
        ["unmount /run/nvidia/driver"].into_iter().chain(EXPOSES).chain(STOPS).collect();
    assert_eq!(bench.calls(), expected);
    assert!(bench.log().contains("only user space is set up again"), "{}", bench.log());
}

#[test]
fn another_configuration_or_other_modules_replace_the_driver() {
    let reloads = |bench: &Bench, settings: &Settings| {
        start_and_stop(bench, settings).unwrap();
        bench.calls().starts_with(&STOPS.map(str::to_owned)[..3])
    };
    let bench = bench();
    start_and_kill(&bench, &digest("1"));
    assert!(reloads(&bench, &digest("2")));
    start_and_kill(&bench, &digest("1"));
    assert!(reloads(&bench, &Settings::default()), "without a digest the driver is reloaded");
    start_and_kill(&bench, &digest("1"));
    let path = format!("/lib/modules/{RELEASE}/updates/nvidia.ko");
    bench.module(&path, "", "image-rebuilt");
    assert!(reloads(&bench, &digest("1")), "a rebuilt image under the same name");
}

#[test]
fn a_driver_in_use_is_refused_by_who_uses_it() {
    let bench = bench();
    start_and_kill(&bench, &digest("1"));
    bench.host_module("nvidia_vgpu_vfio", "nvidia");
    bench.load_from_host(&["nvidia_vgpu_vfio"]);
    bench.kernel.references.borrow_mut().insert("nvidia_uvm".into(), 1);
    bench.write("/proc/4711/comm", "python3\n");
    bench.write("/proc/4711/fd/keep", "");
    std::os::unix::fs::symlink("/dev/nvidia-uvm", bench.at("/proc/4711/fd/5")).unwrap();
    let loaded = bench.loaded_versions();
    // The fake kernel updates reference counts when it loads a module.
    bench.host_module("other", "");
    bench.load_from_host(&["other"]);
    let error = start_and_stop(&bench, &digest("2")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the NVIDIA driver is in use and stays loaded: unload nvidia_uvm: 1 reference(s) that no module holds; in use by \
         process 4711 (python3) with /dev/nvidia-uvm open; unload nvidia: used by nvidia_vgpu_vfio"
    );
    assert!(error.hint().starts_with("stop the pods and processes that use the GPUs"));
    assert_eq!(bench.calls(), [""; 0], "nothing was touched");
    assert!(loaded.iter().all(|module| bench.loaded_versions().contains(module)));
}

#[test]
fn a_refused_stop_keeps_the_root_and_is_logged() {
    let bench = bench();
    let mut hold = || {
        bench.kernel.references.borrow_mut().insert("nvidia".into(), 1);
        bench.host_module("other", "");
        bench.load_from_host(&["other"]);
    };
    let error = run(&bench.node(), &digest("1"), &mut EndsWhenReady(&mut hold)).unwrap_err();
    assert!(error.to_string().contains("by an unknown user"), "{error}");
    assert!(bench.read("/proc/self/mountinfo").unwrap().contains("/run/nvidia/driver"));
    assert_eq!(
        bench.read(state::DIGEST_FILE).unwrap(),
        "1\n",
        "kept, because the next start may want the same configuration"
    );
    assert_eq!(bench.read(state::DAEMONS_STATUS_FILE).unwrap(), "NotReady\n");
}

#[test]
fn a_second_instance_is_refused_and_changes_nothing() {
    let bench = bench();
    let mut second = || {
        bench.calls();
        let error = start_and_stop(&bench, &Settings::default()).unwrap_err();
        let begins =
            "the driver container is already running on this node: /run/nvidia/nvidia-driver.pid is locked";
        assert!(error.to_string().starts_with(begins), "{error}");
        assert_eq!(bench.calls(), [""; 0]);
        assert_eq!(bench.read(state::DAEMONS_STATUS_FILE).unwrap(), "Ready\n");
    };
    run(&bench.node(), &Settings::default(), &mut EndsWhenReady(&mut second)).unwrap();
}

#[test]
fn a_missing_gpu_is_named_in_the_error() {
    let bench = bench();
    bench.kernel.load_errors.borrow_mut().insert("nvidia".into(), Errno::NODEV);
    let error = start_and_stop(&bench, &Settings::default()).unwrap_err();
    assert_eq!(error.to_string(), "no NVIDIA GPU was found by the driver (ENODEV)\n    kernel: nvidia: no");
    assert!(error.hint().contains("lspci -d 10de:"), "{}", error.hint());
    assert_gone(&bench);
    bench.host_module("nouveau", "");
    bench.load_from_host(&["nouveau"]);
    let error = start_and_stop(&bench, &Settings::default()).unwrap_err();
    assert!(error.hint().starts_with("nouveau is loaded and may hold the GPU"), "{}", error.hint());
}

#[test]
fn failed_or_missing_helpers_are_ignored() {
    let bench = bench();
    bench.kernel.load_errors.borrow_mut().insert("ipmi_devintf".into(), Errno::NODEV);
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(
        bench.log().contains("INFO  i2c_core is not installed, which is not an error"),
        "{}",
        bench.log()
    );
    assert!(bench.log().contains("WARN  continuing without ipmi_devintf: "), "{}", bench.log());
}

#[test]
fn the_hosts_modules_are_found_through_its_first_process() {
    let bench = bench();
    let hosts = bench.at("/proc/1/root/lib/modules");
    std::fs::create_dir_all(&hosts).unwrap();
    std::fs::rename(bench.at(&format!("/host/lib/modules/{RELEASE}")), hosts.join(RELEASE)).unwrap();
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(bench.log().contains("loaded module video of the host (/proc/1/root/"), "{}", bench.log());
}

#[test]
fn peer_memory_is_loaded_where_ofed_is_ready() {
    let settings = Settings { rdma: true, ..Settings::default() };
    let loads = |bench: &Bench, settings: &Settings| {
        start_and_stop(bench, settings).unwrap();
        bench.calls().contains(&"load nvidia_peermem of the image".to_owned())
    };
    let bench = bench();
    assert!(!loads(&bench, &settings), "no adapter");
    with_ofed(&bench);
    assert!(loads(&bench, &settings));
    assert_gone(&bench);
    assert!(!loads(&bench, &Settings::default()), "not enabled");
    std::fs::remove_file(bench.at(state::OFED_READY)).unwrap();
    assert!(!loads(&bench, &settings), "OFED not ready");
    assert!(!loads(&bench, &Settings { host_ofed: true, ..settings.clone() }), "the host has none");
    bench.host_module("mlx5_core", "ib_core");
    bench.load_from_host(&["mlx5_core"]);
    assert!(loads(&bench, &Settings { host_ofed: true, ..settings }));
}

#[test]
fn peer_memory_that_fails_does_not_cost_the_driver() {
    let bench = bench();
    with_ofed(&bench);
    bench.kernel.load_errors.borrow_mut().insert("nvidia_peermem".into(), Errno::INVAL);
    start_and_stop(&bench, &Settings { rdma: true, ..Settings::default() }).unwrap();
    assert!(bench.log().contains("WARN  continuing without nvidia_peermem: "), "{}", bench.log());
}

#[test]
fn a_signal_at_any_step_undoes_the_start() {
    let mut steps = 0;
    loop {
        let bench = bench();
        let ended = run(&bench.node(), &digest("1"), &mut EndsAt(steps));
        assert_gone(&bench);
        match ended {
            Ok(()) => break,
            Err(error) => assert_eq!(error.to_string(), "received SIGINT before the drivers were ready"),
        }
        steps += 1;
    }
    assert!(steps >= 5, "asked {steps} times");
}

#[test]
fn after_a_kill_at_any_call_the_next_start_has_the_same_result() {
    let calls = LOADS.len() + EXPOSES.len() + STOPS.len();
    for call in 0..calls {
        for takes_place in [false, true] {
            let bench = bench();
            bench.kernel.killed_at.set(Some((call, takes_place)));
            let first = catch_unwind(AssertUnwindSafe(|| start_and_stop(&bench, &digest("1"))));
            assert!(first.is_err(), "the container must be killed at call {call}");
            bench.kernel.killed_at.set(None);
            let mut at_ready = vec![];
            let mut look = || at_ready = bench.loaded_versions();
            run(&bench.node(), &digest("1"), &mut EndsWhenReady(&mut look)).unwrap();
            assert!(at_ready.contains(&"image-nvidia_modeset".to_owned()), "call {call}: {at_ready:?}");
            assert_eq!(bench.loaded_versions(), LEFT, "call {call}");
            assert_gone(&bench);
        }
    }
}

#[test]
fn a_killed_start_does_not_count_as_the_old_configuration() {
    let bench = bench();
    start_and_kill(&bench, &digest("1"));
    // Killed after the second configuration's modules were loaded.
    bench.kernel.killed_at.set(Some((7, true)));
    let killed = catch_unwind(AssertUnwindSafe(|| start_and_stop(&bench, &digest("2"))));
    assert!(killed.is_err());
    bench.kernel.killed_at.set(None);
    assert!(bench.loaded_versions().contains(&"image-nvidia_uvm".to_owned()), "{:?}", bench.calls());
    bench.calls();
    start_and_stop(&bench, &digest("1")).unwrap();
    let first = bench.calls().remove(0);
    assert!(first.starts_with("unload nvidia"), "{first}");
}

#[test]
fn nvidia_drm_is_loaded_where_it_is_asked_for() {
    let bench = bench();
    let settings = Settings { drm: true, ..Settings::default() };
    let error = start_and_stop(&bench, &settings).unwrap_err();
    assert!(error.to_string().starts_with("module nvidia_drm is missing for kernel"), "{error}");
    assert_eq!(bench.calls(), [""; 0]);
    bench.image_module("nvidia_drm", "nvidia_modeset");
    start_and_stop(&bench, &settings).unwrap();
    let calls = bench.calls();
    assert_eq!(calls[5..7], [LOADS[5], "load nvidia_drm of the image"]);
    assert!(calls.contains(&"unload nvidia_drm".to_owned()));
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(!bench.calls().iter().any(|call| call.contains("nvidia_drm")));
}

/// The operator's driver manager evicts the pods and unloads the driver, but not `nvidia_drm`.
#[test]
fn a_refused_stop_unloads_nvidia_drm() {
    let bench = bench();
    bench.image_module("nvidia_drm", "nvidia_modeset");
    let settings = Settings { drm: true, ..Settings::default() };
    let mut hold = || bench.set_references("nvidia", 1);
    run(&bench.node(), &settings, &mut EndsWhenReady(&mut hold)).unwrap_err();
    let loaded = bench.loaded_versions();
    assert!(loaded.contains(&"image-nvidia_modeset".to_owned()), "{loaded:?}");
    assert!(!loaded.contains(&"image-nvidia_drm".to_owned()), "{loaded:?}");
}

#[test]
fn an_image_for_computing_alone_needs_no_modeset() {
    let bench = bench();
    std::fs::remove_file(bench.at(&format!("/lib/modules/{RELEASE}/updates/nvidia_modeset.ko"))).unwrap();
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(!bench.calls().iter().any(|call| call.contains("modeset") || call.contains("video")));
}

#[test]
fn a_driver_of_the_hosts_is_unloaded_first() {
    let bench = bench();
    for (name, depends) in [("nvidia", ""), ("nvidia_drm", "nvidia"), ("nv_peer_mem", "nvidia")] {
        bench.host_module(name, depends);
    }
    bench.load_from_host(&["nvidia", "nvidia_drm", "nv_peer_mem"]);
    start_and_stop(&bench, &Settings::default()).unwrap();
    let calls = bench.calls();
    assert_eq!(calls[..3], ["unload nvidia_drm", "unload nv_peer_mem", "unload nvidia"]);
    assert_eq!(calls[3..9], LOADS);
}

#[test]
fn gpus_of_another_driver_are_found_before_the_old_driver_goes() {
    let bench = bench();
    start_and_kill(&bench, &digest("one"));
    for (address, driver) in [("0000:0a:00.0", "nouveau"), ("0000:0b:00.0", "nouveau")] {
        let place = format!("/sys/bus/pci/devices/{address}");
        bench.write(&format!("{place}/vendor"), "0x10de\n");
        bench.write(&format!("{place}/class"), "0x030200\n");
        std::os::unix::fs::symlink(format!("../../drivers/{driver}"), bench.at(&format!("{place}/driver")))
            .unwrap();
    }
    let start = || start_and_stop(&bench, &digest("two"));
    let error = start().unwrap_err();
    assert_eq!(
        error.to_string(),
        "no GPU is left for this driver: 0000:0a:00.0 is bound to nouveau, 0000:0b:00.0 is bound to nouveau"
    );
    assert_eq!(bench.calls(), Vec::<String>::new());
    std::fs::remove_file(bench.at("/sys/bus/pci/devices/0000:0b:00.0/driver")).unwrap();
    start().unwrap();
    assert!(
        bench.log().contains("WARN  other drivers hold some of the GPUs: 0000:0a:00.0 is bound to nouveau")
    );
}
