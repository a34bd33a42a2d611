//! Boots a kernel in a throwaway virtual machine and loads modules there, for builds and `farrier check --boot`.
//!
//! The machine has no network and no disk. Its initramfs contains `driver-entrypoint` as init, the modules, the in-tree
//! modules that these depend on, and a work list. The machine reports the results over a serial port.
#![forbid(unsafe_code)]

mod checker;
mod classify;
mod console;
mod error;
mod in_tree;
mod kvm;
mod protocol;
mod qemu;
mod request;
mod steps;

use std::{
    env,
    io::{self, BufWriter, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use driver_entrypoint::{
    report::Key,
    work::{KEY_PATH, WORK_PATH, Work},
};
use fs_err::File;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

pub use checker::QemuBoot;
pub use error::{BootError, Result};
use farrier_core::kernel::Architecture;
use kmod::{BootReport, ModuleBoot};
pub use qemu::find_emulator;
pub use request::{BootLimits, BootRequest};

use farrier_local::{blocking::blocking, cpio::CpioWriter};
use farrier_payload::{Entrypoint, PayloadError, find_entrypoint};
use qemu::{Accelerator, Machine, Run};
use steps::PlannedStep;

/// Returns the static `driver-entrypoint` for an architecture, after checking that it can run as init of a virtual machine.
pub async fn find_init(entrypoint: Option<&Path>, arch: Architecture) -> Result<PathBuf> {
    let path = find_entrypoint(entrypoint, arch).map_err(BootError::NoEntrypoint)?;
    blocking(move || {
        let checked = Entrypoint::read(&path).and_then(|entrypoint| entrypoint.check_arch(arch));
        checked.map(|()| path).map_err(BootError::Entrypoint)
    })
    .await
}

/// Boots the kernel, loads the modules and reports the outcome of each. Leaves no process and no file behind, even if the
/// future is dropped.
pub async fn boot_check(request: &BootRequest, cancel: &CancellationToken) -> Result<BootReport> {
    tokio::select! {
        () = cancel.cancelled() => Err(BootError::Canceled),
        report = run_boot_check(request) => report,
    }
}

async fn run_boot_check(request: &BootRequest) -> Result<BootReport> {
    let preparation = request.clone();
    let prepared = blocking(move || prepare(&preparation)).await?;
    let machine = Machine {
        kernel: &request.kernel,
        initramfs: &prepared.initramfs,
        emulator: request.emulator.as_deref(),
        memory: prepared.memory,
        limits: &request.limits,
        key: prepared.key,
    };
    let started = Instant::now();
    let (accelerator, run) = run_machine(&machine, request.kvm_state_dir.as_deref()).await?;
    let elapsed = started.elapsed();
    report(request, &prepared.steps, accelerator, &run, elapsed)
}

/// Runs the machine with KVM if that works, otherwise with software emulation.
async fn run_machine(machine: &Machine<'_>, kvm_state_dir: Option<&Path>) -> Result<(Accelerator, Run)> {
    let try_kvm = kvm::may_be_usable(machine.kernel.arch, kvm_state_dir);
    if try_kvm {
        match machine.run(Accelerator::Kvm).await {
            Ok(run) if run.transcript.kernel().is_some() => return Ok((Accelerator::Kvm, run)),
            Err(error @ (BootError::NoEmulator { .. } | BootError::Start(..))) => return Err(error),
            Ok(_) | Err(_) => {}
        }
    }
    let run = machine.run(Accelerator::Tcg).await?;
    // A kernel that does not boot at all says nothing about KVM.
    if try_kvm && run.transcript.kernel().is_some() {
        kvm::record_failure(kvm_state_dir);
    }
    Ok((Accelerator::Tcg, run))
}

fn report(
    request: &BootRequest,
    steps: &[PlannedStep],
    accelerator: Accelerator,
    run: &Run,
    elapsed: Duration,
) -> Result<BootReport> {
    let requested = &request.kernel.release;
    let Some(kernel) = run.transcript.kernel() else {
        return Err(BootError::NotStarted(requested.to_string(), run.console.last_lines()));
    };
    if kernel != requested.as_str() {
        return Err(BootError::OtherKernel { requested: requested.to_string(), booted: kernel.to_owned() });
    }
    let outcomes = classify::classify(steps, run)?;
    let mut modules: Vec<(usize, ModuleBoot)> = steps
        .iter()
        .zip(outcomes)
        .filter_map(|(step, outcome)| {
            let index = step.payload_index?;
            let path = request.modules.get(index)?.clone();
            Some((index, ModuleBoot { path, name: step.name.clone(), outcome }))
        })
        .collect();
    modules.sort_by_key(|(index, _)| *index);
    Ok(BootReport {
        kernel: kernel.to_owned(),
        accelerator: accelerator.to_string(),
        milliseconds: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
        modules: modules.into_iter().map(|(_, module)| module).collect(),
    })
}

/// The virtual machine's inputs, ready to boot.
struct Prepared {
    /// Directory of the initramfs, deleted on drop.
    _dir: TempDir,
    initramfs: PathBuf,
    /// Memory of the virtual machine in MiB.
    memory: u32,
    steps: Vec<PlannedStep>,
    key: Key,
}

fn prepare(request: &BootRequest) -> Result<Prepared> {
    let steps = steps::plan(request)?;
    let parent = request.scratch_dir.clone().unwrap_or_else(env::temp_dir);
    let dir = tempfile::Builder::new().prefix("farrier-boot-").tempdir_in(&parent)?;
    let path = dir.path().join("initramfs");
    let key = generate_key()?;
    write_initramfs(request, &steps, key, BufWriter::new(File::create(&path)?))?;
    let memory = required_memory(fs_err::metadata(&path)?.len(), request.limits.memory)?;
    Ok(Prepared { _dir: dir, initramfs: path, memory, steps, key })
}

fn generate_key() -> io::Result<Key> {
    let mut key = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut key)?;
    Ok(Key(key))
}

/// Returns the memory of the machine in MiB: enough for a kernel and three copies of the initramfs, whose size is given in
/// bytes. Two copies exist while the initramfs is unpacked, and a third while its modules are loaded.
fn required_memory(initramfs: u64, limit: u32) -> Result<u32> {
    /// Debian's kernel with all its drivers boots in less than half of this number of MiB.
    const KERNEL_MIB: u64 = 384;
    let needed = KERNEL_MIB + 3 * (initramfs >> 20);
    u32::try_from(needed)
        .ok()
        .filter(|&needed| needed <= limit)
        .ok_or(BootError::Memory { needed, limit: u64::from(limit) })
}

fn write_initramfs(request: &BootRequest, steps: &[PlannedStep], key: Key, out: impl Write) -> Result<()> {
    let mut initramfs = CpioWriter::new(out);
    for directory in ["dev", "proc", "sys", "farrier", "modules"] {
        initramfs.directory(directory)?;
    }
    initramfs.console()?;
    let entrypoint = &request.entrypoint;
    let mut init = File::open(entrypoint)
        .map_err(|_| BootError::NoEntrypoint(PayloadError::NoEntrypoint(entrypoint.clone())))?;
    let size = init.metadata()?.len();
    initramfs.file("init", 0o755, size, &mut init)?;
    let work = Work {
        report: qemu::report_device(request.kernel.arch).to_owned(),
        unload_each: request.unload_each,
        steps: steps.iter().map(PlannedStep::work_step).collect(),
    };
    for (path, bytes) in [(WORK_PATH, work.encode()), (KEY_PATH, key.to_text().into_bytes())] {
        initramfs.bytes(path.trim_start_matches('/'), 0o400, &bytes)?;
    }
    for step in steps {
        let mut file = in_tree::open(&step.source, &request.decompression)?;
        let size = file.metadata()?.len();
        initramfs.file(step.path.trim_start_matches('/'), 0o400, size, &mut file)?;
    }
    Ok(initramfs.finish()?)
}

#[cfg(test)]
mod tests {
    use farrier_payload::{ENTRYPOINT, elf_program};

    use super::*;

    #[test]
    fn memory_follows_the_initramfs_up_to_the_limit() {
        assert_eq!(required_memory(1 << 20, 1024).unwrap(), 387);
        assert_eq!(required_memory(200 << 20, 1024).unwrap(), 984);
        let error = required_memory(260 << 20, 1024).unwrap_err();
        assert!(error.to_string().contains("1164 MiB"), "{error}");
    }

    #[tokio::test]
    async fn an_entrypoint_for_another_architecture_is_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(ENTRYPOINT);
        fs_err::write(&path, elf_program(62, 1)).unwrap();
        let find = |arch| find_init(Some(&path), arch);
        assert_eq!(find(Architecture::Amd64).await.unwrap(), path);
        let error = find(Architecture::Arm64).await.unwrap_err();
        let message = oci::error_chain(&error);
        assert!(
            message.starts_with("cannot start driver-entrypoint in a virtual machine: cannot use "),
            "{message}"
        );
        assert!(message.ends_with("it is for amd64, not for arm64"), "{message}");
        assert!(error.hint().contains("NAME-ARCHITECTURE"), "{}", error.hint());
        let other = directory.path().join("driver-entrypoint-arm64");
        fs_err::write(&other, elf_program(183, 1)).unwrap();
        assert_eq!(find(Architecture::Arm64).await.unwrap(), other);
    }
}
