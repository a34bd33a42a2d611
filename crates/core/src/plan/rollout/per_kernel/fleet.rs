//! The state of a `per-kernel` rollout: the original, its copies, its nodes and their pods.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::{
    super::{
        RequestedRollout,
        copy::{LiveCopy, image_in, images_text, name_parts},
        daemon_set::{LiveTarget, live_target},
        handover::{HANDED_OVER, is_handed_over},
        no_image,
        reached::check_supported,
        watch::is_same_image,
    },
    Context, HoldReason, Original, RolloutTarget,
};
use crate::{
    image::{ImageReference, Strategy},
    kernel::{KernelLabel, KernelTarget},
    plan::{
        DaemonSetFacts, ImageContents, KERNEL_LABEL, NodeFacts, NodeReach, NodeReason, PodFacts, UpgradeNote,
        node::NodeGroup, outcome::CellState, reach::MissingLabel,
    },
};

/// Image for one kernel.
pub(super) enum Image {
    /// Published, with a passing check report.
    Ready(ReadyImage),
    /// Still to be built.
    Building(ImageReference),
    /// There will be no image. `has_inputs` says whether the inputs of its build are known.
    Absent { why: HoldReason, has_inputs: bool },
}

/// Images of the containers for one kernel.
pub(super) struct ReadyImage {
    /// Text with the names of the images ([`images_text`]).
    pub(super) text: String,
    pub(super) references: Vec<ImageReference>,
}

impl Image {
    pub(super) fn ready(&self) -> Option<&ReadyImage> {
        if let Self::Ready(image) = self { Some(image) } else { None }
    }

    pub(super) fn absence(&self) -> Option<&HoldReason> {
        if let Self::Absent { why, .. } = self { Some(why) } else { None }
    }
}

/// Node that the original would reach if there were no copies.
pub(super) struct Member<'a> {
    pub(super) node: &'a NodeFacts,
    pub(super) target: &'a Result<KernelTarget, NodeReason>,
    pub(super) handed_over: bool,
}

/// State of the rollout.
pub(super) struct Fleet<'a> {
    pub(super) original: Original<'a>,
    /// Rollouts to the copies, each with its container.
    pub(super) rollouts: Vec<(Context<'a>, &'a str)>,
    pub(super) containers: Vec<&'a str>,
    pub(super) members: Vec<Member<'a>>,
    /// Nodes that are reached once their labels are back.
    pub(super) undetermined: Vec<&'a NodeFacts>,
    /// Contents of the original's images, where known.
    contents: Vec<&'a ImageContents>,
    pods: HashMap<&'a str, Vec<&'a PodFacts>>,
    /// Nodes with a ready pod of a copy.
    ready_copies: HashSet<&'a str>,
    /// Nodes with a ready pod of the original.
    ready_originals: HashSet<&'a str>,
    /// Nodes that a pod of the original is bound to.
    with_original_pod: HashSet<&'a str>,
}

