use fs_err::os::unix::fs::symlink;
use proptest::prelude::*;

use super::*;

const HEADER: &str = "NVIDIA Accelerated Graphics Driver for Linux-x86_64\n580.95.05\nfalse\nnvidia nvidia-uvm\n\n\nkernel\n\n";

/// Lines from the manifests of versions 535 to 595.
const LINES: &str = "\
nvidia-installer 0755 INSTALLER_BINARY MODULE:installer
nvidia-uninstall 0000 UTILITY_BIN_SYMLINK nvidia-installer MODULE:installer
LICENSE 0644 DOCUMENTATION NVIDIA_GLX-1.0 MODULE:installer
README.txt 0644 DOCUMENTATION NVIDIA_GLX-1.0 MODULE:installer
nvidia-smi.1.gz 0644 MANPAGE man1 MODULE:nvml
nvidia-smi 0755 UTILITY_BINARY MODULE:nvml
nvidia-bug-report.sh 0755 UTILITY_BINARY MODULE:installer
nvidia-modprobe 4755 NVIDIA_MODPROBE /usr/bin MODULE:installer
libcuda.so.580.95.05 0755 CUDA_LIB NATIVE / MODULE:gpgpu
libcuda.so.1 0000 CUDA_SYMLINK NATIVE / libcuda.so.580.95.05 MODULE:gpgpu
./32/libcuda.so.580.95.05 0755 CUDA_LIB COMPAT32 / MODULE:gpgpu
libnvidia-ml.so.580.95.05 0755 UTILITY_LIB NATIVE MODULE:nvml
libnvidia-ml.so.1 0000 UTILITY_LIB_SYMLINK NATIVE libnvidia-ml.so.580.95.05 MODULE:nvml
libnvidia-gpucomp.so.580.95.05 0755 OPENGL_LIB NATIVE MODULE:gpucomp
libnvidia-encode.so.580.95.05 0755 ENCODEAPI_LIB NATIVE MODULE:nvenc
nvidia.icd 0644 CUDA_ICD MODULE:gpgpu
firmware/gsp_ga10x.bin 0644 FIRMWARE INHERIT_PATH_DEPTH:1 MODULE:resman
kernel/nvidia/nv.c 0644 KERNEL_MODULE_SRC INHERIT_PATH_DEPTH:1 MODULE:resman
systemd/nvidia-suspend.service 0644 SYSTEMD_UNIT MODULE:powerd
libGLX_nvidia.so.580.95.05 0755 OPENGL_LIB NATIVE MODULE:opengl
libGLX.so.0 0755 GLVND_LIB NATIVE MODULE:opengl
libGL.so.580.95.05 0755 GLX_CLIENT_LIB NATIVE NON_GLVND MODULE:opengl
libGL.so.1 0000 GLX_CLIENT_SYMLINK NATIVE libGL.so.1.7.0 GLVND MODULE:opengl
libvdpau_nvidia.so.580.95.05 0755 VDPAU_LIB NATIVE vdpau/ MODULE:vdpau
nvidia-drm_gbm.so 0000 GBM_BACKEND_LIB_SYMLINK NATIVE libnvidia-allocator.so.1 MODULE:gbm
nvidia_icd.json 0644 VULKAN_ICD_JSON icd.d/ MODULE:vulkan
10_nvidia.json 0644 GLVND_EGL_ICD_JSON MODULE:egl
nvoptix.bin 0644 OPENGL_DATA /usr/share/nvidia MODULE:optix
nvidia_drv.so 0755 XMODULE_SHARED_LIB drivers MODULE:x
";

fn wanted(graphics: bool) -> Selection {
    Selection { version: "580.95.05".to_owned(), arch: Architecture::Amd64, graphics }
}

