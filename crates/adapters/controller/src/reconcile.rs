//! The steps of one reconcile: plan, build, sign, publish, roll out.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::Duration,
};

use farrier_builder::{
    self as build, BuildOptions, Built, add_needs,
    images::{
        LastRecord, StoredImage, look_up_contents, look_up_root_fs, look_up_sources, publish_union,
        record_kernels,
    },
    resolve::{resolve_more, tracked_kernels, with_hint},
    services::{BuildError, BuildProblem, BuildServices, LazyEngine, ProblemKind, Result, image_location},
};
use farrier_cluster::{Cluster, Directory};
use farrier_core::{
    image::{ChartImage, DriverImage, GitLocation, Output, Version},
    kernel::{Architecture, KernelTarget},
    plan::{
        Announcements, Cell, CellInputs, Change, ClusterSnapshot, ImageContents, ManifestFacts,
        ManifestLocation, Manifests, NodeKernelLimiter, Plan, PlanInputs, PlannedRollout, PlannedSignature,
        PlannedUnion, RolloutTarget, git_commit, images_in_use, kernels_in_use, node_systems,
    },
    site::ignore_nodes,
};
use farrier_git as git;
use farrier_local::machine::native;
use kmod::{CheckReport, Verdict};
use oci::error_chain;

use super::{
    LookupCache, TargetReport,
    apply::{NodeLabelWrites, ensure_published},
    observe::{confirm_warnings, look_up_and_plan},
};

/// A plan, together with the state from which it was computed.
pub struct Planned {
    pub plan: Plan,
    /// Whether an external system was unreachable during planning.
    pub unreachable: bool,
    pub(super) announced: Announcements,
    /// Cluster snapshot from which the plan was computed.
    pub snapshot: ClusterSnapshot,
    /// Contents of the images that DaemonSets and their pods use.
    pub contents: BTreeMap<String, ImageContents>,
}

impl Planned {
    /// Returns the plan with the state of rollouts and nodes after the writes of a reconcile.
    pub(super) fn after(self, rollouts: Vec<PlannedRollout>, labels: &NodeLabelWrites) -> Self {
        let mut nodes = self.plan.nodes;
        for node in nodes.iter_mut().filter(|node| labels.nodes.contains(&node.node)) {
            node.change = None;
        }
        Self { plan: Plan { rollouts, nodes, ..self.plan }, ..self }
    }
}

/// Outcome of a build: its report, and the kind of fault if the build failed.
pub(super) struct AttemptResult {
    pub(super) report: TargetReport,
    pub(super) fault: Option<BuildFault>,
}

/// Classes of build failure, which decide whether and when the build is retried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BuildFault {
    /// Permanent failure: the same inputs would fail again.
    Permanent,
    /// A build step forged runner messages. The same inputs would do so again.
    Tampered,
    /// An external system was unreachable.
    Unreachable,
    /// Transient fault: a retry may succeed.
    Transient,
    /// An input changed after planning, so the cell needs a new plan.
    Outdated,
    /// The build was canceled, or the fence closed.
    Stopped,
}

impl BuildFault {
    fn of(error: &BuildError) -> Self {
        match error {
            BuildError::Canceled | BuildError::Fenced(_) => Self::Stopped,
            BuildError::Outdated(_) => Self::Outdated,
            BuildError::Problem(BuildProblem { kind: ProblemKind::Tampered, .. }) => Self::Tampered,
            error if error.is_permanent() => Self::Permanent,
            error if error.is_unreachable() => Self::Unreachable,
            _ => Self::Transient,
        }
    }
}

/// Observes and plans without changing anything.
pub async fn observe_and_plan(services: &BuildServices, cluster: &dyn Cluster) -> Result<Planned> {
    let mut snapshot = cluster.snapshot().await?;
    ignore_nodes(&mut snapshot, &services.definitions.site.ignore_nodes, jiff::Timestamp::now());
    NodeKernelLimiter::default().limit(&mut snapshot, &services.definitions, Duration::ZERO);
    plan_for(services, snapshot, &mut LookupCache::default()).await
}

