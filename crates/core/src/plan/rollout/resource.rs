//! Sets repository, image and version in an operator's resource, for the strategies `custom-resource`, `file` and `git`.
//! The operator creates the DaemonSets from the resource, and computes the rest of each tag from the node. The submodule
//! `module` sets the fields of KMM's `Module`.
//!
//! Versions are tags and not digests. A NicClusterPolicy accepts a digest as its version, but then every node gets the
//! same image, and nodes with another kernel cannot load its modules. A tag never changes its content (guarantee 3).

mod module;
mod version;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use self::version::{CommonVersion, VersionChoice, common_version};
use super::{
    Change, Context, Decided, HoldReason, NodeGroup, PlanInputs, ResourceChange, RewriteRecord,
    RolloutDecision, RolloutTarget,
    field::{self, Field, FieldDecision},
    manifest::reach_difference,
    operator::{self, TagForm},
    reached::{NodesByKernel, Reached, check_supported},
    single::single,
    watch::Progress,
};
use crate::{
    image::{ImageReference, OperatorResource, ResourceName},
    kernel::KernelTarget,
    plan::{
        Cell, NodeFacts, Placement, ReachingObject, ResourceFacts,
        labels::{GPU_PRESENT, is_in_progress, stall_remedy},
        operator_resources::OperatorResources,
        reach::Reach,
        reasons::and_more,
    },
};

/// Key of the fields that farrier sets: in the resource, and in its record.
pub(super) const SPEC: &str = "spec";

/// Fields of a driver's section that farrier writes.
const FIELDS: [&str; 7] =
    ["repository", "image", "version", "forcePrecompiled", "usePrecompiled", module::IMAGE, module::MAPPINGS];

/// Desired state of a resource.
enum DesiredField<'a> {
    /// Fields to set now; all images are published.
    Fields { fields: Value, version: String, kernels: usize, required_images: Vec<ImageReference> },
    /// Reference that must be published before the fields can be set.
    Pending(&'a ImageReference),
}

/// Returns the node labels that decide which nodes the resources of rollouts reach.
pub(super) fn label_keys(inputs: &PlanInputs<'_>) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    for image in inputs.definitions().images.values() {
        for rollout in &image.spec.rollout {
            let Some(name) = rollout.resource() else { continue };
            let kind = name.resource;
            let operator_labels = operator::upgrade_label(kind).into_iter().chain(kind.node_label());
            keys.extend(image.spec.nodes.keys().chain(operator_labels).map(str::to_owned));
            keys.extend(operator::skip_labels(kind).map(str::to_owned));
            let resources = OperatorResources::for_rollout(inputs, rollout);
            let in_manifests = inputs.manifests.values().flatten().flat_map(|manifests| &manifests.resources);
            let all = inputs.snapshot.resources.iter().chain(in_manifests);
            for resource in all.filter(|resource| resource.is_named(name)) {
                keys.extend(resources.placement_of(resource).label_keys().map(str::to_owned));
            }
        }
    }
    keys
}

