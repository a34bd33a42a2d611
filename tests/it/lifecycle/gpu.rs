//! The GPU driver's containers and the containers that depend on the driver.
use std::{fs, os::unix::fs::PermissionsExt as _};

use farrier_inputs::KernelImage;
use tempfile::TempDir;

use super::{LIMIT, MOFED, newest};
use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, depmod, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

/// Creates a GPU driver's image; the operators use the same image for nvidia-peermem.
fn gpu_image(kernel: &KernelImage, modules: &[&str], gpus: u32) -> TempDir {
    let image = image_tree(&entrypoint());
    let updates = image.path().join("lib/modules").join(kernel.release.as_str()).join("updates");
    fs::create_dir_all(&updates).unwrap();
    let built = ofed::gpu_modules(&kernel.release);
    for module in modules {
        fs::copy(built.join(module), updates.join(module)).unwrap();
    }
    depmod(kernel, image.path());
    // A file from the operator's ConfigMap.
    fs::create_dir(image.path().join("drivers")).unwrap();
    fs::write(image.path().join("drivers/nvidia.conf"), format!("gpus={gpus}\n")).unwrap();
    let tool = image.path().join("usr/bin/nvidia-smi");
    fs::write(&tool, "#!/bin/sh\nlsmod | grep nvidia_uvm\n").unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    image
}