/// Plans for a snapshot, looking up only what `lookup_cache` lacks.
pub(super) async fn plan_for(
    services: &BuildServices,
    snapshot: ClusterSnapshot,
    lookup_cache: &mut LookupCache,
) -> Result<Planned> {
    let tracked = tracked_kernels(services, &snapshot).await;
    let announced = Announcements::of(&services.definitions, &snapshot, tracked);
    let systems = node_systems(&snapshot, &services.definitions.families);
    let targets: BTreeSet<KernelTarget> = systems.keys().chain(announced.targets()).cloned().collect();
    lookup_cache.begin_plan(systems);
    let mut required: Vec<&DriverImage> = services
        .definitions
        .images
        .values()
        .filter(|image| is_required(image, &snapshot) || announced.has_kernel_for(&image.metadata.name))
        .collect();
    add_needs(&services.definitions, &mut required);
    resolve_more(services, &required, &targets, &mut lookup_cache.resolved).await;
    let refused = look_up_sources(services, &required, &targets, &mut lookup_cache.resolved).await;
    lookup_cache.record_refused(refused);
    look_up_root_fs(services, &required, &targets, &mut lookup_cache.resolved).await;
    let manifests = read_all_manifests(services, lookup_cache).await;
    let in_use = images_in_use(&snapshot, &services.definitions);
    look_up_contents(&services.images, &in_use, &mut lookup_cache.observed.contents).await;
    let (location, now) = (image_location(&services.images.location), jiff::Timestamp::now());
    let (machine, has_daemon) = Box::pin(probe_engine(&services.tools.engine, &required, &targets)).await;
    let LookupCache { resolved, observed, unreachable, .. } = lookup_cache;
    let inputs = PlanInputs {
        cells: CellInputs { definitions: &services.definitions, resolved, location: &location },
        snapshot: &snapshot,
        announced: &announced,
        manifests: &manifests,
        instance: &services.process.instance,
        machine,
        has_daemon,
        now,
    };
    let mut plan = Box::pin(look_up_and_plan(services, &inputs, observed, unreachable)).await?;
    confirm_warnings(services, &mut plan, &mut lookup_cache.refuses_anonymous).await;
    let unreachable = lookup_cache.resolved.unreachable || lookup_cache.unreachable;
    let contents = lookup_cache.observed.contents.clone();
    Ok(Planned { plan, unreachable, announced, snapshot, contents })
}

/// Returns the engine's architecture, and whether a daemon is available. Detecting the engine is slow, so each probe runs only
/// if the plan needs it: the first for a target of another architecture, the second for an image with `output: image`.
async fn probe_engine(
    engine: &LazyEngine,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
) -> (Option<Architecture>, bool) {
    let has_foreign_target = targets.iter().any(|target| target.arch != native());
    let machine = if has_foreign_target { engine.machine().await } else { None };
    let needs_daemon = images.iter().any(|image| image.spec.output == Output::Image);
    (machine, needs_daemon && engine.has_daemon().await)
}

/// Builds one cell and reports the outcome.
pub(super) async fn build_planned(services: &BuildServices, cell: &Cell) -> Result<AttemptResult> {
    let subject = cell.subject();
    match build::attempt(services, cell, BuildOptions { push: true, compile: false }).await? {
        Ok(built) => Ok(AttemptResult { report: published_report(services, cell, built), fault: None }),
        Err(error) => {
            // The reporter shows only the outcome. The error goes to the report or the log.
            let outcome = if matches!(error, BuildError::Canceled) { "interrupted" } else { "failed" };
            services.process.reporter.finished(&subject, outcome);
            let report = TargetReport::failed(subject, &error);
            Ok(AttemptResult { report, fault: Some(BuildFault::of(&error)) })
        }
    }
}