pub(super) fn decide(
    context: &Context<'_>,
    target: &RolloutTarget,
    name: &ResourceName,
) -> Result<Decided, HoldReason> {
    let (inputs, kind) = (context.inputs, name.resource);
    let resource = single(inputs, target, name)?;
    let driver = driver_section(resource)?;
    check_precompiled_allowed(resource)?;
    let resources = context.resources();
    if let Some(detail) = ignored_by_operator(resource, resources) {
        return Err(HoldReason::DriverOff { detail });
    }
    if !inputs.cells.location.pullable {
        return Err(HoldReason::NotPullable);
    }
    let placement = resources.placement_of(resource);
    check_supported(&placement)?;
    // Only a resource from the cluster has a version. A manifest must reach the same nodes as the live resource.
    let live = inputs.snapshot.resources.iter().find(|live| live.is_named(name) && live.version.is_some());
    if let Some(live) = live.filter(|_| resource.version.is_none())
        && let Some(why) = reach_difference(context, &live.placement_in(inputs.snapshot), &placement)
    {
        return Err(why);
    }
    let by_kernel = reached(context, kind, &placement).known()?;
    let desired = match kind {
        OperatorResource::Module => module::desired_fields(context, resource, driver, &by_kernel)?,
        _ => desired_fields(context, kind, &by_kernel)?,
    };
    match desired {
        DesiredField::Pending(on) => Ok(RolloutDecision::Pending { on: on.clone() }.into()),
        DesiredField::Fields { fields, version, kernels, required_images } => {
            let field_decision = decide_field(context, resource, driver, &fields)?;
            if let (FieldDecision::Set(_), Some(why)) =
                (&field_decision, upgrade_in_progress(kind, &by_kernel))
            {
                return Err(why);
            }
            let stalled = stalled_node(kind, &by_kernel).unwrap_or_default();
            let failed = operator_failure(resource).unwrap_or_default();
            let s = if kernels == 1 { "" } else { "s" };
            let how = format!("{version} for {kernels} kernel{s}{stalled}{failed}");
            to_decision(resource, driver, field_decision, how, required_images)
        }
    }
}

/// Returns the driver's fields, if the operator installs a driver from them.
fn driver_section(resource: &ResourceFacts) -> Result<&Map<String, Value>, HoldReason> {
    let off = |detail: &str| HoldReason::DriverOff { detail: detail.to_owned() };
    let section = section(resource);
    let flag = |field: &str| section.and_then(|section| section.get(field)).and_then(Value::as_bool);
    let driver_type = resource.spec["driverType"].as_str().unwrap_or("gpu");
    match resource.kind {
        OperatorResource::NicClusterPolicy | OperatorResource::NicNodePolicy => {
            section.ok_or_else(|| off("spec.ofedDriver is absent"))
        }
        OperatorResource::ClusterPolicy if flag("enabled") == Some(false) => {
            Err(off("spec.driver.enabled is false"))
        }
        OperatorResource::ClusterPolicy if flag("useNvidiaDriverCRD") == Some(true) => {
            Err(off("spec.driver.useNvidiaDriverCRD is true, so NVIDIADriver resources define the driver"))
        }
        OperatorResource::ClusterPolicy => section.ok_or_else(|| off("spec.driver is absent")),
        OperatorResource::NvidiaDriver if driver_type != "gpu" => {
            let detail = format!("spec.driverType is {driver_type}, and farrier's images are for gpu");
            Err(HoldReason::Fixed { detail })
        }
        OperatorResource::NvidiaDriver if flag("usePrecompiled") == Some(true) => {
            section.ok_or_else(|| off("spec is absent"))
        }
        OperatorResource::NvidiaDriver => {
            Err(HoldReason::Immutable { field: "spec.usePrecompiled", needed: true })
        }
        OperatorResource::Module => section.ok_or_else(|| off("spec.moduleLoader is absent")),
        OperatorResource::GpuCluster => Err(off("a GPUCluster describes no driver")),
    }
}

/// Checks that the GPU Operator accepts precompiled drivers: it installs GPUDirect Storage and GDRCopy only with drivers that it
/// compiles itself (`controllers/object_controls.go`, `controllers/nvidiadriver_controller.go`).
fn check_precompiled_allowed(resource: &ResourceFacts) -> Result<(), HoldReason> {
    let fields = [("gds", "spec.gds.enabled"), ("gdrcopy", "spec.gdrcopy.enabled")];
    let refused = fields.into_iter().find(|(component, _)| resource.spec[*component]["enabled"] == true);
    match refused {
        Some((_, field)) if resource.kind.is_of_gpu_operator() => Err(HoldReason::RefusedTogether { field }),
        _ => Ok(()),
    }
}

/// Name of the only NicClusterPolicy that the Network Operator accepts (`controllers/nicclusterpolicy_controller.go`).
const NIC_CLUSTER_POLICY: &str = "nic-cluster-policy";

