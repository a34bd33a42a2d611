//! Adapter: one pass over a cluster: observe, plan, apply, report.

use std::{collections::BTreeSet, path::PathBuf};

use super::{
    Controller, Memory, PassReport, RolloutReport, TargetReport,
    apply::{label_nodes, prove},
    broken_chains::BrokenChains,
};
use crate::{
    build::{self, BuildOptions, Built, add_needs, known_failures, record_outcome},
    cache::CacheError,
    cluster::{Cluster, ClusterError, Directory},
    fault::chain,
    image::{DriverImage, ImageReference, RolloutSpec},
    images::{LastRecord, contents, look_up_signatures, publish_union, record_kernels, sign_published},
    kernel::KernelTarget,
    kmod::{CheckReport, Verdict},
    parts::{TargetError, image_location},
    plan::{
        self, Announcements, Cell, ClusterSnapshot, ImageLocation, Manifests, Matrix, MatrixInputs, Observed,
        Plan, PlanInputs, PlannedRollout, PlannedSignature, PlannedUnion, RolloutDecision, images_in_use,
        kernels_to_note, node_target,
    },
    resolve::{resolve_more, tracked},
};

/// Why a pass could not be made at all.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Nodes and rollout targets could not be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A plan with what it was made from.
pub struct Planned {
    /// What is to be done.
    pub plan: Plan,
    /// Was an outside system out of reach while it was made?
    pub unreachable: bool,
    pub(super) matrix: Matrix,
    /// What it was made from.
    pub(super) snapshot: ClusterSnapshot,
}

/// How a build ended.
pub(super) struct BuildEnd {
    /// What is told of it.
    pub(super) report: TargetReport,
    /// What kind of fault it met.
    pub(super) fault: Option<Fault>,
}

/// What follows from a failed build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The same inputs fail again.
    Permanent,
    /// An outside system was out of reach.
    Unreachable,
    /// It may be otherwise the next time.
    Passing,
    /// It was stopped.
    Stopped,
}

impl Fault {
    fn of(error: &TargetError) -> Self {
        match error {
            TargetError::Cancelled | TargetError::Fenced { .. } => Self::Stopped,
            error if error.is_permanent() => Self::Permanent,
            error if error.is_unreachable() => Self::Unreachable,
            _ => Self::Passing,
        }
    }
}

impl Controller {
    /// Observes and plans; touches nothing.
    pub async fn plan(&self, cluster: &dyn Cluster) -> Result<Planned, PassError> {
        let snapshot = cluster.snapshot().await?;
        self.plan_for(snapshot, &mut Memory::default()).await
    }

    /// Plans for a snapshot, and looks up what memory lacks.
    pub(super) async fn plan_for(
        &self,
        snapshot: ClusterSnapshot,
        memory: &mut Memory,
    ) -> Result<Planned, PassError> {
        let tracked = tracked(self, &snapshot).await;
        let announced = Announcements::of(&self.definitions, &snapshot, tracked);
        let targets: BTreeSet<KernelTarget> = snapshot
            .nodes
            .iter()
            .filter_map(|node| node_target(node).ok())
            .chain(announced.targets().cloned())
            .collect();
        let mut called_for: Vec<&DriverImage> = self
            .definitions
            .images
            .values()
            .filter(|image| is_called_for(image, &snapshot) || announced.call_for(&image.metadata.name))
            .collect();
        add_needs(&self.definitions, &mut called_for);
        resolve_more(self, &called_for, &targets, &mut memory.resolved).await;
        let location = self.image_location();
        let matrix = loop {
            let Memory { resolved, lookups, contents: _, signatures: _ } = &mut *memory;
            let matrix = plan::matrix(&MatrixInputs {
                cells: resolved.cell_inputs(&self.definitions, &lookups.published, &location),
                snapshot: &snapshot,
                announced: &announced,
            });
            // What a needed image exposes makes further cells: as often as the longest chain has images.
            let references = matrix.cells.iter().flat_map(|cell| cell.references());
            let news = self.look_up_more(references, lookups).await;
            if !news || called_for.iter().all(|image| image.spec.needs.is_empty()) {
                break matrix;
            }
        };
        let unreachable = memory.resolved.unreachable;
        let manifests = self.manifests().await;
        self.decide(matrix, snapshot, manifests, unreachable, memory).await
    }