/// Shows a published image on the reporter, and returns its target report.
fn published_report(services: &BuildServices, cell: &Cell, built: Built) -> TargetReport {
    let subject = cell.subject();
    let pinned = |digest: &farrier_core::image::Digest| format!("{}@{digest}", cell.reference.repository);
    let Built { digest, report, reused_from, pushed_bytes } = built;
    let (image, verdict) = (pinned(&digest), report.verdict);
    let warnings = match verdict {
        Verdict::Unknown => vec![warning(&report)],
        Verdict::Loads | Verdict::Refused => Vec::new(),
    };
    for warning in &warnings {
        services.process.reporter.note(&subject, &format!("warning: {warning}"));
    }
    let origin = reused_from.as_ref().map(|from| format!(", reused from kernel {}", from.kernel));
    let origin = origin.unwrap_or_default();
    services.process.reporter.finished(&subject, &format!("published {digest} (check: {verdict}{origin})"));
    match reused_from {
        Some(from) => TargetReport::Reused {
            subject,
            image,
            verdict,
            kernel: from.kernel.to_string(),
            from: pinned(&from.digest),
            pushed_bytes,
        },
        None => TargetReport::Built { subject, image, verdict, warnings, pushed_bytes },
    }
}

/// Records in the registry which kernels run or are announced, for garbage collection.
pub(super) async fn record_kernels_in_use(
    services: &BuildServices,
    planned: &Planned,
    last: &mut LastRecord,
) {
    let kernels = kernels_in_use(&planned.snapshot, &planned.announced);
    record_kernels(services, kernels, last).await;
}

/// Signs a published image that lacks a signature, and the image's documents.
pub(super) async fn sign_planned(services: &BuildServices, planned: &PlannedSignature) -> TargetReport {
    let PlannedSignature { image, reference } = planned;
    let subject = format!("{image}, {reference}");
    let signed = match &reference.version {
        Version::Digest(digest) => {
            let stored = StoredImage { services, repository: &reference.repository, digest };
            stored.sign_published(image.as_str()).await
        }
        Version::Tag(_) => Ok(()),
    };
    match signed {
        Ok(()) => TargetReport::Signed { subject, image: reference.to_string() },
        Err(error) => TargetReport::failed(subject, &error),
    }
}

/// Publishes a union image from the payloads of several kernels.
pub(super) async fn publish_planned_union(services: &BuildServices, union: &PlannedUnion) -> TargetReport {
    let kernels: Vec<String> = union.members.iter().map(|member| member.kernel.to_string()).collect();
    let subject = format!("{} for {} kernels", union.image, kernels.len());
    match publish_union(services, union).await {
        Ok(published) => {
            let image = format!("{}@{}", union.reference.repository, published.digest);
            TargetReport::United { subject, image, kernels }
        }
        Err(error) => TargetReport::failed(subject, &error),
    }
}

pub(super) async fn add_missing_tags(
    services: &BuildServices,
    cell: &Cell,
    digest: &farrier_core::image::Digest,
    references: &[farrier_core::image::ImageReference],
) -> TargetReport {
    let subject = cell.subject();
    match build::add_tags(services, cell, digest, references).await {
        Ok(()) => {
            TargetReport::Tagged { subject, references: references.iter().map(ToString::to_string).collect() }
        }
        Err(error) => TargetReport::failed(subject, &error),
    }
}