/// Returns the reason why its operator ignores a resource, if any. A ClusterPolicy that manages the driver disables
/// NVIDIADriver resources (`controllers/nvidiadriver_controller.go`, since 25.10.1), and a GPUCluster disables a ClusterPolicy
/// (`controllers/clusterpolicy_controller.go`, since 26.7).
fn ignored_by_operator(resource: &ResourceFacts, resources: OperatorResources<'_>) -> Option<String> {
    let cluster = resources.of(OperatorResource::GpuCluster).next();
    let policy = resources.cluster_policy();
    match resource.kind {
        OperatorResource::NicClusterPolicy => (resource.name != NIC_CLUSTER_POLICY).then(|| {
            format!("the Network Operator ignores a NicClusterPolicy that is not named {NIC_CLUSTER_POLICY}: rename it")
        }),
        OperatorResource::ClusterPolicy => {
            if let Some(ResourceFacts { name, .. }) = cluster {
                return Some(format!(
                    "the GPU Operator ignores a ClusterPolicy while GPUCluster {name} exists: name an NVIDIADriver in the rollout, or delete the GPUCluster"
                ));
            }
            // The manifests of a directory may be for several clusters.
            let is_other = |policy: &&ResourceFacts| resource.version.is_some() && policy.name != resource.name;
            let used = &policy.filter(is_other)?.name;
            Some(format!("the GPU Operator uses the oldest ClusterPolicy alone, {used}: name it in the rollout, or delete it"))
        }
        OperatorResource::NvidiaDriver => {
            let manages = |policy: &&ResourceFacts| policy.spec["driver"]["useNvidiaDriverCRD"] != true;
            let policy = &policy.filter(manages)?.name;
            Some(match cluster {
                None => format!(
                    "ClusterPolicy {policy} manages the driver: set spec.driver.useNvidiaDriverCRD: true there"
                ),
                Some(ResourceFacts { name, .. }) => format!(
                    "ClusterPolicy {policy} manages the driver and conflicts with GPUCluster {name}: delete the ClusterPolicy"
                ),
            })
        }
        OperatorResource::NicNodePolicy | OperatorResource::GpuCluster | OperatorResource::Module => None,
    }
}

/// Returns the fields of the driver's section, if present.
pub(super) fn section(resource: &ResourceFacts) -> Option<&Map<String, Value>> {
    let section = resource.kind.driver_path().iter().try_fold(&*resource.spec, |value, key| value.get(key));
    section.and_then(Value::as_object)
}

/// Returns the nodes on which the operator may install the driver: nodes that match the image, or that the operator
/// selects itself.
fn reached<'a>(context: &Context<'a>, kind: OperatorResource, placement: &Placement) -> Reached<'a> {
    let image = context.inputs.definitions().images.get(context.image);
    let is_selected = |group: &&NodeGroup<'_>| {
        let node = group.sample;
        operator::selects(kind, &node.labels) || image.is_some_and(|image| node.is_selected_by(image))
    };
    let object = ReachingObject::new(placement, context.inputs.snapshot, []);
    let workload = operator::default_workload(kind, context.resources());
    let is_skipped = |group: &&NodeGroup<'_>| {
        group.blocks_no_rollout() || operator::skips(kind, &group.sample.labels, workload)
    };
    let groups = context.groups.iter().filter(|group| !is_skipped(group));
    let (selected, others): (Vec<_>, Vec<_>) = groups.partition(is_selected);
    let mut nodes = Reached::by(&object, selected);
    // The operator derives its own label from NFD's labels, so it may still select a node that NFD has not labeled yet.
    let Some(label) = kind.node_label() else { return nodes };
    for group in others.into_iter().filter(|group| group.sample.awaits_label(label)) {
        let Reach { reached, undetermined } = object.reach_of_equal_nodes(&group.nodes);
        nodes.undetermined.extend(reached.into_iter().chain(undetermined));
    }
    nodes
}