impl<'a> Fleet<'a> {
    /// Collects the state of the rollout.
    pub(super) fn observe(context: &Context<'a>, target: &'a RolloutTarget) -> Result<Self, HoldReason> {
        let inputs = context.inputs;
        let LiveTarget { daemon_set: facts, live, .. } = live_target(context, target)?;
        let peers = context.peers.iter().filter(|peer| peer.target.strategy == Strategy::PerKernel);
        let rollout = |peer: &&'a RequestedRollout<'a>| {
            let LiveTarget { container, .. } = live_target(context, &peer.target)?;
            Ok((Context { image: peer.image, spec: peer.spec, ..*context }, container))
        };
        // Fail if one of the containers is missing: the copies would lose its image.
        let rollouts = peers.map(rollout).collect::<Result<Vec<_>, HoldReason>>()?;
        if rollouts.is_empty() {
            return Err(HoldReason::NOT_FOUND);
        }
        let containers: Vec<&str> = rollouts.iter().map(|(_, container)| *container).collect();
        let original = Original::observe(inputs.snapshot, facts, live);
        if let Some((name, copy)) = original.other_owner(inputs.instance) {
            return Err(HoldReason::OtherInstanceCopies { name: name.clone(), copy: copy.clone() });
        }
        check_supported(&original.base)?;
        let (mut members, mut undetermined) = (Vec::new(), Vec::new());
        let object = original.reaching_object(inputs.snapshot);
        for group in context.groups.iter().filter(|group| !group.blocks_no_rollout()) {
            let reach = object.reach_of_equal_nodes(&group.nodes);
            undetermined.extend(reach.undetermined);
            members.extend(reach.reached.into_iter().map(|node| Member {
                node,
                target: &group.target,
                handed_over: is_handed_over(node, &original.label),
            }));
        }
        let mut pods: HashMap<&str, Vec<&PodFacts>> = HashMap::new();
        for pod in &inputs.snapshot.pods {
            pods.entry(pod.daemon_set.as_str()).or_default().push(pod);
        }
        let ready_of = |uid: &str| -> HashSet<&'a str> {
            ready_nodes(pods.get(uid).into_iter().flatten().copied()).collect()
        };
        let ready_copies =
            original.copies.values().flat_map(|copy| ready_of(&copy.live.version.uid)).collect();
        let ready_originals = ready_of(&live.version.uid);
        let original_pods = pods.get(live.version.uid.as_str()).into_iter().flatten();
        let with_original_pod =
            original_pods.filter(|pod| pod.bound && !pod.deleting).map(|pod| pod.node.as_str()).collect();
        let images = containers.iter().filter_map(|container| facts.image_of(container));
        let contents = images.filter_map(|image| context.observed.contents.get(image)).collect();
        Ok(Self {
            original,
            rollouts,
            containers,
            members,
            undetermined,
            contents,
            pods,
            ready_copies,
            ready_originals,
            with_original_pod,
        })
    }

    /// Returns the image of every kernel that a node runs or that was announced.
    pub(super) fn images(&self) -> BTreeMap<KernelTarget, Image> {
        let mut kernels: BTreeSet<&KernelTarget> =
            self.members.iter().filter_map(|member| member.target.as_ref().ok()).collect();
        let running = kernels.clone();
        kernels.extend(self.announced());
        let pairs: Vec<_> = kernels.iter().map(|kernel| (*kernel, name_parts(kernel))).collect();
        pairs
            .iter()
            .map(|(kernel, parts)| {
                let clash = pairs.iter().find(|(other, other_parts)| other != kernel && other_parts == parts);
                let image = match clash {
                    Some((other, _)) => {
                        let why =
                            format!("label {KERNEL_LABEL} does not distinguish it from {}", other.release);
                        Image::Absent { why: no_image(kernel, why), has_inputs: false }
                    }
                    None => self.image_for(kernel),
                };
                ((*kernel).clone(), image)
            })
            // Skip an announced kernel without an image; the plan's cells report it.
            .filter(|(kernel, image)| running.contains(kernel) || !matches!(image, Image::Absent { .. }))
            .collect()
    }

    /// Whether the original's image is known to have no modules for this kernel.
    pub(super) fn original_lacks(&self, kernel: &KernelTarget) -> bool {
        self.contents.iter().any(|contents| !contents.has(kernel.arch, kernel.release.as_str()))
    }

    /// Whether nodes of this kernel can be handed over now. Until the copy's next image is published, the copy's current image
    /// must have worked.
    pub(super) fn accepts(&self, kernel: &KernelTarget, images: &BTreeMap<KernelTarget, Image>) -> bool {
        let Original { live, copies, .. } = &self.original;
        let copy = copies.get(kernel).filter(|copy| !copy.live.deleting && copy.belongs_to(live));
        let Some(record) = copy.and_then(|copy| copy.record.as_ref()) else { return false };
        match images.get(kernel) {
            Some(Image::Ready(_)) => !record.is_failed(),
            Some(Image::Building(_) | Image::Absent { has_inputs: true, .. }) => record.good,
            Some(Image::Absent { has_inputs: false, .. }) | None => false,
        }
    }

    /// Whether the copy would select the node once the node is handed over.
    pub(super) fn would_schedule(&self, copy: &LiveCopy<'_>, node: &NodeFacts) -> bool {
        let mut node = node.clone();
        node.labels.insert(self.original.label.clone(), HANDED_OVER.to_owned());
        copy.facts.placement.reach(&node, false) == NodeReach::Reached
    }

    /// Whether a node needs or may need the kernel's copy. A node whose kernel is unknown may need the copy if the nodeInfo
    /// or the kernel label names this kernel.
    pub(super) fn is_used(&self, groups: &[NodeGroup<'_>], kernel: &KernelTarget) -> bool {
        let label = KernelLabel::of(&kernel.release);
        let may_run = |node: &NodeFacts| {
            node.kernel_version == kernel.release.as_str()
                || node.labels.get(KERNEL_LABEL).map(String::as_str)
                    == label.as_ref().map(KernelLabel::as_str)
        };
        self.members.iter().any(|member| member.target.as_ref() == Ok(kernel))
            || self.undetermined.iter().any(|node| may_run(node))
            || groups.iter().any(|group| group.target.is_err() && may_run(group.sample))
            || self.announced().contains(kernel)
    }

    /// Returns the announced kernels that no node runs and whose cells have known inputs, for all images of the rollout.
    fn announced(&self) -> BTreeSet<&'a KernelTarget> {
        let cells = self.rollouts.iter().flat_map(|(context, _)| context.announced());
        cells.filter(|cell| cell.outcome.cell().is_some()).map(|cell| &cell.target).collect()
    }

    /// Returns the images for a kernel, once there is one for each container.
    fn image_for(&self, kernel: &KernelTarget) -> Image {
        let (mut images, mut references, mut building) = (BTreeMap::new(), Vec::new(), None);
        for (context, container) in &self.rollouts {
            match context.cells.state(context.image, kernel) {
                CellState::Absent(absence) => {
                    let is_other = |(other, _): &(Context<'_>, &str)| other.image != context.image;
                    let prefix = self.rollouts.iter().any(is_other).then(|| format!("{}: ", context.image));
                    let why = no_image(kernel, prefix.unwrap_or_default() + &absence.why);
                    return Image::Absent { why, has_inputs: absence.cell.is_some() };
                }
                CellState::ToBuild(cell) => building = building.or(Some(&cell.reference)),
                CellState::Published(cell, published) => match context.admissible_image(cell, published) {
                    Ok(image) => {
                        images.insert(*container, image.to_string());
                        references.push(image);
                    }
                    Err(why) => return Image::Absent { why, has_inputs: false },
                },
            }
        }
        match building {
            Some(on) => Image::Building(on.clone()),
            None => Image::Ready(ReadyImage { text: images_text(&images), references }),
        }
    }

    /// Whether a pod's containers run these images.
    pub(super) fn runs(&self, pod: &PodFacts, images: &str) -> bool {
        self.containers.iter().all(|container| {
            let current = pod.images.get(*container).zip(image_in(images, container));
            current.is_some_and(|(current, image)| is_same_image(current, image))
        })
    }

    pub(super) fn pods_of(&self, uid: &str) -> impl Iterator<Item = &'a PodFacts> {
        self.pods.get(uid).into_iter().flatten().copied()
    }

    /// Whether the copy's pod on this node is ready.
    pub(super) fn is_ready(&self, copy: &LiveCopy<'_>, node: &str) -> bool {
        ready_nodes(self.pods_of(&copy.live.version.uid)).any(|ready| ready == node)
    }

    /// Whether the node's upgrade note records a failure of the copy's image.
    pub(super) fn has_failed(&self, copy: &LiveCopy<'_>, node: &NodeFacts) -> bool {
        let DaemonSetFacts { namespace, name, .. } = self.original.facts;
        let is_failure = |note: UpgradeNote| {
            let image = copy.image(&self.containers).unwrap_or_default();
            note.rollout == format!("{namespace}/{name}") && note.is_failure_of(&image)
        };
        UpgradeNote::of(node).is_some_and(is_failure)
    }

    /// Whether a pod of any copy is ready on this node.
    pub(super) fn has_ready_copy(&self, node: &str) -> bool {
        self.ready_copies.contains(node)
    }

    /// Whether the original's pod on this node is ready.
    pub(super) fn original_is_ready_on(&self, node: &str) -> bool {
        self.ready_originals.contains(node)
    }

    /// Whether the node would get a pod of its copy. The copies have the original's tolerations and requests, so a node
    /// without a pod of the original would not get one. A node that has just joined gets its pod of the original
    /// shortly.
    pub(super) fn can_get_pods(&self, node: &NodeFacts) -> bool {
        !node.not_ready
            && self.with_original_pod.contains(node.name.as_str())
            && self.original.base.reach(node, false) == NodeReach::Reached
    }

    /// Returns the number of handed-over nodes of a kernel without a ready pod of the copy.
    pub(super) fn unready_count(&self, copy: &LiveCopy<'_>, kernel: &KernelTarget) -> usize {
        let ready: HashSet<&str> = ready_nodes(self.pods_of(&copy.live.version.uid)).collect();
        let waits = |member: &&Member<'_>| {
            member.handed_over
                && member.target.as_ref() == Ok(kernel)
                && !ready.contains(member.node.name.as_str())
        };
        self.members.iter().filter(waits).count()
    }

    /// Returns the nodes whose kernel is unknown and that have no ready pod, with the reason. A node that loses its labels
    /// loses its copy's pod.
    pub(super) fn unknown_without_pod(&self) -> Vec<(&'a NodeFacts, NodeReason)> {
        let members =
            self.members.iter().filter_map(|member| Some((member.node, member.target.clone().err()?)));
        let undetermined = self.undetermined.iter().map(|node| {
            let labels = vec![node.missing_label().map_or(KERNEL_LABEL, MissingLabel::as_str)];
            (*node, NodeReason::MissingLabel { labels })
        });
        let mut nodes: Vec<_> = members.chain(undetermined).collect();
        nodes.retain(|(node, _)| !self.has_ready_copy(&node.name) && !self.original_is_ready_on(&node.name));
        nodes
    }

    /// Returns the nodes with a known kernel that can still be handed over, or whose pod of the copy is not ready.
    /// Excludes nodes that get no pod in any case.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = &'a NodeFacts> {
        let has_missing_pods = self.original.live.desired > self.with_original_pod.len();
        let is_unfinished = move |member: &&Member<'_>| {
            let node = member.node;
            if member.handed_over {
                return !self.has_ready_copy(&node.name);
            }
            self.can_get_pods(node) || (has_missing_pods && !node.not_ready)
        };
        self.members
            .iter()
            .filter(|member| member.target.is_ok())
            .filter(is_unfinished)
            .map(|member| member.node)
    }
}

fn ready_nodes<'a>(pods: impl Iterator<Item = &'a PodFacts>) -> impl Iterator<Item = &'a str> {
    pods.filter(|pod| pod.ready && !pod.deleting).map(|pod| pod.node.as_str())
}