/// The complete stack: the GPU driver without and with a GPU, and peer memory of the current and the first generation. Peer
/// memory waits for both drivers and follows their exchange.
#[test]
fn gpu_and_peer_memory_come_and_go_with_ofed() {
    const GPU: [&str; 4] = ["nvidia.ko", "nvidia-uvm.ko", "nvidia-modeset.ko", "nvidia-peermem.ko"];
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_ib", "ipmi_devintf"]);
    tree.image("mofed", ofed::image(&kernel).path());
    tree.image("gpu", gpu_image(&kernel, &GPU, 1).path());
    tree.image("gpu-without", gpu_image(&kernel, &GPU, 0).path());
    tree.image("nv-peer-mem", gpu_image(&kernel, &["nv_peer_mem.ko"], 1).path());
    for module in ["nvidia-fs", "gdrdrv"] {
        let image = gpu_image(&kernel, &[&format!("{module}.ko")], 1);
        // The operator calls the entrypoint through bash, which the real base contains.
        let bash = image.path().join("bin/bash");
        fs::write(&bash, "#!/bin/sh\nexec sh \"$@\"\n").unwrap();
        fs::set_permissions(&bash, fs::Permissions::from_mode(0o755)).unwrap();
        tree.image(module, image.path());
    }
    let mut node = Node::boot(&kernel, tree);
    node.sh("modprobe mlx5_ib; mkdir -p /run/nvidia/validations");
    let gpu_spec = ContainerSpec::read("nvidia-driver.yaml", "nvidia-driver-ctr");
    let peermem_spec = ContainerSpec::read("nvidia-driver.yaml", "nvidia-peermem-ctr");
    let mofed_spec = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");
    // The image's own entrypoint, which the manifest's command overrides.
    let entrypoint = ["nvidia-driver", "init"];

    let gpu = node.start(&gpu_spec, "gpu-without", &entrypoint);
    let status = node.await_end(&gpu);
    let log = node.log(&gpu);
    assert_eq!(status, 1, "{log}");
    assert!(log.contains("no NVIDIA GPU was found by the driver (ENODEV)"), "{log}");
    assert!(log.contains("NVRM: No NVIDIA GPU found."), "{log}");
    assert_eq!(node.sh("cat /proc/self/mountinfo").matches(" /run/nvidia/driver").count(), 0, "{log}");

    let peermem = node.start(&peermem_spec, "gpu", &entrypoint);
    let mofed = node.start(&mofed_spec, "mofed", &MOFED);
    node.await_startup(&mofed, LIMIT);
    assert_ne!(node.probe(&peermem, peermem_spec.startup.as_ref()).status, 0, "there is no GPU driver yet");
    let gpu = node.start(&gpu_spec, "gpu", &entrypoint);
    node.await_startup(&gpu, LIMIT);
    // The driver's user space is visible on the node.
    node.sh("ls /run/nvidia/driver/usr/bin/nvidia-smi && chroot /run/nvidia/driver nvidia-smi");
    node.await_startup(&peermem, LIMIT);
    assert!(node.succeeds("[ -e /sys/module/nvidia_peermem ]"), "{}", node.log(&peermem));

    // When OFED is replaced, peer memory is unloaded first and loaded again afterwards.
    let status = node.terminate(&mofed);
    assert_eq!(status, 0, "{}", node.log(&mofed));
    assert!(!node.succeeds("[ -e /sys/module/nvidia_peermem ]"), "{}", node.log(&mofed));
    let mofed = node.start(&mofed_spec, "mofed", &MOFED);
    node.await_startup(&mofed, LIMIT);
    assert!(node.await_that("[ -e /sys/module/nvidia_peermem ]", LIMIT), "{}", node.log(&peermem));
    node.assert_probes_pass(&peermem);

    // GPUDirect Storage and GDRCopy, including the device file that GDRCopy's module does not create.
    let beside =
        [("nvidia-fs-ctr", "nvidia-fs"), ("nvidia-gdrcopy-ctr", "gdrdrv")].map(|(container, image)| {
            let spec = ContainerSpec::read("nvidia-driver.yaml", container);
            let started = node.start(&spec, image, &entrypoint);
            node.await_startup(&started, LIMIT);
            started
        });
    for place in ["/dev/gdrdrv", "/run/nvidia/driver/dev/gdrdrv"] {
        let made = format!("[ -c {place} ]");
        assert!(node.await_that(&made, LIMIT), "{place}: {}", node.log(&beside[1]));
    }

    // When the pod ends, dependent modules are unloaded with the driver, and nothing is left.
    assert_eq!(node.terminate(&peermem), 0, "{}", node.log(&peermem));
    for container in &beside {
        assert_eq!(node.terminate(container), 0, "{}", node.log(container));
    }
    assert!(
        node.succeeds("[ -e /sys/module/nvidia_fs ] && [ -e /sys/module/gdrdrv ]"),
        "the driver's container unloads these modules"
    );
    let status = node.terminate(&gpu);
    let log = node.log(&gpu);
    println!("{log}");
    assert_eq!(status, 0, "{log}");
    assert!(!node.loaded().iter().any(|name| name.starts_with("nvidia") || name == "gdrdrv"), "{log}");
    assert_eq!(node.sh("cat /proc/self/mountinfo").matches(" /run/nvidia/driver").count(), 0, "{log}");

    // The first generation of peer memory, which has a separate DaemonSet.
    let old_spec = ContainerSpec::read("nv-peer-mem.yaml", "nv-peer-mem-container");
    let old = node.start(&old_spec, "nv-peer-mem", &["driver-entrypoint", "nv-peer-mem"]);
    let gpu = node.start(&gpu_spec, "gpu", &entrypoint);
    node.await_startup(&gpu, LIMIT);
    node.await_startup(&old, LIMIT);
    node.assert_probes_pass(&old);
    let log = node.log(&old);
    assert_eq!(node.terminate(&old), 0, "{log}");
    assert!(!node.succeeds("[ -e /sys/module/nv_peer_mem ]"), "{log}");
    // When OFED's exposed symbol table differs from the one that peer memory was compiled against, nothing is loaded.
    let another = "s/^0x[0-9a-f]*\\(.ib_register_peer_memory_client\\)/0x00000001\\1/";
    node.sh(&format!("sed -i '{another}' /run/mellanox/drivers/usr/src/ofa_kernel/x86_64/*/Module.symvers"));
    let stale = node.start(&old_spec, "nv-peer-mem", &["driver-entrypoint", "nv-peer-mem"]);
    let status = node.await_end(&stale);
    let log = node.log(&stale);
    let words = "compiled against a different version of symbol ib_register_peer_memory_client of ib_uverbs";
    assert!(status == 1 && log.contains(words), "{log}");
    assert_eq!(node.terminate(&gpu), 0, "{}", node.log(&gpu));
    assert_eq!(node.terminate(&mofed), 0, "{}", node.log(&mofed));
}