/// Returns the fields with which the operator finds a published, passing image for each of these kernels.
fn desired_fields<'a>(
    context: &Context<'a>,
    kind: OperatorResource,
    kernels: &NodesByKernel<'_>,
) -> Result<DesiredField<'a>, HoldReason> {
    check_systems(context, kind)?;
    let CommonVersion { version, reference, required_images } =
        match common_version(context, kind, kernels, None)? {
            VersionChoice::Ready(common) => common,
            VersionChoice::Pending(on) => return Ok(DesiredField::Pending(on)),
        };
    // An image without a host is in a layout directory.
    let (repository, image) =
        reference.repository.as_str().rsplit_once('/').ok_or(HoldReason::NotPullable)?;
    let fields = [("repository", repository), ("image", image), ("version", &*version)];
    let mut fields: Map<String, Value> =
        fields.map(|(field, value)| (field.to_owned(), value.into())).into_iter().collect();
    if let Some(flag) = operator::precompiled_field(kind) {
        fields.insert(flag.to_owned(), true.into());
    }
    let version = format!("version {version}");
    Ok(DesiredField::Fields { fields: fields.into(), version, kernels: kernels.len(), required_images })
}

/// Checks that all nodes have the operating system of a ClusterPolicy's tags. The GPU Operator takes it from any node with a GPU, even
/// from one that it skips (`getGPUNodeOSInfo` in `controllers/state_manager.go`).
fn check_systems(context: &Context<'_>, kind: OperatorResource) -> Result<(), HoldReason> {
    if kind != OperatorResource::ClusterPolicy {
        return Ok(());
    }
    let has_gpu =
        |group: &&NodeGroup<'_>| group.sample.labels.get(GPU_PRESENT).is_some_and(|value| value == "true");
    let targets = context.groups.iter().filter(has_gpu).filter_map(|group| group.target.as_ref().ok());
    let systems: BTreeSet<String> = targets.map(KernelTarget::os_tag).collect();
    if systems.len() < 2 {
        return Ok(());
    }
    Err(HoldReason::MixedSystems { systems: systems.into_iter().collect() })
}

/// Whether this name already points to the cell's image.
pub(super) fn is_published(context: &Context<'_>, cell: &Cell, name: &ImageReference) -> bool {
    let image = context.observed.image(name, cell.target.arch);
    image.is_some_and(|image| image.is_of(cell))
}

/// Returns the hold for an image whose tags do not have the form that the operator computes.
pub(super) fn tag_form(kind: OperatorResource, cell: &Cell, resources: OperatorResources<'_>) -> HoldReason {
    let form = TagForm::of(kind, &cell.target, resources);
    HoldReason::TagForm {
        image: cell.reference.clone(),
        looked_for: operator::tag_suffix(form, &cell.target)
            .unwrap_or_else(|| "a kernel label, which this kernel's release is too long for".to_owned()),
        pattern: form.pattern(),
    }
}

/// Returns the hold while the operator upgrades drivers. A rewrite makes the operator drain nodes one by one, and another
/// rewrite would restart these upgrades. A node whose upgrade is only requested causes no hold.
fn upgrade_in_progress(kind: OperatorResource, kernels: &NodesByKernel<'_>) -> Option<HoldReason> {
    let (node, state, count) = first_node_in_state(kind, kernels, is_in_progress)?;
    Some(HoldReason::UpgradeInProgress { node: node.clone(), state: state.clone(), count })
}

/// Describes a node whose upgrade the operator does not continue, with the remedy.
fn stalled_node(kind: OperatorResource, kernels: &NodesByKernel<'_>) -> Option<String> {
    let (node, state, count) = first_node_in_state(kind, kernels, |state| stall_remedy(state).is_some())?;
    let label = operator::upgrade_label(kind)?.replace("-state", ".skip");
    Some(format!("; node {node}{} in state {state}: {} {label}", and_more(count), stall_remedy(state)?))
}