    /// Asks the registry and the failure record, and decides.
    async fn decide(
        &self,
        matrix: Matrix,
        snapshot: ClusterSnapshot,
        manifests: Manifests,
        unreachable: bool,
        memory: &mut Memory,
    ) -> Result<Planned, PassError> {
        let Memory { resolved: _, lookups, contents: known, signatures } = memory;
        let failures = known_failures(&self.cache, matrix.cells.iter().map(|cell| cell.input_hash))?;
        let contents = contents(self, &images_in_use(&snapshot, &self.definitions), known).await;
        let mut observed = Observed {
            published: lookups.published.clone(),
            unreachable: lookups.failed.clone(),
            failures,
            contents,
            signatures: signatures.clone(),
        };
        let now = jiff::Timestamp::now();
        let decide = |observed: &Observed| {
            plan::plan(&PlanInputs {
                definitions: &self.definitions,
                matrix: &matrix,
                observed,
                snapshot: &snapshot,
                manifests: &manifests,
                pullable: self.image_location().pullable,
                now,
            })
        };
        let mut plan = decide(&observed);
        // Which images there should be for several kernels is only known now, and of those whether they are signed
        // when they have been looked up: members, then unions.
        for _ in 0..3 {
            let unions: Vec<&ImageReference> = plan.unions.iter().map(|union| &union.reference).collect();
            self.look_up_more(unions.iter().copied(), lookups).await;
            let found = unions.iter().any(|reference| lookups.published.contains_key(*reference));
            if !(look_up_signatures(self, &plan.signable, signatures).await || found) {
                break;
            }
            observed.published.clone_from(&lookups.published);
            observed.signatures.clone_from(signatures);
            plan = decide(&observed);
        }
        Ok(Planned { plan, unreachable: unreachable || lookups.unreachable, matrix, snapshot })
    }

    /// One pass. A target's failure does not stop the others; rollouts come last, decided anew from what
    /// the registry then holds and the nodes then run (guarantee 1): a build may have taken an hour.
    pub async fn pass(&self, cluster: &dyn Cluster) -> Result<PassReport, PassError> {
        let mut memory = Memory::default();
        let mut planned = self.plan_for(cluster.snapshot().await?, &mut memory).await?;
        let mut unreachable = planned.unreachable;
        let mut targets = Vec::new();
        let plan = &planned.plan;
        for planned in &plan.tags {
            targets.push(self.add_tags(&planned.cell, &planned.digest, &planned.references).await);
        }
        for planned in &plan.signatures {
            targets.push(self.sign_planned(planned).await);
        }
        let built = self.build_all(plan, &planned.snapshot, &mut memory).await?;
        unreachable |= built.unreachable;
        targets.extend(built.targets);
        if !targets.is_empty() {
            planned = self.plan(cluster).await?;
            unreachable |= planned.unreachable;
        }
        if !planned.plan.unions.is_empty() && !self.cancel.is_cancelled() {
            for union in &planned.plan.unions {
                targets.push(self.unite(union).await);
            }
            planned = self.plan(cluster).await?;
            unreachable |= planned.unreachable;
        }
        let rollouts = self.roll_out_all(cluster, &mut planned.plan).await;
        label_nodes(self, cluster, &mut planned.plan.nodes).await;
        self.record_kernels(&planned, &mut LastRecord::default()).await;
        Ok(PassReport { targets, rollouts, plan: planned.plan, unreachable })
    }

    /// Makes what a plan says of rollouts; the plan then says how things stand. What a chain's other rollouts are about
    /// stays as it is after one of them failed: its images fit one another and not those of before.
    async fn roll_out_all(&self, cluster: &dyn Cluster, plan: &mut Plan) -> Vec<RolloutReport> {
        let mut rollouts = Vec::new();
        let mut broken = BrokenChains::of(&self.definitions);
        for rollout in &mut plan.rollouts {
            if self.cancel.is_cancelled() {
                break;
            }
            if let Some(why) = broken.hold(rollout) {
                rollouts.push(RolloutReport { planned: rollout.clone(), error: Some(why) });
                continue;
            }
            let error = self.roll_out(cluster, rollout).await.err();
            if let Some(error) = &error {
                broken.note(rollout, error);
            }
            // The plan in the report says how things stand now.
            let planned = rollout.clone();
            if let (RolloutDecision::Rewrite { to, .. }, None) = (&planned.decision, &error) {
                rollout.decision = RolloutDecision::AlreadySet { image: to.clone() };
                rollout.changes.clear();
            }
            rollouts.push(RolloutReport { planned, error });
        }
        rollouts
    }

    /// Builds one cell and records the outcome.
    pub(super) async fn build_planned(&self, cell: &Cell) -> Result<BuildEnd, PassError> {
        let subject = cell.subject();
        let outcome = build::build(self, cell, BuildOptions { push: true, compile: false }).await;
        record_outcome(self, cell, &outcome)?;
        match outcome {
            Ok(built) => Ok(BuildEnd { report: self.published_report(cell, built), fault: None }),
            Err(error) => {
                self.reporter.finished(&subject, &format!("failed: {}", chain(&error)));
                let report = TargetReport::failed(subject, &error);
                Ok(BuildEnd { report, fault: Some(Fault::of(&error)) })
            }
        }
    }

