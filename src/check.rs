//! `farrier check`: predicts whether modules load on a kernel.

#[cfg(feature = "bootcheck")]
mod boot;
mod image;
mod kernel;
mod subject;

use std::{cell::OnceCell, path::PathBuf, sync::Arc};

use clap::Args;
use farrier_builder::check_with_kernel_image;
use farrier_core::kernel::KernelRelease;
use farrier_payload::DecompressionBudget;
use kmod::{self, CheckReport, CheckRequest, KernelFacts, NeededTable, Rule, Verdict};

#[cfg(feature = "bootcheck")]
pub use boot::{boot_checker, emulator};

use super::{
    CliError, Exit, Result, args::PlatformArgs, env_vars as vars, output, session::Session,
    settings::Settings,
};
use image::Checked;
use kernel::Kernel;
use subject::Subject;

#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct CheckArgs {
    /// Module files (.ko, .ko.gz, .ko.xz, .ko.zst), directories, and images: oci:PATH[:TAG|@DIGEST] for a
    /// layout directory, docker:REF for the local engine, host/repository:tag for a registry
    #[arg(required_unless_present = "explain", value_name = "SUBJECT")]
    pub subjects: Vec<String>,
    /// Explain a rule of the check instead, such as `vermagic`
    #[arg(long, value_name = "RULE", conflicts_with = "subjects")]
    pub explain: Option<Rule>,
    /// Kernel release, exactly as `uname -r` prints it [default: the release of --kernel-image, --headers or
    /// the checked image]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    #[command(flatten)]
    pub platform: PlatformArgs,
    /// Registry whose store holds imported headers, and that may be contacted with --offline:
    /// host[:port]/path, or oci:PATH
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// Root directory with the kernel's headers at their natural paths, such as / [default: found as for a
    /// build]
    #[arg(long, value_name = "DIR")]
    pub headers: Option<PathBuf>,
    /// Check against the kernel that runs on this machine, with what it reports about itself
    #[arg(long, conflicts_with_all = ["kernel", "headers", "kernel_image", "fetch_kernel_image"])]
    pub host: bool,
    /// Read further facts from this kernel image (vmlinuz or vmlinux)
    #[arg(long, value_name = "FILE")]
    pub kernel_image: Option<PathBuf>,
    /// Fetch the kernel image that the family names, if the headers leave something unknown; a cached image
    /// is always used
    #[arg(long, conflicts_with = "kernel_image")]
    pub fetch_kernel_image: bool,
    /// Symbols that the modules may use besides the kernel's: a Module.symvers, or a directory that contains
    /// one (repeatable)
    #[arg(long, value_name = "PATH")]
    pub needs: Vec<PathBuf>,
    /// Also boot the kernel in a virtual machine (QEMU) and load the modules there. The kernel image is
    /// --kernel-image, else the one of the family; with --host it is this machine's
    #[cfg(feature = "bootcheck")]
    #[arg(long)]
    pub boot: bool,
    /// Also exit with 1 if a verdict is unknown
    #[arg(long)]
    pub deny_unknown: bool,
}

/// Context of a check. Settings are loaded on first use: a check of files against given headers needs neither
/// definitions nor a cache.
struct Context<'a> {
    session: &'a Session,
    args: &'a CheckArgs,
    settings: OnceCell<Settings>,
    /// Budget for decompressing the modules of all subjects. Repeated reads count again.
    decompression: Arc<DecompressionBudget>,
}

impl Context<'_> {
    fn settings(&self) -> Result<&Settings> {
        if let Some(settings) = self.settings.get() {
            return Ok(settings);
        }
        let settings = self.session.settings_with_store(self.args.registry.as_deref())?;
        Ok(self.settings.get_or_init(|| settings))
    }
}

/// Checks the modules and prints the report. Exits with 1 if a module is refused.
pub async fn check(session: &Session, args: CheckArgs) -> Result<Exit> {
    if let Some(rule) = args.explain {
        output::result(rule.explanation())?;
        return Ok(Exit::Done);
    }
    let context = &Context {
        session,
        args: &args,
        settings: OnceCell::new(),
        decompression: Arc::new(DecompressionBudget::without_build()),
    };
    let mut subjects = Vec::new();
    for argument in &context.args.subjects {
        subjects.push(Subject::open(context, argument).await?);
    }
    let mut kernel = Kernel::find(context, kernel_of_images(&subjects)?.as_ref()).await?;
    let checked = subject::read(&subjects, &kernel.facts.release, &context.decompression)?;
    let needs = subject::needs(&context.args.needs, &context.decompression)?;
    let check = |facts| std::future::ready(Ok(run_check(&facts, &checked, &needs)));
    let report = check_with_kernel_image(kernel.facts.clone(), check, kernel.extra_facts(context)).await?;
    #[cfg(feature = "bootcheck")]
    let report =
        if context.args.boot { boot::boot(context, &mut kernel, &checked, report).await? } else { report };
    session.show(&report, |report| {
        let hint = report.explain_hint("farrier check").unwrap_or_default();
        output::look::wrapped(format!("{report}{hint}"))
    })?;
    if report.verdict == Verdict::Unknown
        && let Some(hint) = &kernel.hint
    {
        output::message(&format!("hint: {hint}"));
    }
    Ok(match report.verdict {
        Verdict::Refused => Exit::Failed,
        Verdict::Unknown if context.args.deny_unknown => Exit::Failed,
        Verdict::Unknown | Verdict::Loads => Exit::Done,
    })
}

/// Returns the kernel that the images are for. Fails if the images name different kernels.
fn kernel_of_images(subjects: &[Subject]) -> Result<Option<KernelRelease>> {
    let mut kernel: Option<&KernelRelease> = None;
    for release in subjects.iter().filter_map(Subject::kernel) {
        match kernel {
            Some(other) if other != release => {
                return Err(CliError::usage(format!(
                    "the images are for different kernels, {other} and {release}: check one at a time, or give --kernel"
                )));
            }
            _ => kernel = Some(release),
        }
    }
    Ok(kernel.cloned())
}

fn run_check(kernel: &KernelFacts, checked: &Checked, needs: &[NeededTable]) -> CheckReport {
    kmod::check(&CheckRequest {
        kernel,
        needs,
        modules: &checked.modules,
        required: &[],
        files: checked.firmware.as_deref(),
    })
}
