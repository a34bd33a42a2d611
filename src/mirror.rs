//! `farrier mirror`: copies everything that images are made from into the registry.

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use farrier_builder::services::BuildServices;
use farrier_bundle::{MirrorReport, MirroredInput, MissingInput, Selection, mirror_inputs};
use farrier_controller::observe_and_plan;
use farrier_core::{
    kernel::KernelTarget,
    plan::{SnapshotScope, WriteNamespaces},
};
use farrier_engines::EngineChoice;

use super::{
    CliError, Exit, Result,
    args::{PlatformArgs, RegistryArg},
    output,
    session::Session,
    settings,
};

/// Selection of kernels and images.
#[derive(Debug, Args)]
pub struct SelectionArgs {
    /// Kernel release, exactly as `uname -r` prints it (repeatable)
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Vec<String>,
    /// Operating system id, as in os-release: one for all kernels, or one for each --kernel in order
    /// (repeatable or separated by commas) [default: this machine's]
    #[arg(long, value_name = "ID", value_delimiter = ',')]
    pub os: Vec<String>,
    /// Operating system version, as VERSION_ID in os-release; several like --os [default: this machine's]
    #[arg(long, value_name = "VERSION", value_delimiter = ',')]
    pub os_version: Vec<String>,
    /// Architecture, amd64 or arm64; several like --os [default: this machine's]
    #[arg(long, value_name = "ARCH", value_delimiter = ',')]
    pub arch: Vec<String>,
    /// Instead of --kernel, the kernels that the nodes of this cluster run or will boot, for each image those
    /// of the nodes that call for it: kube, kube:CONTEXT or dir:PATH
    #[arg(long, value_name = "CLUSTER", conflicts_with_all = ["kernel", "os", "os_version", "arch"])]
    pub cluster: Option<String>,
    /// Name of a driver image (repeatable), which includes the images that it needs [default: all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
}

impl SelectionArgs {
    /// Returns a kernel target for each position in the lists of values. A single value counts for all positions.
    fn targets(&self) -> Result<BTreeSet<KernelTarget>> {
        let Self { kernel, os, os_version, arch, .. } = self;
        let options = [("--kernel", kernel), ("--os", os), ("--os-version", os_version), ("--arch", arch)];
        let count = options.iter().map(|(_, values)| values.len()).max().unwrap_or_default();
        for (name, values) in options {
            let given = values.len();
            if given > 1 && given != count {
                return Err(CliError::usage(format!(
                    "{name} has {given} values: give one for all kernels, or {count}, one for each"
                )));
            }
        }
        let target = |index: usize| {
            let value = |(_, values): (&str, &Vec<String>)| values.get(index).or(values.first()).cloned();
            let [kernel, os, os_version, arch] = options.map(value);
            settings::target(&kernel.unwrap_or_default(), &PlatformArgs { os, os_version, arch })
        };
        (0..count).map(target).collect()
    }
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("kernels").args(["kernel", "cluster"]).required(true)))]
pub struct MirrorArgs {
    #[command(flatten)]
    pub selection: SelectionArgs,
    #[command(flatten)]
    pub registry: RegistryArg,
}

/// Fills the store of the registry.
pub async fn mirror(session: &Session, args: MirrorArgs) -> Result<Exit> {
    let services = session.publisher(&args.registry, EngineChoice::Auto)?;
    let selection = selection(session, &args.selection, &services).await?;
    let reports = mirror_inputs(&services, &selection, &mut print_progress).await;
    if session.stop.cancel.is_cancelled() {
        return Ok(Exit::Interrupted);
    }
    session
        .show(&reports, |reports| output::table(["WHAT", "OUTCOME", "REFERENCE"], reports.iter().map(row)))?;
    let exit = |report: &MirrorReport| match report {
        MirrorReport::Stored(_) => Exit::Done,
        MirrorReport::Failed(missing) if missing.unreachable => Exit::Unreachable,
        MirrorReport::Failed(_) => Exit::Failed,
    };
    Ok(reports.iter().map(exit).max().unwrap_or(Exit::Done))
}

/// Returns the selected images and kernels.
pub async fn selection(
    session: &Session,
    args: &SelectionArgs,
    services: &BuildServices,
) -> Result<Selection> {
    let mut images = settings::images(&args.image, &services.definitions)?;
    let Some(cluster) = &args.cluster else {
        if images.is_empty() {
            images.extend(services.definitions.images.keys().cloned());
        }
        return Ok(Selection { images, kernels: args.targets()?, kernels_by_image: None });
    };
    let scope = SnapshotScope::of(&services.definitions);
    let connection = session.connect(cluster, WriteNamespaces::default(), scope).await?;
    let plan = observe_and_plan(services, connection.cluster.as_ref()).await?.plan;
    for node in &plan.skipped_nodes {
        output::message(&format!("note: the kernel of node {} is not included: {}", node.node, node.why));
    }
    let mut by_image: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for cell in plan.cells {
        by_image.entry(cell.image).or_default().insert(cell.target);
    }
    if images.is_empty() {
        images.extend(by_image.keys().cloned());
    }
    let selected = images.iter().filter_map(|image| by_image.get(image));
    let kernels = selected.flatten().cloned().collect();
    Ok(Selection { images, kernels, kernels_by_image: Some(by_image) })
}

/// Prints a line for each finished input.
fn print_progress(report: &MirrorReport) {
    output::message(&match report {
        MirrorReport::Stored(MirroredInput { what, content: _, new }) => {
            format!("{what}: {}", if *new { "put into the registry" } else { "already present" })
        }
        MirrorReport::Failed(MissingInput { what, error, .. }) => format!("{what}: failed: {error}"),
    });
}

fn row(report: &MirrorReport) -> [String; 3] {
    match report {
        MirrorReport::Stored(MirroredInput { what, content, new }) => {
            let tag = content.tag.as_ref().map(|tag| format!(":{tag}")).unwrap_or_default();
            let outcome = if *new { "stored" } else { "already present" };
            [what.clone(), outcome.to_owned(), format!("{}{tag}", content.repository)]
        }
        MirrorReport::Failed(MissingInput { what, error, hint, .. }) => {
            let hint = hint.as_ref().map(|hint| format!("\n{hint}")).unwrap_or_default();
            [what.clone(), "failed".to_owned(), format!("{error}{hint}")]
        }
    }
}