    /// Tells what was published.
    fn published_report(&self, cell: &Cell, built: Built) -> TargetReport {
        let subject = cell.subject();
        let pinned = |digest: &crate::image::Digest| format!("{}@{digest}", cell.reference.repository);
        let Built { digest, report, reused_from, pushed_bytes } = built;
        let (image, verdict) = (pinned(&digest), report.verdict);
        let warnings = match verdict {
            Verdict::Unknown => vec![warning(&report)],
            Verdict::Loads | Verdict::Refused => Vec::new(),
        };
        for warning in &warnings {
            self.reporter.note(&subject, &format!("warning: {warning}"));
        }
        let how = reused_from.as_ref().map(|from| format!(", reused from kernel {}", from.kernel));
        let how = how.unwrap_or_default();
        self.reporter.finished(&subject, &format!("published {digest} (check: {verdict}{how})"));
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

    /// Writes down which kernels are run or announced.
    pub(super) async fn record_kernels(&self, planned: &Planned, last: &mut LastRecord) {
        let kernels = kernels_to_note(&planned.snapshot, &planned.matrix.announced);
        record_kernels(self, kernels, last).await;
    }

    /// Signs an image that is published without a signature, with the documents beside it.
    pub(super) async fn sign_planned(&self, planned: &PlannedSignature) -> TargetReport {
        let PlannedSignature { image, reference } = planned;
        let subject = format!("{image}, {reference}");
        match sign_published(self, image.as_str(), reference).await {
            Ok(()) => TargetReport::Signed { subject, image: reference.to_string() },
            Err(error) => TargetReport::failed(subject, &error),
        }
    }

    /// Puts the payloads of several kernels together in one image.
    pub(super) async fn unite(&self, union: &PlannedUnion) -> TargetReport {
        let kernels: Vec<String> = union.members.iter().map(|member| member.kernel.to_string()).collect();
        let subject = format!("{} for {} kernels", union.image, kernels.len());
        match publish_union(self, union).await {
            Ok(published) => {
                let image = format!("{}@{}", union.reference.repository, published.digest);
                TargetReport::United { subject, image, kernels }
            }
            Err(error) => TargetReport::failed(subject, &error),
        }
    }

    pub(super) async fn add_tags(
        &self,
        cell: &Cell,
        digest: &crate::image::Digest,
        references: &[crate::image::ImageReference],
    ) -> TargetReport {
        let subject = cell.subject();
        match build::add_tags(self, cell, digest, references).await {
            Ok(()) => TargetReport::Tagged {
                subject,
                references: references.iter().map(ToString::to_string).collect(),
            },
            Err(error) => TargetReport::failed(subject, &error),
        }
    }

    /// Makes a rollout's changes, in their order; stops between two of them when it is told to.
    pub(super) async fn roll_out(
        &self,
        cluster: &dyn Cluster,
        rollout: &PlannedRollout,
    ) -> Result<(), String> {
        for change in &rollout.changes {
            if self.cancel.is_cancelled() {
                return Err(chain(&TargetError::Cancelled));
            }
            prove(self, change).await.map_err(|error| chain(&error))?;
            self.may_write().map_err(|error| chain(&error))?;
            let outcome = match &rollout.target.path {
                Some(path) => match Directory::open(&self.definitions.root.join(path)) {
                    Ok(directory) => directory.apply(change).await,
                    Err(error) => Err(error),
                },
                None => cluster.apply(change).await,
            };
            outcome.map_err(|error| chain(&error))?;
        }
        Ok(())
    }

    /// The DaemonSets in the directories that `file` rollouts name.
    async fn manifests(&self) -> Manifests {
        let paths: BTreeSet<&PathBuf> = self
            .definitions
            .images
            .values()
            .flat_map(|image| &image.spec.rollout)
            .filter_map(|rollout| match rollout {
                RolloutSpec::File { path, .. } => Some(path),
                _ => None,
            })
            .collect();
        let mut manifests = Manifests::new();
        for path in paths {
            let read = match Directory::open(&self.definitions.root.join(path)) {
                Ok(directory) => directory.snapshot().await,
                Err(error) => Err(error),
            };
            manifests.insert(
                path.clone(),
                read.map(|snapshot| snapshot.daemon_sets).map_err(|error| chain(&error)),
            );
        }
        manifests
    }

    pub(super) fn image_location(&self) -> ImageLocation {
        image_location(&self.location)
    }
}

/// What is not known of a payload that is published all the same, and what would settle it.
fn warning(report: &CheckReport) -> String {
    let settle = report.remedies(Verdict::Unknown).join("; ");
    format!("it is not known whether the modules load: {} (what would settle it: {settle})", report.summary())
}

/// Does some node carry the labels that the image asks for?
fn is_called_for(image: &DriverImage, snapshot: &ClusterSnapshot) -> bool {
    snapshot.nodes.iter().any(|node| node.calls_for(image))
}

#[cfg(test)]
#[path = "pass_tests.rs"]
mod tests;