/// Beginning of the Network Operator's error for a tag that was not in the registry when it last looked (`pkg/state/state_ofed.go`).
const TAG_NOT_FOUND: &str = "ForcePrecompiled is enabled and precompiled tag was not found";

/// Describes why the operator could not apply the fields that are set, with the remedy where it is known.
fn operator_failure(resource: &ResourceFacts) -> Option<String> {
    let error = resource.operator_error.as_deref()?;
    let remedy = if error.starts_with(TAG_NOT_FOUND) {
        " (it lists the registry's tags every 30 minutes; DOCA_DRIVER_IMAGE_POLL_TIME_MINUTES in its Deployment shortens that)"
    } else {
        ""
    };
    Some(format!("; the operator failed: {error}{remedy}"))
}

/// Returns the first node whose upgrade state matches, its state, and the number of such nodes.
fn first_node_in_state<'a>(
    kind: OperatorResource,
    kernels: &NodesByKernel<'a>,
    matches: impl Fn(&str) -> bool,
) -> Option<(&'a String, &'a String, usize)> {
    let label = operator::upgrade_label(kind)?;
    let state = |node: &'a NodeFacts| node.labels.get(label).filter(|state| matches(state));
    let nodes = kernels.values().flatten().filter_map(|node| Some((&node.name, state(node)?)));
    let nodes: Vec<_> = nodes.collect();
    let (node, state) = nodes.iter().min()?;
    Some((node, state, nodes.len()))
}

fn decide_field(
    context: &Context<'_>,
    resource: &ResourceFacts,
    driver: &Map<String, Value>,
    desired: &Value,
) -> Result<FieldDecision, HoldReason> {
    let record = record_of(resource)?;
    let now = context.inputs.now;
    let current = values(desired, driver);
    let instance = context.inputs.instance;
    let field = Field { record: record.0.get(SPEC), current: &current, desired, now, instance };
    // The operator watches its pods, so farrier does not. When the desired value changes, a value that stayed for an hour
    // (`is_quiet`) is recorded as good.
    Ok(field::decide(&field, |set| {
        let is_good = set.is_quiet(now) && current != *desired;
        if is_good { Progress::Good } else { Progress::Waiting }
    }))
}

/// Returns the record in a live object. Manifests have version control as their history.
fn record_of(resource: &ResourceFacts) -> Result<RewriteRecord, HoldReason> {
    if resource.version.is_some() {
        RewriteRecord::of(&resource.annotations)
    } else {
        Ok(RewriteRecord::default())
    }
}

/// Returns the current values of the fields in `like`; null for absent fields.
pub(super) fn values(like: &Value, driver: &Map<String, Value>) -> Value {
    let keys = like.as_object().into_iter().flat_map(Map::keys);
    keys.map(|key| (key.clone(), driver.get(key).cloned().unwrap_or_default())).collect::<Map<_, _>>().into()
}

