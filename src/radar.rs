//! `farrier radar`: builds images for the next kernels, and names the header changes behind failures.

use std::path::PathBuf;

use clap::Args;
use farrier_builder::{
    build_one,
    services::{BuildError, BuildProblem, BuildServices, ProblemKind},
};
use farrier_core::{
    image::ImageName,
    kernel::{
        HeaderSource, KernelRelease, KernelTarget, TrackedSuites, UNKNOWN_SYSTEM, debian_version,
        match_family,
    },
    plan::rpm_flavor,
};
use farrier_inputs::HeaderLookup;
use farrier_local::blocking::blocking;
use farrier_radar::{HeaderChange, PatchDraft, changes, draft, names_in};
use serde::Serialize;

use super::{
    CliError, Exit, Result,
    args::{EngineArg, TargetArgs},
    output,
    session::Session,
    settings::{self, parse},
};

#[derive(Debug, Args)]
pub struct RadarArgs {
    /// Driver images to build [default: all images for these kernels]
    #[arg(value_name = "IMAGE")]
    pub images: Vec<String>,
    // The kernel whose headers are compared.
    #[command(flatten)]
    pub target: TargetArgs,
    /// Kernel to build for (repeatable) [default: later kernels of the same flavor in the suites]
    #[arg(long, value_name = "RELEASE")]
    pub next: Vec<String>,
    /// Suite to look for later kernels in, besides those of the kernel family, such as
    /// bookworm-proposed-updates (repeatable)
    #[arg(long, value_name = "SUITE", conflicts_with = "next")]
    pub suite: Vec<String>,
    #[command(flatten)]
    pub engine: EngineArg,
}

/// JSON output of `farrier radar`.
#[derive(Serialize)]
struct RadarReport {
    /// Release of the kernel whose headers are compared.
    from: KernelRelease,
    builds: Vec<RadarBuild>,
}

/// The build of one image for one of the next kernels.
#[serde_with::skip_serializing_none]
#[derive(Serialize)]
struct RadarBuild {
    image: ImageName,
    kernel: KernelRelease,
    /// Whether the image builds and passes its checks.
    builds: bool,
    /// First error of the build.
    error: Option<String>,
    /// Changes of the declarations that the error names.
    changes: Vec<HeaderChange>,
    /// Drafts for `patches`.
    patches: Vec<PatchDraft>,
}

/// Builds the images for the next kernels. Exits with 1 if a build fails.
pub async fn radar(session: &Session, args: RadarArgs) -> Result<Exit> {
    let from = settings::target_of(&args.target)?;
    let services = session.reader(None, args.engine.engine)?;
    let kernels = next_kernels(&services, &from, &args).await?;
    let selected = settings::images(&args.images, &services.definitions)?;
    let mut report = RadarReport { from: from.release.clone(), builds: Vec::new() };
    for (name, image) in &services.definitions.images {
        if !selected.is_empty() && !selected.contains(name) {
            continue;
        }
        for release in &kernels {
            let target = KernelTarget { release: release.clone(), ..from.clone() };
            if image.spec.range_excluding(&target).is_some() {
                continue;
            }
            let outcome = Box::pin(build_one(&services, name, &target, false, true)).await;
            if session.stop.cancel.is_cancelled() {
                return Ok(Exit::Interrupted);
            }
            report.builds.push(radar_build(&services, name, &from, target, outcome.err()).await?);
        }
    }
    session.show(&report, text)?;
    Ok(if report.builds.iter().all(|build| build.builds) { Exit::Done } else { Exit::Failed })
}

/// Returns the kernels to build for, oldest first.
async fn next_kernels(
    services: &BuildServices,
    from: &KernelTarget,
    args: &RadarArgs,
) -> Result<Vec<KernelRelease>> {
    if !args.next.is_empty() {
        return args.next.iter().map(|release| parse("--next", release)).collect();
    }
    let family = match_family(&services.definitions.families, from);
    let Some((family, HeaderSource::Apt(apt))) = family.map(|family| (family, &family.spec.headers)) else {
        let message =
            format!("the kernel family of {} names no suites: give the kernels with --next", from.release);
        return Err(CliError::usage(message));
    };
    let flavor = rpm_flavor(&from.release);
    let mut releases: Vec<KernelRelease> = Vec::new();
    let family_suites = apt.apt_suites().suites.into_iter().map(Ok);
    for suite in family_suites.chain(args.suite.iter().map(|suite| parse("--suite", suite))) {
        let suites = serde_json::json!({"suites": [suite?], "flavors": [flavor]});
        let tracked: TrackedSuites =
            serde_json::from_value(suites).map_err(|error| CliError::usage(format!("--suite: {error}")))?;
        let list_releases = || services.fetcher.headers().releases(&family.spec.headers, &tracked, from.arch);
        releases.extend(services.process.retry("list kernels", list_releases).await?);
    }
    releases.retain(|release| {
        rpm_flavor(release) == flavor
            && debian_version::compare(release.as_str(), from.release.as_str()).is_gt()
    });
    releases.sort_by(|a, b| debian_version::compare(a.as_str(), b.as_str()));
    releases.dedup();
    Ok(releases)
}

/// Describes a build. For a compile error, compares the declarations that it names.
async fn radar_build(
    services: &BuildServices,
    image: &ImageName,
    from: &KernelTarget,
    to: KernelTarget,
    error: Option<BuildError>,
) -> Result<RadarBuild> {
    let names = match &error {
        Some(BuildError::Problem(BuildProblem { kind: ProblemKind::Compile, message, .. })) => {
            names_in(message)
        }
        _ => Vec::new(),
    };
    let mut changed = Vec::new();
    if !names.is_empty()
        && let (Some(old), Some(new)) =
            (header_tree(services, from).await?, header_tree(services, &to).await?)
    {
        changed = blocking(move || changes(&names, &old, &new)).await?;
    }
    Ok(RadarBuild {
        image: image.clone(),
        kernel: to.release,
        builds: error.is_none(),
        error: error.map(|error| error.to_string()),
        patches: changed.iter().filter_map(|change| draft(image.as_str(), change)).collect(),
        changes: changed,
    })
}

async fn header_tree(services: &BuildServices, target: &KernelTarget) -> Result<Option<PathBuf>> {
    let Some(family) = match_family(&services.definitions.families, target) else { return Ok(None) };
    let source = family.spec.headers_for(target, &UNKNOWN_SYSTEM);
    let find = || services.fetcher.headers().find(&source, target);
    Ok(match services.process.retry("fetch headers", find).await? {
        HeaderLookup::Found(set) => Some(set.root),
        HeaderLookup::Missing { .. } => None,
    })
}

fn text(report: &RadarReport) -> String {
    if report.builds.is_empty() {
        return format!("no later kernel than {} for these images", report.from);
    }
    let rows = report.builds.iter().map(|build| {
        let state = if build.builds { "builds" } else { "fails" };
        let mut lines: Vec<String> = build.error.iter().cloned().collect();
        for HeaderChange { function, file, old, new } in &build.changes {
            let declared = |text: &Option<String>| text.clone().unwrap_or_else(|| "not declared".to_owned());
            lines.push(format!("{file} changed {function}:"));
            lines.push(format!("  - {}", declared(old)));
            lines.push(format!("  + {}", declared(new)));
        }
        lines.extend(build.patches.iter().map(ToString::to_string));
        [build.image.to_string(), build.kernel.to_string(), state.to_owned(), lines.join("\n")]
    });
    output::table(["IMAGE", "KERNEL", "STATE", "WHY"], rows).trim_end().to_owned()
}
