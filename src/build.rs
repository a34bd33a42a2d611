//! `farrier build`: builds one image for one kernel.

use clap::Args;
use farrier_builder::{BuildOutcome, build_one, services::BuildServices};
use farrier_controller::observe_and_plan;
use farrier_core::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{SnapshotScope, WriteNamespaces},
};
use serde::Serialize;

use super::{
    CliError, Exit, Result,
    args::{EngineArg, KernelArg, PlatformArgs},
    env_vars as vars, output,
    session::Session,
    settings,
};

#[derive(Debug, Args)]
pub struct BuildArgs {
    /// Name of the driver image
    pub image: String,
    #[command(flatten)]
    pub kernel: KernelArg,
    #[command(flatten)]
    pub platform: PlatformArgs,
    /// Cluster whose nodes say which kernel it is, if none is given: kube or kube:CONTEXT, or dir:PATH
    #[arg(long, env = vars::FARRIER_CLUSTER, value_name = "CLUSTER", hide_env_values = true)]
    pub cluster: Option<String>,
    #[command(flatten)]
    pub engine: EngineArg,
    /// Registry of the published images: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
    /// Publish the image
    #[arg(long)]
    pub push: bool,
    /// Build even if an image with the same input hash is published, or the same inputs failed before
    #[arg(long)]
    pub force: bool,
}

/// JSON output of `farrier build`.
#[serde_with::skip_serializing_none]
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BuildResult<'a> {
    /// Image reference by tag.
    reference: String,
    /// Image reference by digest, if the image was to be published.
    pinned: Option<String>,
    digest: String,
    input_hash: String,
    /// `built`, `reused` or `up-to-date`.
    outcome: &'a str,
    /// Origin of the payload, if `outcome` is `reused`.
    reused_from: Option<Reused>,
    pushed_bytes: u64,
    check: Option<&'a kmod::CheckReport>,
}

#[derive(Serialize)]
struct Reused {
    kernel: String,
    digest: String,
}

/// Builds and checks the image and, with `--push`, publishes it.
pub async fn build(session: &Session, args: BuildArgs) -> Result<Exit> {
    let name = settings::parse("image", &args.image)?;
    let (location, engine) = (args.registry.as_deref(), args.engine.engine);
    let services =
        if args.push { session.services(location, engine)? } else { session.reader(location, engine)? };
    let target = match args.kernel.get() {
        Some(kernel) => settings::target(kernel, &args.platform)?,
        None => only_target(session, &services, &name, &args).await?,
    };
    let outcome = build_one(&services, &name, &target, args.push, args.force).await;
    if session.stop.cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    let outcome = outcome?;
    let BuildOutcome { cell, digest, built } = &outcome;
    let result = BuildResult {
        reference: cell.reference.to_string(),
        pinned: args.push.then(|| format!("{}@{digest}", cell.reference.repository)),
        digest: digest.to_string(),
        input_hash: cell.input_hash.to_string(),
        outcome: word(&outcome),
        reused_from: built
            .as_ref()
            .and_then(|built| built.reused_from.as_ref())
            .map(|from| Reused { kernel: from.kernel.to_string(), digest: from.digest.to_string() }),
        pushed_bytes: built.as_ref().map_or(0, |built| built.pushed_bytes),
        check: built.as_ref().map(|built| &built.report),
    };
    session.show(&result, text)?;
    Ok(Exit::Done)
}

/// Returns the only kernel target for which the cluster calls for the image.
async fn only_target(
    session: &Session,
    services: &BuildServices,
    name: &ImageName,
    BuildArgs { kernel, platform, cluster, .. }: &BuildArgs,
) -> Result<KernelTarget> {
    let Some(cluster) = cluster else {
        let hint = "put the kernel's release after the image's name, or pass --cluster CLUSTER, whose nodes say which it is";
        return Err(CliError::hinted("no kernel given", hint));
    };
    settings::images(&[name.to_string()], &services.definitions)?;
    let scope = SnapshotScope::of(&services.definitions);
    let cluster = session.connect(cluster, WriteNamespaces::default(), scope).await?.cluster;
    let plan = observe_and_plan(services, cluster.as_ref()).await?.plan;
    let targets = plan.cells.iter().filter(|cell| cell.image == *name).map(|cell| &cell.target);
    let targets: Vec<&KernelTarget> = targets.filter(|target| platform.allows(target)).collect();
    let known = targets.iter().map(|target| &target.release);
    let release = kernel.or_only(&format!("image {name} is planned"), known)?;
    match targets.iter().filter(|target| target.release == release).collect::<Vec<_>>()[..] {
        [only] => {
            output::message(&format!(
                "kernel {only}: the only one that {} needs {name} for",
                cluster.describe()
            ));
            Ok((*only).clone())
        }
        ref several => {
            let several: Vec<String> = several.iter().map(ToString::to_string).collect();
            Err(CliError::hinted(
                format!("image {name} is planned for several platforms: {}", several.join(", ")),
                "choose one with --os, --os-version and --arch",
            ))
        }
    }
}

/// Returns the outcome's name: `built`, `reused` or `up-to-date`.
pub fn word(outcome: &BuildOutcome) -> &'static str {
    match &outcome.built {
        None => "up-to-date",
        Some(built) if built.reused_from.is_some() => "reused",
        Some(_) => "built",
    }
}

fn text(result: &BuildResult<'_>) -> String {
    let BuildResult { reference, pinned, digest, reused_from, check, .. } = result;
    let table = check.map(ToString::to_string).unwrap_or_default();
    let reused = reused_from.as_ref();
    let reused = reused.map(|from| format!("reused from kernel {}, not compiled\n", from.kernel));
    let line = match (pinned, check) {
        (Some(pinned), Some(_)) => format!("{reference}\n{pinned}"),
        (Some(pinned), None) => format!("{reference} is up to date\n{pinned}"),
        (None, _) => format!("{reference} would be {digest} (not published: --push was not given)"),
    };
    format!("{table}{}{line}", reused.unwrap_or_default())
}
