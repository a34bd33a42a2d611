//! Pure: the second phase: what to do, given what the registry and the cluster hold.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    BuildReason, Cell, ClusterSnapshot, LeftAlone, Manifests, Matrix, OwnDriver, PlannedNode, PlannedRollout,
    PlannedSignature, PlannedUnion, RolloutDecision, SignatureState, Skipped, Unheard, Waiting, readiness,
    rollout::{Rollouts, rollouts},
    signatures,
    skip_reason::{explained, shared},
    together::{Together, without_vain_hope},
};
use crate::{
    image::{
        Chains, CheckSpec, Definitions, Digest, ImageName, ImageReference, InputHash, OnConflict, Reuse,
        UnknownPolicy, Version,
    },
    kernel::KernelTarget,
    kmod::Verdict,
};

/// An image that a registry holds under a tag, as its manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// The manifest's digest.
    pub digest: Digest,
    /// Its input hash; `None` for images that are not farrier's.
    pub input_hash: Option<InputHash>,
    /// Digest over what it exposes to drivers that are compiled against it.
    pub exposed: Option<Digest>,
    /// Its check report's verdict.
    pub verdict: Option<Verdict>,
    /// The kernel release that it says it is for.
    pub kernel_release: Option<String>,
}

/// A try that failed, kept so that it is not repeated for nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// When.
    pub at: jiff::Timestamp,
    /// How, in one line.
    pub message: String,
    /// Will the same inputs fail again?
    pub permanent: bool,
    /// What the definition asked of the check, where that made the failure: asked for less, they may not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under: Option<CheckSpec>,
}

/// What the registry and earlier passes say about a matrix.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// What each reference of the matrix names; absent where the registry has no such tag.
    pub published: BTreeMap<ImageReference, Published>,
    /// References that could not be looked up, with the fault.
    pub unreachable: BTreeMap<ImageReference, String>,
    /// The last failure of these inputs.
    pub failures: BTreeMap<InputHash, Failure>,
    /// What images hold that DaemonSets and pods name now; absent where they are not farrier's, or not known.
    pub contents: BTreeMap<String, ImageContents>,
    /// What is known of the signatures of published images, where the site asks for it.
    pub signatures: BTreeMap<Digest, SignatureState>,
}

/// What an image that is in use holds, as its manifest says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageContents {
    /// Exact releases of the kernels that it has modules for.
    pub kernels: BTreeSet<String>,
    /// The image whose payload it has for each of them: itself, where it is for one kernel only.
    pub members: BTreeMap<String, Digest>,
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// The definitions that the matrix was made from.
    pub definitions: &'a Definitions,
    /// The first phase's result.
    pub matrix: &'a Matrix,
    /// The registry and earlier failures.
    pub observed: &'a Observed,
    /// The snapshot that the matrix was made from.
    pub snapshot: &'a ClusterSnapshot,
    /// DaemonSets of the directories that `file` rollouts name, by the path in the definition.
    pub manifests: &'a Manifests,
    /// Can nodes pull the images ([`super::ImageLocation::pullable`])?
    pub pullable: bool,
    /// The time of the plan.
    pub now: jiff::Timestamp,
}

/// What is done, what is not, and why. Its JSON form is stable: field and reason names do not change
/// their meaning within one `apiVersion` of the definitions; new ones may come.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Images to build, check and publish; none is compiled against another of them.
    pub builds: Vec<PlannedBuild>,
    /// Images to build when those that they are compiled against are published; needs before dependents.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<Waiting>,
    /// Images that are there and lack some of their further names.
    pub tags: Vec<PlannedTags>,
    /// Images that are there and lack our signature.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<PlannedSignature>,
    /// Images that are there.
    pub up_to_date: Vec<UpToDate>,
    /// Tags that hold something else.
    pub conflicts: Vec<Conflict>,
    /// Images that failed before with the same inputs.
    pub held_back: Vec<HeldBack>,
    /// Images about which the registry gave no answer.
    pub unknown: Vec<UnknownState>,
    /// Images that cannot be built for a target.
    pub skipped: Vec<Skipped>,
    /// Nodes whose kernel target is not known.
    pub left_alone: Vec<LeftAlone>,
    /// Nodes that an image leaves alone because they have their own driver.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own_drivers: Vec<OwnDriver>,
    /// Images with the payloads of several kernels to put together and publish.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unions: Vec<PlannedUnion>,
    /// Nodes whose announcement of a kernel is not used.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<Unheard>,
    /// Image fields, and what becomes of them.
    pub rollouts: Vec<PlannedRollout>,
    /// Nodes that are to boot another kernel, and whether they may.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<PlannedNode>,
    /// All driver images of the definitions, chain by chain, needs before their dependents.
    #[serde(skip)]
    pub order: Vec<ImageName>,
    /// Images that are there, by digest, where the site asks for their signatures.
    #[serde(skip)]
    pub signable: BTreeSet<ImageReference>,
}