/// Applies the changes of a rollout in order. On cancellation, stops between two changes. A refused eviction does not hold the
/// evictions after it; the first refusal is returned. A change of a pod or node that is gone is skipped.
pub(super) async fn roll_out(
    services: &BuildServices,
    cluster: &dyn Cluster,
    rollout: &PlannedRollout,
) -> Result<()> {
    let mut refusal = None;
    for change in &rollout.changes {
        if services.process.cancel.is_cancelled() {
            return Err(BuildError::Canceled);
        }
        ensure_published(&services.images, change).await?;
        services.process.ensure_may_write()?;
        match &rollout.target.location {
            Some(ManifestLocation::Local { path, values }) => {
                let directory = Directory::open(&services.definitions.root.join(path))?;
                directory.with_chart(values.as_ref()).apply(change).await?;
            }
            Some(ManifestLocation::Git(location)) => commit(services, location, rollout, change).await?,
            None => match cluster.apply(change).await {
                // The pod or the node is gone, as spot nodes are: the next plan decides without it.
                Err(error)
                    if matches!(change, Change::Restart(_) | Change::Node(_)) && error.is_conflict() =>
                {
                    tracing::debug!(object = change.object(), %error, "change is stale");
                }
                Err(error) if matches!(change, Change::Restart(_)) && !error.is_unreachable() => {
                    refusal = refusal.or(Some(error));
                }
                outcome => outcome?,
            },
        }
    }
    refusal.map_or(Ok(()), |error| Err(error.into()))
}

/// Commits a change to a Git repository.
async fn commit(
    services: &BuildServices,
    location: &GitLocation,
    rollout: &PlannedRollout,
    change: &Change,
) -> Result<()> {
    let image = services.definitions.images.get(&rollout.image);
    let mut specs = image.into_iter().flat_map(|image| &image.spec.rollout);
    let spec = specs.find(|spec| RolloutTarget::of(spec) == rollout.target);
    let commit = spec.and_then(|spec| git_commit(spec, rollout, change));
    let commit = commit.ok_or_else(|| BuildError::definition_gone(&rollout.target.to_string()))?;
    git::write(services, location, change, &commit).await
}

/// Reads the manifests that `file` and `git` rollouts name.
async fn read_all_manifests(services: &BuildServices, lookup_cache: &mut LookupCache) -> Manifests {
    let mut locations: BTreeMap<ManifestLocation, Vec<&str>> = BTreeMap::new();
    for spec in services.definitions.images.values().flat_map(|image| &image.spec.rollout) {
        if let Some(location) = ManifestLocation::of(spec) {
            locations.entry(location).or_default().extend(spec.proposals());
        }
    }
    let mut manifests = Manifests::new();
    for (location, proposals) in locations {
        let facts = match &location {
            ManifestLocation::Local { path, values } => read_manifests(services, path, values.as_ref()).await,
            ManifestLocation::Git(git) => read_repository(services, git, &proposals, lookup_cache).await,
        };
        manifests.insert(location, facts);
    }
    manifests
}

async fn read_repository(
    services: &BuildServices,
    location: &GitLocation,
    proposals: &[&str],
    lookup_cache: &mut LookupCache,
) -> Result<ManifestFacts, String> {
    if let Some(found) = lookup_cache.repository(location) {
        return found.clone();
    }
    let known = lookup_cache.last_read(location);
    let found = git::read(services, location, proposals, known).await.map_err(|error| with_hint(&error));
    lookup_cache.record_repository(location.clone(), found.clone());
    found
}

async fn read_manifests(
    services: &BuildServices,
    path: &Path,
    chart: Option<&ChartImage>,
) -> Result<ManifestFacts, String> {
    let read = match Directory::open(&services.definitions.root.join(path)) {
        Ok(directory) => directory.with_chart(chart).snapshot().await,
        Err(error) => Err(error),
    };
    let ClusterSnapshot { daemon_sets, resources, skipped, .. } =
        read.map_err(|error| error_chain(&error))?;
    Ok(ManifestFacts { daemon_sets, resources, skipped, ..ManifestFacts::default() })
}

/// Returns the warning for a published payload whose check is inconclusive, with the remedies.
fn warning(report: &CheckReport) -> String {
    let remedies = report.remedies(Verdict::Unknown).join("; ");
    format!("the check is inconclusive: {} (remedies: {remedies})", report.summary())
}

/// Whether the image's node labels select at least one node.
fn is_required(image: &DriverImage, snapshot: &ClusterSnapshot) -> bool {
    snapshot.nodes.iter().any(|node| node.is_selected_by(image))
}

#[cfg(test)]
#[path = "reconcile_tests.rs"]
mod tests;
