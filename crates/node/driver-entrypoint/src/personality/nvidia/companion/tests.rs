use std::{cell::RefCell, fs};

use super::*;
use crate::testing::Bench;

const READY: &str = "/.driver-ready";
const NVIDIA_PEERMEM: Companion<'_> = Companion {
    module: "nvidia_peermem",
    owner: Owner::DriverContainers,
    ready_file: None,
    ofed: Ofed::Container,
};
const NV_PEER_MEM: Companion<'_> = Companion {
    module: "nv_peer_mem",
    owner: Owner::ThisContainer,
    ready_file: Some(READY),
    ofed: Ofed::Container,
};

/// Changes to the node, one before each poll; then a signal arrives.
struct Story<'a>(std::vec::IntoIter<Box<dyn FnOnce() + 'a>>);

impl Signals for Story<'_> {
    fn received(&mut self) -> Option<&'static str> {
        match self.0.next() {
            Some(happens) => {
                happens();
                None
            }
            None => Some("SIGTERM"),
        }
    }

    fn wait(&mut self) -> &'static str {
        "SIGTERM"
    }
}

fn story<'a>(steps: Vec<Box<dyn FnOnce() + 'a>>) -> Story<'a> {
    Story(steps.into_iter())
}

/// A node with OFED's core and the GPU driver loaded, without their ready files.
fn bench() -> Bench {
    let bench = Bench::new();
    for (name, depends) in [("ib_core", ""), ("mlx5_core", ""), ("nvidia", "")] {
        bench.host_module(name, depends);
    }
    bench.load_from_host(&["ib_core", "mlx5_core", "nvidia"]);
    bench.image_module("nvidia_peermem", "nvidia,ib_core");
    bench.image_module("nv_peer_mem", "nvidia,ib_core");
    bench
}

fn ready(bench: &Bench) {
    bench.write(state::OFED_READY, "");
    bench.write(state::PROBE_FILE, "");
}

fn remove(bench: &Bench, path: &str) {
    fs::remove_file(bench.at(path)).unwrap();
}

#[test]
fn nvidia_peermem_is_loaded_once_both_drivers_are_ready_and_stays() {
    let bench = bench();
    bench.write("/drivers/nvidia-peermem.conf", "peerdirect_support=1");
    let calls = RefCell::new(vec![]);
    let look = || calls.borrow_mut().push(bench.calls());
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(|| bench.write(state::OFED_READY, "")),
        Box::new(|| bench.write(state::PROBE_FILE, "")),
        Box::new(look),
    ]);
    NVIDIA_PEERMEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(*calls.borrow(), [["load nvidia_peermem of the image peerdirect_support=1"]]);
    assert_eq!(bench.calls(), [""; 0], "the GPU driver's container unloads it");
    assert!(bench.loaded_versions().contains(&"image-nvidia_peermem".to_owned()));
    let log = bench.log();
    let waits =
        ["nvidia_peermem: waiting for OFED and the GPU driver", "nvidia_peermem: waiting for the GPU driver"];
    assert!(waits.iter().all(|line| log.contains(line)), "{log}");
}

#[test]
fn nvidia_peermem_comes_back_after_ofed_was_replaced() {
    let bench = bench();
    ready(&bench);
    let ofed_unloads = || {
        bench.calls();
        remove(&bench, state::OFED_READY);
        unload::unload(&bench.node(), "nvidia_peermem").unwrap();
        bench.calls();
    };
    let nothing_yet = || assert_eq!(bench.calls(), [""; 0]);
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(ofed_unloads),
        Box::new(nothing_yet),
        Box::new(|| bench.write(state::OFED_READY, "")),
    ]);
    NVIDIA_PEERMEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(bench.calls(), ["load nvidia_peermem of the image"]);
}

#[test]
fn nvidia_peermem_of_another_ib_core_is_loaded_again() {
    let bench = bench();
    ready(&bench);
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(|| {
            bench.calls();
            bench.write("/sys/module/ib_core/srcversion", "other\n");
        }),
        Box::new(|| {}),
    ]);
    NVIDIA_PEERMEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(bench.calls(), ["unload nvidia_peermem", "load nvidia_peermem of the image"]);
    assert!(bench.log().contains("ib_core was replaced after nvidia_peermem was loaded"), "{}", bench.log());
}