/// An image to build.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedBuild {
    /// Which.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// Why.
    #[serde(serialize_with = "explained")]
    pub why: BuildReason,
    /// Is an image of the same recipe for another kernel published for this one instead, if the check allows?
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub may_reuse: bool,
}

/// An image that is published and lacks names.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedTags {
    /// Which.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// What the names are to point to.
    pub digest: Digest,
    /// The names to write.
    pub references: Vec<ImageReference>,
}

/// An image that is published with these very inputs.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UpToDate {
    /// Which.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// Its digest.
    pub digest: Digest,
    /// Its check report's verdict.
    pub verdict: Option<Verdict>,
    /// Does the definition not accept this verdict any more? Then the image is not rolled out.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub denied: bool,
}

/// A tag that holds something else than these inputs give (guarantee 3).
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Conflict {
    /// Which image.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// The tag.
    pub reference: ImageReference,
    /// Input hash of what is there, if it has one.
    pub theirs: Option<InputHash>,
    /// What to do.
    pub remedy: &'static str,
}

/// An image that failed before with the same inputs.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldBack {
    /// Which.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// When it failed.
    pub at: jiff::Timestamp,
    /// How.
    pub message: String,
}

/// An image about which the registry gave no answer.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnknownState {
    /// Which.
    #[serde(serialize_with = "shared")]
    pub cell: Arc<Cell>,
    /// The reference that was looked up.
    pub reference: ImageReference,
    /// What happened instead.
    pub message: String,
}

/// How a changed driver gets past a tag that must not change.
const REMEDY: &str = "change the version or the tag pattern (with {{signer}} in it, another signing certificate gives another tag), \
     delete the tag, or set onConflict: overwrite";

/// Where a cell stands; what rollouts ask for.
#[derive(Clone)]
pub(super) enum CellState<'a> {
    /// Published under this digest.
    Published(&'a Published),
    /// Will be built.
    Building,
    /// Will not be there, for this reason.
    Absent(String),
}

/// The state of every cell.
pub(super) type CellStates<'a> = HashMap<(&'a ImageName, &'a KernelTarget), (&'a Cell, CellState<'a>)>;

impl Plan {
    /// Is there nothing to do?
    pub fn is_idle(&self) -> bool {
        let rewrites = |rollout: &PlannedRollout| {
            !rollout.changes.is_empty()
                || matches!(
                    rollout.decision,
                    RolloutDecision::Rewrite { .. } | RolloutDecision::Pending { .. }
                )
        };
        // What waits for others waits for builds, or for a registry that does not answer.
        self.builds.is_empty()
            && self.unions.is_empty()
            && self.tags.is_empty()
            && self.signatures.is_empty()
            && !self.rollouts.iter().any(rewrites)
            && self.nodes.iter().all(|node| node.change.is_none())
    }

    /// Is there a target that wants an image or a rewrite and will not get it? Rollouts that hold for
    /// reasons of the cluster's shape (mixed kernels, no nodes) are findings and not failures, and so are
    /// kernels that no definition is meant for.
    pub fn has_failures(&self) -> bool {
        let Self {
            builds: _,
            tags: _,
            up_to_date,
            conflicts,
            held_back,
            unknown,
            skipped,
            left_alone: _,
            own_drivers: _,
            unions: _,
            unheard: _,
            rollouts,
            nodes: _,
            waiting: _,
            order: _,
            signatures: _,
            signable: _,
        } = self;
        let broken = |rollout: &PlannedRollout| matches!(&rollout.decision, RolloutDecision::Hold(why) if why.is_failure());
        !conflicts.is_empty()
            || up_to_date.iter().any(|found| found.denied)
            || !held_back.is_empty()
            || !unknown.is_empty()
            || !skipped.iter().all(|skipped| skipped.why.is_finding())
            || rollouts.iter().any(broken)
    }
}