/// Formats the result as `place <- file mode` and `place -> target`.
fn told(manifest: &str, wanted: &Selection) -> String {
    let lines = manifest_contents(manifest, wanted).unwrap().into_iter().map(|(place, what)| match what {
        Content::File { from, mode, is_code } => {
            let code = if is_code { " code" } else { "" };
            format!("{} <- {from} {mode:o}{code}", place.display())
        }
        Content::Link(target) => format!("{} -> {target}", place.display()),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn what_computes_goes_where_the_installer_would_put_it() {
    let manifest = format!("{HEADER}{LINES}");
    insta::assert_snapshot!(told(&manifest, &wanted(false)), @r"
    etc/OpenCL/vendors/nvidia.icd <- nvidia.icd 644
    lib/firmware/nvidia/580.95.05/gsp_ga10x.bin <- firmware/gsp_ga10x.bin 644
    usr/bin/nvidia-bug-report.sh <- nvidia-bug-report.sh 755 code
    usr/bin/nvidia-modprobe <- nvidia-modprobe 755 code
    usr/bin/nvidia-smi <- nvidia-smi 755 code
    usr/lib/x86_64-linux-gnu/libcuda.so.1 -> libcuda.so.580.95.05
    usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05 <- libcuda.so.580.95.05 755 code
    usr/lib/x86_64-linux-gnu/libnvidia-encode.so.580.95.05 <- libnvidia-encode.so.580.95.05 755 code
    usr/lib/x86_64-linux-gnu/libnvidia-gpucomp.so.580.95.05 <- libnvidia-gpucomp.so.580.95.05 755 code
    usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 -> libnvidia-ml.so.580.95.05
    usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05 <- libnvidia-ml.so.580.95.05 755 code
    usr/share/doc/NVIDIA_GLX-1.0/LICENSE <- LICENSE 644
    ");
    let arm = told(&manifest, &Selection { arch: Architecture::Arm64, ..wanted(false) });
    assert_eq!(arm, told(&manifest, &wanted(false)).replace("x86_64-linux-gnu", "aarch64-linux-gnu"));
}

#[test]
fn what_draws_comes_beside_it() {
    let manifest = format!("{HEADER}{LINES}");
    let (compute, both) = (told(&manifest, &wanted(false)), told(&manifest, &wanted(true)));
    assert!(compute.lines().all(|line| both.lines().any(|other| other == line)));
    let new: Vec<&str> = both.lines().filter(|line| !compute.contains(line)).collect();
    insta::assert_snapshot!(new.join("\n"), @r"
    etc/vulkan/icd.d/nvidia_icd.json <- nvidia_icd.json 644
    usr/lib/x86_64-linux-gnu/gbm/nvidia-drm_gbm.so -> /usr/lib/x86_64-linux-gnu/libnvidia-allocator.so.1
    usr/lib/x86_64-linux-gnu/libGL.so.1 -> libGL.so.1.7.0
    usr/lib/x86_64-linux-gnu/libGLX.so.0 <- libGLX.so.0 755 code
    usr/lib/x86_64-linux-gnu/libGLX_nvidia.so.580.95.05 <- libGLX_nvidia.so.580.95.05 755 code
    usr/lib/x86_64-linux-gnu/vdpau/libvdpau_nvidia.so.580.95.05 <- libvdpau_nvidia.so.580.95.05 755 code
    usr/lib/xorg/modules/drivers/nvidia_drv.so <- nvidia_drv.so 755 code
    usr/share/glvnd/egl_vendor.d/10_nvidia.json <- 10_nvidia.json 644
    usr/share/nvidia/nvoptix.bin <- nvoptix.bin 644
    ");
}

#[test]
fn another_version_and_a_manifest_of_another_form_are_told() {
    let told = |manifest: &str, version: &str| {
        let wanted = Selection { version: version.to_owned(), ..wanted(false) };
        manifest_contents(manifest, &wanted).unwrap_err().to_string()
    };
    insta::assert_snapshot!(told(HEADER, "580.82.09"), @r#"cannot make the runtime base: the installer has version "580.95.05", the driver image "580.82.09", and the installer's user space works only with modules of the same version"#);
    for line in ["libcuda.so.1 CUDA_LIB", "x 0644", "../../etc/x/.. 0644 UTILITY_BINARY"] {
        let error = told(&format!("{HEADER}{line}\n"), "580.95.05");
        assert_eq!(
            error,
            format!("cannot find a known format in line 9 of the installer's .manifest: {line:?}")
        );
    }
    let outside = told(&format!("{HEADER}x 0644 EXPLICIT_PATH /usr/../.. MODULE:x\n"), "580.95.05");
    assert!(outside.contains("line 9"), "{outside}");
    // An unknown kind in a later version is omitted and logged.
    let manifest = format!("{HEADER}x 0644 HOLOGRAM_LIB NATIVE / MODULE:x\n");
    assert_eq!(manifest_contents(&manifest, &wanted(true)).unwrap(), BTreeMap::new());
}

/// Makes an unpacked installer with these files, and the tar from it.
fn installer(lines: &str, files: &[(&str, &[u8])]) -> (tempfile::TempDir, Result<PathBuf>) {
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("installer");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join(MANIFEST), format!("{HEADER}{lines}")).unwrap();
    for (name, bytes) in files {
        let file = tree.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, bytes).unwrap();
    }
    symlink("/etc/passwd", tree.join("leads-out")).unwrap();
    let out = directory.path().join("driver.tar");
    let made = write(&AtomicBool::new(false), &[tree], &wanted(false), &out).map(|()| out);
    (directory, made)
}

#[test]
fn the_tar_is_of_files_and_links_alone_and_always_the_same() {
    let program = farrier_payload::elf_program(62, 1);
    let lines = "nvidia-smi 4755 UTILITY_BINARY MODULE:nvml\nfirmware/gsp.bin 0644 FIRMWARE INHERIT_PATH_DEPTH:1 MODULE:x\n\
                 libx.so.1 0000 UTILITY_LIB_SYMLINK NATIVE libx.so.580 MODULE:x\n";
    // Firmware for the GPU's own processor.
    let firmware = farrier_payload::elf_program(243, 1);
    let files = [("nvidia-smi", &program[..]), ("firmware/gsp.bin", &firmware)];
    let (_directory, written) = installer(lines, &files);
    let tar = written.unwrap();
    let mut archive = tar::Archive::new(File::open(&tar).unwrap());
    let entries = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        let link = entry.link_name().unwrap().map(|to| format!(" -> {}", to.display())).unwrap_or_default();
        let (bits, time) = (entry.header().mode().unwrap(), entry.header().mtime().unwrap());
        format!("{} {bits:o} {time}{link}", entry.path().unwrap().display())
    });
    insta::assert_snapshot!(entries.collect::<Vec<_>>().join("\n"), @r"
    lib/firmware/nvidia/580.95.05/gsp.bin 644 1700000000
    usr/bin/nvidia-smi 755 1700000000
    usr/lib/x86_64-linux-gnu/libx.so.1 777 1700000000 -> libx.so.580
    ");
    assert_eq!(fs::read(installer(lines, &files).1.unwrap()).unwrap(), fs::read(&tar).unwrap());
}

#[test]
fn an_installer_that_is_not_what_it_says_leaves_no_base() {
    let said = |lines: &str, files: &[(&str, &[u8])]| {
        let error = installer(lines, files).1.unwrap_err();
        format!("{error} ({})", error.hint().unwrap_or_default())
    };
    let library = "libcuda.so.580.95.05 0755 CUDA_LIB NATIVE / MODULE:gpgpu\n";
    let arm = farrier_payload::elf_program(183, 1);
    insta::assert_snapshot!(said(library, &[("libcuda.so.580.95.05", &arm)]), @"cannot make the runtime base for amd64: libcuda.so.580.95.05 of the installer is a program for arm64 (name NVIDIA-Linux-x86_64-VERSION.run, in a definition for nodes of this architecture)");
    insta::assert_snapshot!(said(library, &[]), @r#"cannot find "libcuda.so.580.95.05" in the installer: its .manifest names it, but it does not exist ()"#);
    insta::assert_snapshot!(said("leads-out 0644 CUDA_ICD MODULE:x\n", &[]), @r#"cannot find "leads-out" in the installer: its .manifest names it, but it does not exist ()"#);
    let empty = tempfile::tempdir().unwrap();
    let trees = [empty.path().to_owned()];
    let error = write(&AtomicBool::new(false), &trees, &wanted(false), &empty.path().join("x")).unwrap_err();
    insta::assert_snapshot!(error, @"cannot find .manifest in the source of the runtime base: it is not an NVIDIA driver installer");
}

#[test]
fn archives_go_where_nvidia_s_packages_have_them() {
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path();
    for name in [
        "LICENSE",
        "bin/nv-fabricmanager",
        "etc/fabricmanager.cfg",
        "include/nv_fm_agent.h",
        "lib/libnvidia-nscq.so.580.95.05",
        "share/nvidia/nvswitch/dgx2_hgx2_topology",
        "systemd/nvidia-fabricmanager.service",
    ] {
        let file = tree.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "").unwrap();
    }
    symlink("libnvidia-nscq.so.580.95.05", tree.join("lib/libnvidia-nscq.so.2")).unwrap();
    let found = archive_contents(tree, Architecture::Amd64).unwrap();
    let places: Vec<String> = found.keys().map(|place| place.display().to_string()).collect();
    insta::assert_snapshot!(places.join("\n"), @r"
    usr/bin/nv-fabricmanager
    usr/lib/x86_64-linux-gnu/libnvidia-nscq.so.2
    usr/lib/x86_64-linux-gnu/libnvidia-nscq.so.580.95.05
    usr/share/nvidia/nvswitch/dgx2_hgx2_topology
    usr/share/nvidia/nvswitch/fabricmanager.cfg
    ");
    let error = archive_contents(&tree.join("share/nvidia"), Architecture::Amd64).unwrap_err().to_string();
    assert!(error.ends_with("it is not an NVIDIA archive"), "{error}");
}

proptest! {
    #[test]
    fn no_line_leads_out(line in r"[ -~]{0,80}", kind in "(CUDA|VDPAU|EXPLICIT_PATH|FIRMWARE|UTILITY_BIN)(_LIB|_SYMLINK)?") {
        for line in [line.clone(), format!("{line} 0755 {kind} {line}")] {
            if let Ok(found) = manifest_contents(&format!("{HEADER}{line}\n"), &wanted(true)) {
                for place in found.keys() {
                    prop_assert_eq!(plain_path(place), Some(place.clone()));
                }
            }
        }
    }
}