fn to_decision(
    resource: &ResourceFacts,
    driver: &Map<String, Value>,
    field_decision: FieldDecision,
    how: String,
    required_images: Vec<ImageReference>,
) -> Result<Decided, HoldReason> {
    let (decision, entry, set, required_images) = match field_decision {
        FieldDecision::Keep => return Ok(RolloutDecision::Settled { how }.into()),
        FieldDecision::UpdateRecord(entry) => {
            (RolloutDecision::Settled { how }, entry, Value::Null, Vec::new())
        }
        FieldDecision::Set(entry) => {
            let path = field_path(resource.kind);
            let current = values(&entry.set, driver);
            let differs = |field: &String| entry.set.get(field.as_str()) != current.get(field.as_str());
            if let Some((_, reason)) =
                resource.why_not_editable.iter().find(|(field, _)| field.is_empty() || differs(field))
            {
                return Err(HoldReason::Fixed { detail: reason.clone() });
            }
            let (from, to) = (text_of(&current), text_of(&entry.set));
            let now = vec![format!("set {path}: {from} -> {to}")];
            let set = entry.set.clone();
            (RolloutDecision::Steps { now }, entry, set, required_images)
        }
        FieldDecision::Restore(entry, why) => {
            let set = entry.replaced.clone();
            (RolloutDecision::Hold(why), entry, set, Vec::new())
        }
        FieldDecision::Hold(None, why) => return Ok(RolloutDecision::Hold(why).into()),
        FieldDecision::Hold(Some(entry), why) => (RolloutDecision::Hold(why), entry, Value::Null, Vec::new()),
    };
    let annotations = match &resource.version {
        Some(_) => record_of(resource)?.with(SPEC, entry).annotations(&resource.annotations),
        None => BTreeMap::new(),
    };
    let change = ResourceChange { annotations, required_images, ..change(resource, &set) };
    Ok(Decided { decision, changes: vec![Change::Resource(change)] })
}

/// Returns the change that sets fields of a resource; null sets none. The change also names all other fields that farrier
/// owns, because an apply gives up fields that it omits.
pub(super) fn change(resource: &ResourceFacts, set: &Value) -> ResourceChange {
    let driver = section(resource).cloned().unwrap_or_default();
    let mut fields = driver.clone();
    // Fields that were absent before are omitted, and thus removed.
    fields.retain(|key, _| resource.owned.contains(key) && set.get(key).is_none());
    fields.extend(writable(set));
    let path: &[&str] = if fields.is_empty() { &[] } else { resource.kind.driver_path() };
    let fields = Value::from(fields);
    let expected = resource.version.is_none().then(|| values(&fields, &driver));
    let path = path.iter().rev();
    let spec = path.fold(fields, |inner, key| Value::from(Map::from_iter([((*key).to_owned(), inner)])));
    ResourceChange {
        kind: resource.kind,
        name: resource.name.clone(),
        version: resource.version.clone(),
        expected,
        spec,
        annotations: resource.annotations.clone(),
        required_images: Vec::new(),
    }
}

/// Returns only the known fields of a record, with the expected types: the record comes from the cluster and is
/// untrusted input.
fn writable(value: &Value) -> impl Iterator<Item = (String, Value)> {
    let fields = value.as_object().into_iter().flatten();
    let is_writable = |(key, value): &(&String, &Value)| {
        FIELDS.contains(&key.as_str())
            && (value.is_string() || value.is_boolean() || (*key == module::MAPPINGS && value.is_array()))
    };
    fields.filter(is_writable).map(|(key, value)| (key.clone(), value.clone()))
}

/// Returns the path of the driver's section: `spec.driver`, or `spec`.
pub(super) fn field_path(kind: OperatorResource) -> String {
    std::iter::once(SPEC).chain(kind.driver_path().iter().copied()).collect::<Vec<_>>().join(".")
}

/// Formats the fields of a resource that farrier would write.
pub(super) fn current(resource: &ResourceFacts) -> String {
    let fields = section(resource).into_iter().flatten().filter(|(key, _)| FIELDS.contains(&key.as_str()));
    text_of(&fields.map(|(key, value)| (key.clone(), value.clone())).collect::<Map<_, _>>().into())
}

/// Formats the fields as `repository/image version V` with the flags. A Module is formatted as its images.
pub(super) fn text_of(value: &Value) -> String {
    if [module::IMAGE, module::MAPPINGS].iter().any(|field| value.get(field).is_some()) {
        return module::text_of(value);
    }
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or("(none)");
    let flags = value.as_object().into_iter().flatten().filter(|(_, value)| value.as_bool() == Some(true));
    let flags: String = flags.flat_map(|(key, _)| [", ", key.as_str()]).collect();
    format!("{}/{} version {}{flags}", text("repository"), text("image"), text("version"))
}

#[cfg(test)]
mod tests;
