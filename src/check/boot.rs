//! `farrier check --boot`: loads the modules in a booted kernel.

use std::{path::PathBuf, sync::Arc};

use farrier_bootcheck::{self as boot, BootError, BootRequest, QemuBoot};
use farrier_builder::services::{BootChecker, BuildServices};
use farrier_local::machine::native;
use kmod::{BootReport, CheckReport};
use tempfile::TempDir;

use super::{Context, image::Checked, kernel::Kernel};
use crate::{
    CliError,
    error::{Exit, exit_codes},
    output,
};

/// Directory in the cache in which boot checks keep results about this machine.
const BOOT_CACHE_DIR: &str = "boot";

exit_codes! {
    // The emulator and its init are external systems.
    BootError: |error| match error {
        BootError::Canceled => Exit::Interrupted,
        BootError::NoEmulator { .. } | BootError::NoEntrypoint(_) | BootError::Start(..) => Exit::Unreachable,
        _ => Exit::Failed,
    }, |error| Some(error.hint());
}

/// Returns the boot checker for definitions with `check.boot: true`.
pub fn boot_checker(services: &BuildServices, entrypoint: Option<PathBuf>) -> Arc<dyn BootChecker> {
    Arc::new(QemuBoot {
        fetcher: services.fetcher.clone(),
        entrypoint,
        kvm_state_dir: services.cache.root().join(BOOT_CACHE_DIR),
        cancel: services.process.cancel.clone(),
    })
}

/// Returns the emulator for this machine's architecture.
pub async fn emulator() -> Result<&'static str, CliError> {
    Ok(boot::find_emulator(native()).await?)
}

/// Boots the kernel, loads the modules in load order, and adds the results to the report.
pub(super) async fn boot(
    context: &Context<'_>,
    kernel: &mut Kernel,
    checked: &Checked,
    report: CheckReport,
) -> Result<CheckReport, CliError> {
    let given = context.session.global.entrypoint.as_deref();
    let entrypoint = boot::find_init(given, kernel.facts.arch).await?;
    let image = kernel.bootable(context).await?;
    let order = in_load_order(&report, checked);
    let (payload, modules) = gather(checked, &order)?;
    let count = modules.len();
    let plural = if count == 1 { "" } else { "s" };
    output::message(&format!("booting {} with {count} module{plural}", kernel.facts.release));
    let mut request = BootRequest::new(image, payload.path().to_owned(), modules.clone(), entrypoint);
    request.decompression = Arc::clone(&context.decompression);
    request.kvm_state_dir = Some(context.settings()?.cache.root().join(BOOT_CACHE_DIR));
    let needed = context.args.needs.iter().filter(|path| path.is_dir());
    request.needed = needed.cloned().collect();
    let mut boot_report = boot::boot_check(&request, &context.session.stop.cancel).await?;
    restore_checked_paths(&mut boot_report, &modules, &order, checked);
    Ok(report.with_boot(boot_report))
}

/// Returns the indices of the checked modules, each after the modules that it needs. Modules without a known
/// order come last: the kernel then loads or refuses them.
fn in_load_order(report: &CheckReport, checked: &Checked) -> Vec<usize> {
    let mut order = report.load_order_indices();
    let unordered: Vec<usize> = (0..checked.modules.len()).filter(|index| !order.contains(index)).collect();
    order.extend(unordered);
    order
}

/// Makes a directory with a link to each module, `<number>/<file name>`. The modules themselves may be
/// anywhere.
fn gather(checked: &Checked, order: &[usize]) -> Result<(TempDir, Vec<String>), BootError> {
    let dir = tempfile::tempdir()?;
    let mut modules = Vec::new();
    for file in order.iter().filter_map(|&index| checked.files.get(index)) {
        let number = modules.len().to_string();
        let directory = dir.path().join(&number);
        fs_err::create_dir(&directory)?;
        let file_name = file.file_name().unwrap_or_default();
        let target = std::path::absolute(file)?;
        fs_err::os::unix::fs::symlink(target, directory.join(file_name))?;
        modules.push(format!("{number}/{}", file_name.to_string_lossy()));
    }
    Ok((dir, modules))
}

/// Replaces the paths of the gathered files with the paths that the static check reports.
fn restore_checked_paths(report: &mut BootReport, gathered: &[String], order: &[usize], checked: &Checked) {
    for module in &mut report.modules {
        let position = gathered.iter().position(|path| *path == module.path);
        let index = position.and_then(|position| order.get(position));
        if let Some(checked) = index.and_then(|&index| checked.modules.get(index)) {
            module.path.clone_from(&checked.path);
        }
    }
}