/// Decides.
pub fn plan(inputs: &PlanInputs<'_>) -> Plan {
    let PlanInputs { matrix, .. } = inputs;
    let chains = Chains::of(&inputs.definitions.images);
    let mut plan = Plan {
        left_alone: matrix.left_alone.clone(),
        own_drivers: matrix.own_drivers.clone(),
        unheard: matrix.announced.unheard.clone(),
        ..Plan::default()
    };
    let mut states = CellStates::with_capacity(matrix.cells.len());
    for cell in &matrix.cells {
        let state = decide(inputs, cell, &mut plan);
        states.insert((&cell.image, &cell.target), (cell, state));
    }
    let refined = without_vain_hope(matrix, &plan);
    let inputs = &PlanInputs { matrix: refined.as_ref().unwrap_or(matrix), ..*inputs };
    plan.skipped.clone_from(&inputs.matrix.skipped);
    plan.waiting.clone_from(&inputs.matrix.waiting);
    let together = Together::of(inputs, &states, &plan);
    let differing = together.seen(&states);
    let seen = differing.as_ref().unwrap_or(&states);
    let Rollouts { planned, missing_unions, unions } =
        rollouts(inputs, &states, differing.as_ref(), (&chains, &together));
    (plan.rollouts, plan.unions) = (planned, missing_unions);
    if signatures::asks_for_signatures(&inputs.definitions.site) {
        let cells = plan.up_to_date.iter().map(UpToDate::to_sign);
        let published: Vec<PlannedSignature> = cells.chain(unions).collect();
        plan.signable = published.iter().map(|image| image.reference.clone()).collect();
        plan.signatures = signatures::unsigned(inputs, published);
    }
    plan.nodes = readiness::nodes(inputs, seen, &plan, &together);
    plan.order = chains.order().to_vec();
    plan
}

fn decide<'a>(inputs: &PlanInputs<'a>, cell: &Arc<Cell>, plan: &mut Plan) -> CellState<'a> {
    let Observed { published, unreachable, failures, contents: _, signatures: _ } = inputs.observed;
    let spec = inputs.definitions.images.get(&cell.image).map(|image| &image.spec);
    let on_conflict = spec.map_or(OnConflict::Refuse, |spec| spec.on_conflict);
    let check = spec.map(|spec| spec.check).unwrap_or_default();

    let lookup = |reference| unreachable.get(reference).map(|message| (reference, message));
    if let Some((reference, message)) = cell.references().find_map(lookup) {
        plan.unknown.push(UnknownState {
            cell: Arc::clone(cell),
            reference: reference.clone(),
            message: message.clone(),
        });
        return CellState::Absent(message.clone());
    }

    let is_ours = |found: &&Published| found.input_hash == Some(cell.input_hash);
    let other = cell
        .references()
        .find_map(|reference| Some((reference, published.get(reference).filter(|p| !is_ours(p))?)));
    let ours = cell.references().filter_map(|reference| published.get(reference)).find(is_ours);
    if let (Some((reference, found)), OnConflict::Refuse) = (other, on_conflict) {
        plan.conflicts.push(Conflict {
            cell: Arc::clone(cell),
            reference: reference.clone(),
            theirs: found.input_hash,
            remedy: REMEDY,
        });
        return CellState::Absent(format!("{reference} holds an image of other inputs"));
    }

    if let Some(found) = ours {
        let lacking: Vec<ImageReference> =
            cell.references().filter(|r| !published.get(*r).is_some_and(|p| is_ours(&p))).cloned().collect();
        if !lacking.is_empty() {
            plan.tags.push(PlannedTags {
                cell: Arc::clone(cell),
                digest: found.digest.clone(),
                references: lacking,
            });
        }
        plan.up_to_date.push(UpToDate {
            cell: Arc::clone(cell),
            digest: found.digest.clone(),
            verdict: found.verdict,
            denied: found.verdict == Some(Verdict::Unknown) && check.unknown == UnknownPolicy::Deny,
        });
        return CellState::Published(found);
    }

    let failure = failures.get(&cell.input_hash).filter(|failure| failure.still_holds(check));
    let why = match (failure, other) {
        (Some(&Failure { at, ref message, permanent: true, under: _ }), _) => {
            plan.held_back.push(HeldBack { cell: Arc::clone(cell), at, message: message.clone() });
            return CellState::Absent(format!("failed before with the same inputs: {message}"));
        }
        (Some(&Failure { at, ref message, permanent: false, under: _ }), _) => {
            BuildReason::RetryAfterFailure { at, detail: message.clone() }
        }
        (None, Some((_, found))) => BuildReason::Overwrite { theirs: found.input_hash },
        (None, None) => BuildReason::NotPublished,
    };
    let may_reuse = spec.is_some_and(|spec| spec.reuse == Reuse::Compatible);
    plan.builds.push(PlannedBuild { cell: Arc::clone(cell), why, may_reuse });
    CellState::Building
}

impl UpToDate {
    fn to_sign(&self) -> PlannedSignature {
        let repository = self.cell.reference.repository.clone();
        let reference = ImageReference { repository, version: Version::Digest(self.digest.clone()) };
        PlannedSignature { image: self.cell.image.clone(), reference }
    }
}

impl Failure {
    /// Would the same inputs fail again under what the definition now asks of the check?
    pub fn still_holds(&self, check: CheckSpec) -> bool {
        self.under.is_none_or(|under| under == check)
    }
}

impl Published {
    /// The reference that names exactly this image.
    pub(super) fn pinned(&self, reference: &ImageReference) -> ImageReference {
        ImageReference {
            repository: reference.repository.clone(),
            version: Version::Digest(self.digest.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