#[test]
fn an_ib_core_without_srcversion_is_identified_by_its_build_id() {
    let bench = bench();
    ready(&bench);
    let note = "/sys/module/ib_core/notes/.note.gnu.build-id";
    bench.write("/sys/module/ib_core/srcversion", "");
    bench.write(note, "one");
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(|| assert_eq!(bench.calls(), ["load nvidia_peermem of the image"])),
        Box::new(|| bench.write(note, "two")),
    ]);
    NVIDIA_PEERMEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(bench.calls(), ["unload nvidia_peermem", "load nvidia_peermem of the image"]);
}

#[test]
fn a_loaded_module_is_kept() {
    let bench = bench();
    ready(&bench);
    NVIDIA_PEERMEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap();
    bench.calls();
    NVIDIA_PEERMEM.run(&bench.node(), &mut story(vec![Box::new(|| {}), Box::new(|| {})])).unwrap();
    assert_eq!(bench.calls(), [""; 0]);
}

#[test]
fn the_hosts_ofed_needs_no_ready_file() {
    let bench = bench();
    bench.write(state::PROBE_FILE, "");
    let host_ofed = Companion { ofed: Ofed::Host, ..NVIDIA_PEERMEM };
    host_ofed.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap();
    assert_eq!(bench.calls(), ["load nvidia_peermem of the image"]);
}

#[test]
fn a_module_missing_in_the_image_comes_from_the_gpu_drivers_root() {
    let bench = bench();
    ready(&bench);
    let image = bench.at("/lib/modules");
    let exposed = bench.at(GPU_MODULES);
    fs::create_dir_all(exposed.parent().unwrap()).unwrap();
    fs::rename(image, exposed).unwrap();
    NVIDIA_PEERMEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap();
    assert!(bench.log().contains("(/run/nvidia/driver/lib/modules/"), "{}", bench.log());
}

#[test]
fn mismatched_drivers_are_named_with_a_remedy() {
    for errno in [Errno::INVAL, Errno::NOENT] {
        let bench = bench();
        ready(&bench);
        bench.kernel.load_errors.borrow_mut().insert("nvidia_peermem".into(), errno);
        let error = NVIDIA_PEERMEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap_err();
        assert!(error.to_string().starts_with("load nvidia_peermem from /lib/modules/"), "{error}");
        assert!(
            error.hint().contains("was not compiled against the OFED and the GPU driver that is loaded"),
            "{}",
            error.hint()
        );
    }
}

#[test]
fn nv_peer_mem_writes_its_ready_file_and_is_unloaded_at_a_signal() {
    let bench = bench();
    bench.write(READY, "left by a killed container");
    let seen = RefCell::new(vec![]);
    let look = || seen.borrow_mut().push(bench.read(READY).is_some());
    let mut story = story(vec![
        Box::new(look),
        Box::new(|| {
            look();
            ready(&bench);
        }),
        Box::new(look),
    ]);
    NV_PEER_MEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(*seen.borrow(), [false, false, true]);
    assert_eq!(bench.read(READY), None);
    assert_eq!(bench.calls(), ["load nv_peer_mem of the image", "unload nv_peer_mem"]);
}

#[test]
fn nv_peer_mem_is_unloaded_and_loaded_again_with_its_drivers() {
    let bench = bench();
    ready(&bench);
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(|| remove(&bench, state::OFED_READY)),
        Box::new(|| {
            assert_eq!(bench.calls(), ["load nv_peer_mem of the image", "unload nv_peer_mem"]);
            assert_eq!(bench.read(READY), None);
            ready(&bench);
        }),
        Box::new(|| {
            assert_eq!(bench.calls(), ["load nv_peer_mem of the image"]);
            bench.write(state::DAEMONS_STATUS_FILE, "NotReady\n");
        }),
        Box::new(|| assert_eq!(bench.calls(), ["unload nv_peer_mem"])),
    ]);
    NV_PEER_MEM.run(&bench.node(), &mut story).unwrap();
    assert_eq!(bench.calls(), [""; 0]);
}

