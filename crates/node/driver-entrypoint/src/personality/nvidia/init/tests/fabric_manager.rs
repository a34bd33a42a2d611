//! The fabric manager of GPUs behind switches.

use std::process::Command;

use super::*;

#[test]
fn gpus_behind_switches_need_their_fabric_manager() {
    let bench = bench();
    bench.write("/proc/driver/nvidia-nvswitch/devices/0000:01:00.0/information", "");
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(bench.log().contains("WARN  this node has NVSwitches and the image has no nv-fabricmanager"));
    bench.program("nv-fabricmanager", "exit 1");
    let error = start_and_stop(&bench, &Settings::default()).unwrap_err();
    assert_eq!(error.to_string(), "nv-fabricmanager does not start: exit status: 1");
    assert_gone(&bench);
    bench.program("nv-fabricmanager", "test \"$*\" = '-c /usr/share/nvidia/nvswitch/fabricmanager.cfg'");
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(bench.log().contains("INFO  started nv-fabricmanager"), "{}", bench.log());
}

#[test]
fn the_fabric_manager_gets_the_fields_of_the_environment() {
    let bench = bench();
    bench.write("/sys/class/infiniband/mlx5_0/device/vpd", "SW_MNG");
    for name in ["mlx5_core", "ib_umad"] {
        bench.host_module(name, "");
        bench.load_from_host(&[name]);
    }
    let file = "/usr/share/nvidia/nvswitch/fabricmanager.cfg";
    bench.write(file, "LOG_LEVEL=4\n# FABRIC_MODE=2\nFABRIC_MODE=0\nDAEMONIZE=1\n");
    let config = bench.at(file).display().to_string();
    bench.program("nvidia-fabricmanager-start.sh", &format!("grep -qx FABRIC_MODE=1 {config}"));
    bench.program("nvidia-smi", &format!("test \"$*\" = -r && touch {config}.reset"));
    let fields = [("FABRIC_MODE", "1"), ("LOG_FILE_NAME", "/var/log/fm.log")];
    let fabric_fields = fields.map(|(field, value)| (field.to_owned(), value.to_owned())).to_vec();
    let settings = Settings { fabric_fields, ..Settings::default() };
    start_and_stop(&bench, &settings).unwrap();
    let expected =
        "LOG_LEVEL=4\n# FABRIC_MODE=2\nDAEMONIZE=1\nFABRIC_MODE=1\nLOG_FILE_NAME=/var/log/fm.log\n";
    assert_eq!(bench.read(file).unwrap(), expected);
    assert!(bench.read(&format!("{file}.reset")).is_some(), "{}", bench.log());
    std::fs::remove_file(bench.at(&format!("{file}.reset"))).unwrap();
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert_eq!(bench.read(file).unwrap(), expected, "kept without variables");
    assert_eq!(bench.read(&format!("{file}.reset")), None);
    std::fs::remove_file(bench.at(file)).unwrap();
    start_and_stop(&bench, &settings).unwrap_err();
    assert_eq!(bench.read(file), None);
    assert!(
        bench.log().contains("WARN  the variables NVFM_CONFIG_* have no effect: the image has no "),
        "{}",
        bench.log()
    );
}

/// Makes a process the fabric manager, which has a GPU open.
fn fabric_manager(bench: &Bench, process: u32) {
    bench.write("/run/nvidia-fabricmanager/nv-fabricmanager.pid", &process.to_string());
    bench.write(&format!("/proc/{process}/status"), "Name:\tnv-fabricmanage\nState:\tS (sleeping)\n");
    open_gpu(bench, process);
}

fn open_gpu(bench: &Bench, process: u32) {
    let directory = bench.at(&format!("/proc/{process}/fd"));
    std::fs::create_dir_all(&directory).unwrap();
    std::os::unix::fs::symlink("/dev/nvidia0", directory.join("5")).unwrap();
}

/// The stop of the fabric manager aborts the work of all processes on the GPUs.
#[test]
fn the_fabric_manager_runs_while_a_process_uses_the_driver() {
    let bench = bench();
    let mut manager = Command::new("sleep").arg("100").spawn().unwrap();
    let mut use_driver = || {
        fabric_manager(&bench, manager.id());
        bench.write("/proc/4711/comm", "python3\n");
        open_gpu(&bench, 4711);
        bench.set_references("nvidia", 2);
    };
    let at_stop = run(&bench.node(), &digest("1"), &mut EndsWhenReady(&mut use_driver)).unwrap_err();
    let at_start = start_and_stop(&bench, &digest("2")).unwrap_err();
    for error in [at_stop, at_start].map(|error| error.to_string()) {
        assert!(
            error.starts_with("the NVIDIA driver is in use and stays loaded: unload nvidia: 2"),
            "{error}"
        );
        assert!(error.contains("process 4711 (python3) with /dev/nvidia0 open"), "{error}");
    }
    assert_eq!(manager.try_wait().unwrap(), None, "{}", bench.log());
    manager.kill().unwrap();
    manager.wait().unwrap();
}

#[test]
fn the_fabric_manager_of_the_fifth_generation_waits_for_infiniband() {
    let bench = bench();
    bench.write("/sys/class/infiniband/mlx5_0/device/vpd", "SW_MNG");
    bench.program("nvidia-fabricmanager-start.sh", "");
    let error = run(&bench.node(), &Settings::default(), &mut EndsAt(20)).unwrap_err();
    assert_eq!(error.to_string(), "received SIGINT before the drivers were ready");
    assert!(bench.log().contains("waits for mlx5_core and ib_umad"), "{}", bench.log());
    assert_gone(&bench);
    for name in ["mlx5_core", "ib_umad"] {
        bench.host_module(name, "");
        bench.load_from_host(&[name]);
    }
    start_and_stop(&bench, &Settings::default()).unwrap();
    assert!(bench.log().contains("INFO  started nvidia-fabricmanager-start.sh"), "{}", bench.log());
}
