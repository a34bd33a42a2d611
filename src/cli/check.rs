//! `farrier check`: will these modules load on that kernel?

mod boot;
mod image;
mod kernel;
mod subject;

use std::cell::OnceCell;

use tokio_util::sync::CancellationToken;

use super::{
    CliError, Exit,
    args::{CheckArgs, Global, OutputForm},
    printer,
    settings::{Settings, parse},
};
use crate::{
    kernel::KernelRelease,
    kmod::{self, CheckReport, CheckRequest, NeededTable, Verdict},
    registry::{self, RegistryLocation},
    store::Store,
};
use kernel::Kernel;
use subject::{Checked, Subject};

/// Settings are read when something needs them: a check of files against given headers needs neither definitions
/// nor a cache.
struct Context<'a> {
    global: &'a Global,
    args: &'a CheckArgs,
    settings: OnceCell<Settings>,
    cancel: CancellationToken,
}

impl Context<'_> {
    fn settings(&self) -> Result<&Settings, CliError> {
        if let Some(settings) = self.settings.get() {
            return Ok(settings);
        }
        let mut settings = Settings::resolve(self.global)?;
        if let Some(location) = &self.args.registry {
            let location: RegistryLocation = parse("--registry", location)?;
            let registry = registry::connect(&location, &settings.registry)?;
            settings.fetcher = settings.fetcher.with_store(Store::new(location, registry));
        }
        Ok(self.settings.get_or_init(|| settings))
    }
}

/// Checks the modules and prints the report. A refused module is exit code 1.
pub async fn check(global: &Global, args: &CheckArgs, cancel: CancellationToken) -> Result<Exit, CliError> {
    let context = Context { global, args, settings: OnceCell::new(), cancel: cancel.clone() };
    tokio::select! {
        // First, so that what was begun is given up at once.
        biased;
        () = cancel.cancelled() => Ok(Exit::Interrupted),
        exit = run(&context) => exit,
    }
}

async fn run(context: &Context<'_>) -> Result<Exit, CliError> {
    let mut subjects = Vec::new();
    for word in &context.args.subjects {
        subjects.push(Subject::open(context, word).await?);
    }
    let mut kernel = Kernel::find(context, suggested(&subjects)?.as_ref()).await?;
    let checked = subject::read(&subjects, &kernel.facts.release)?;
    let needs = subject::needs(&context.args.needs)?;
    let mut report = apply(&kernel, &checked, &needs);
    // A kernel image is a download of 70 MB: only for what is not settled without it.
    if report.verdict == Verdict::Unknown && kernel.take_image(context).await? {
        report = apply(&kernel, &checked, &needs);
    }
    if context.args.boot {
        report = boot::boot(context, &mut kernel, &checked, report).await?;
    }
    show(context, &report)?;
    if report.verdict == Verdict::Unknown
        && let Some(hint) = &kernel.hint
    {
        printer::message(&format!("hint: {hint}"));
    }
    Ok(match report.verdict {
        Verdict::Refused => Exit::Failed,
        Verdict::Unknown if context.args.deny_unknown => Exit::Failed,
        Verdict::Unknown | Verdict::Loads => Exit::Done,
    })
}

/// The kernel that the checked images are for, when all that say so agree.
fn suggested(subjects: &[Subject]) -> Result<Option<KernelRelease>, CliError> {
    let mut found: Option<&KernelRelease> = None;
    for release in subjects.iter().filter_map(Subject::kernel) {
        match found {
            Some(other) if other != release => {
                return Err(CliError::Usage(format!(
                    "the images are for different kernels, {other} and {release}: check one at a time, or give --kernel"
                )));
            }
            _ => found = Some(release),
        }
    }
    Ok(found.cloned())
}

fn apply(kernel: &Kernel, checked: &Checked, needs: &[NeededTable]) -> CheckReport {
    kmod::check(&CheckRequest {
        kernel: &kernel.facts,
        needs,
        modules: &checked.modules,
        required: &[],
        files: checked.firmware.as_deref(),
    })
}

fn show(context: &Context<'_>, report: &CheckReport) -> Result<(), CliError> {
    Ok(printer::result(&match context.global.output {
        OutputForm::Json => printer::json(report)?,
        OutputForm::Table => kmod::table_with(report, printer::style()),
    })?)
}