#[test]
fn the_unload_of_nv_peer_mem_in_use_is_retried_and_logged() {
    let bench = bench();
    ready(&bench);
    let mut story = story(vec![
        Box::new(|| {}),
        Box::new(|| {
            bench.kernel.references.borrow_mut().insert("nv_peer_mem".into(), 1);
            bench.host_module("other", "");
            bench.load_from_host(&["other"]);
            remove(&bench, state::OFED_READY);
        }),
        Box::new(|| bench.kernel.references.borrow_mut().clear()),
    ]);
    NV_PEER_MEM.run(&bench.node(), &mut story).unwrap();
    assert!(bench.log().contains("nv_peer_mem: unload nv_peer_mem: 1 reference(s)"), "{}", bench.log());
    assert_eq!(bench.calls(), ["unload nv_peer_mem"]);
}

#[test]
fn manifests_without_the_ready_file_show_ofeds_sources() {
    let bench = bench();
    bench.write(&format!("{OFED_SOURCES}/default/Module.symvers"), "");
    NV_PEER_MEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap();
    assert_eq!(bench.calls(), ["load nv_peer_mem of the image", "unload nv_peer_mem"]);
    // The GPU operator's pod has the ready file, and waits for it.
    bench.write(state::PROBE_FILE, "");
    NVIDIA_PEERMEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap();
    assert_eq!(bench.calls(), [""; 0]);
}

#[test]
fn nv_peer_mem_that_does_not_load_leaves_no_ready_file() {
    let bench = bench();
    ready(&bench);
    bench.kernel.load_errors.borrow_mut().insert("nv_peer_mem".into(), Errno::NOEXEC);
    NV_PEER_MEM.run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap_err();
    assert_eq!(bench.read(READY), None);
}

#[test]
fn the_ready_file_can_be_another() {
    let parse = |words: &[&'static str]| Companion::nv_peer_mem(words, |_| None);
    let bench = bench();
    ready(&bench);
    let peer_memory = parse(&["--ready-file", "/run/mellanox/peer/.ready"]).unwrap();
    let mut story =
        story(vec![Box::new(|| {}), Box::new(|| assert!(bench.read("/run/mellanox/peer/.ready").is_some()))]);
    peer_memory.run(&bench.node(), &mut story).unwrap();
    assert_eq!(parse(&[]), Some(NV_PEER_MEM));
    for words in [
        &["--ready-file"][..],
        &["--ready-file", "relative"],
        &["--ready-file", "/d/"],
        &["--ready-file", "/d/.."],
        &["now"],
    ] {
        assert_eq!(parse(words), None, "{words:?}");
    }
}

/// These modules need no OFED. The major number of the device file can change with each load.
#[test]
fn gds_and_gdrcopy_depend_only_on_the_gpu_driver() {
    let install = |program| Companion::install(program, &["install"]).unwrap();
    for (program, module) in [("nvidia-gds-driver", "nvidia_fs"), ("nvidia-gdrcopy-driver", "gdrdrv")] {
        let bench = bench();
        bench.image_module(module, "nvidia");
        bench.write("/proc/devices", "Character devices:\n  1 mem\n236 gdrdrv\n\nBlock devices:\n  7 loop\n");
        bench.write("/dev/gdrdrv", "of another time");
        bench.write("/run/nvidia/driver/dev/null", "");
        let mut story = story(vec![
            Box::new(|| assert_eq!(bench.calls(), [""; 0])),
            Box::new(|| bench.write(state::DAEMONS_STATUS_FILE, "Ready\n")),
        ]);
        install(program).run(&bench.node(), &mut story).unwrap();
        let mut calls = vec![format!("load {module} of the image")];
        if module == "gdrdrv" {
            calls.push("device /dev/gdrdrv 236".to_owned());
            calls.push("device /run/nvidia/driver/dev/gdrdrv 236".to_owned());
        }
        assert_eq!(bench.calls(), calls, "the GPU driver's container unloads it");
    }
    let bench = bench();
    bench.image_module("gdrdrv", "nvidia");
    bench.write(state::DAEMONS_STATUS_FILE, "Ready\n");
    let error =
        install("nvidia-gdrcopy-driver").run(&bench.node(), &mut story(vec![Box::new(|| {})])).unwrap_err();
    assert!(error.to_string().contains("/proc/devices has no number for it"), "{error}");
    assert_eq!(Companion::install("nvidia-gds-driver", &[]), None);
}
