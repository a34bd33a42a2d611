//! Warns before farrier writes an image field for the first time. The warnings are about other writers of the DaemonSet, missing
//! pull secrets, and pods that restart.

use serde::Serialize;

use super::{
    Context, RewriteRecord, RolloutObject, RolloutTarget, daemon_set::target_container,
    handover::unavailable_limit,
};
use crate::{
    image::Strategy,
    plan::{LiveDaemonSet, PER_KERNEL_ANNOTATION, PodFacts, UpdateStrategy},
};

/// Suffixes of registry hosts for which the kubelet's credential provider has credentials, on nodes of the same cloud.
const CLOUD_REGISTRIES: [&str; 4] = [".amazonaws.com", ".azurecr.io", ".pkg.dev", "gcr.io"];

/// Warning about a rollout. A warning puts no rollout on hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[display("warning[{code}]: {message}\n-> {hint}")]
pub struct RolloutWarning {
    /// Stable identifier, such as `no-pull-secrets`.
    pub code: &'static str,
    /// Consequence of the write.
    pub message: String,
    /// Remedy.
    pub hint: String,
}

impl RolloutWarning {
    /// Code of the warning about missing pull secrets. The caller drops the warning if the registry permits anonymous pulls.
    pub const PULL_SECRETS: &'static str = "no-pull-secrets";

    fn new(code: &'static str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: hint.into() }
    }
}

/// Returns the warnings about a rollout to a live DaemonSet that farrier has not written yet.
pub(super) fn warnings(context: &Context<'_>, target: &RolloutTarget) -> Vec<RolloutWarning> {
    let Some(live) = unwritten(context, target) else { return Vec::new() };
    let in_cluster = target.location.is_none();
    let owner = if in_cluster { other_writer(live, &context.inputs.instance.to_string()) } else { None };
    owner.into_iter().chain(no_pull_secrets(context, live)).chain(restarts(context, live)).collect()
}

/// Returns the target's live DaemonSet, if farrier may set the image field and has not set it before.
fn unwritten<'a>(context: &Context<'a>, target: &RolloutTarget) -> Option<&'a LiveDaemonSet> {
    let RolloutObject::DaemonSet(name) = &target.object else { return None };
    let container = target_container(context.inputs, target).ok()?.container;
    let mut daemon_sets = context.inputs.snapshot.daemon_sets.iter();
    let live = daemon_sets.find(|daemon_set| daemon_set.is_named(name))?.live.as_ref()?;
    let repository = context.inputs.cells.location.repository(context.image).ok()?.to_string();
    let image = container.image.strip_prefix(&repository).unwrap_or_default();
    let was_written_before = image.starts_with(['@', ':'])
        || RewriteRecord::of(&live.annotations).is_ok_and(|record| record.0.contains_key(&container.name))
        || (target.strategy == Strategy::PerKernel && live.annotations.contains_key(PER_KERNEL_ANNOTATION));
    (!was_written_before && !live.deleting).then_some(live)
}

/// Returns the warning about a tool that will revert the write.
fn other_writer(live: &LiveDaemonSet, manager: &str) -> Option<RolloutWarning> {
    let annotation = |key: &str| live.manifest["metadata"]["annotations"][key].as_str();
    let label = |key: &str| live.labels.get(key).map(String::as_str);
    // Ignore a tracking ID that names another object: the annotation was copied from that object.
    let tracked = annotation("argocd.argoproj.io/tracking-id").and_then(|id| {
        let (application, object) = id.split_once(':')?;
        let [namespace, name] = ["namespace", "name"].map(|key| live.manifest["metadata"][key].as_str());
        (object == format!("apps/DaemonSet:{}/{}", namespace?, name?)).then_some(application)
    });
    if let Some(application) = tracked.or_else(|| label("argocd.argoproj.io/instance")) {
        return Some(RolloutWarning::new(
            "argo-cd",
            format!(
                "Argo CD application {application} manages the DaemonSet: the next sync reverts the write, or selfHeal does so at once"
            ),
            format!(
                "use strategy git, or add {{group: apps, kind: DaemonSet, managedFieldsManagers: [{manager}]}} to \
                 ignoreDifferences of the application, with the sync option RespectIgnoreDifferences=true"
            ),
        ));
    }
    if let Some(release) = annotation("meta.helm.sh/release-name") {
        return Some(RolloutWarning::new(
            "helm",
            format!(
                "Helm release {release} manages the DaemonSet: the next upgrade or rollback of the release reverts the write"
            ),
            "set the image in the release's values: strategy git or file, with `values`",
        ));
    }
    (label("app.kubernetes.io/managed-by") == Some("Helm")).then(|| {
        let instance = label("app.kubernetes.io/instance").unwrap_or("unknown");
        RolloutWarning::new(
            "helm",
            format!("the labels name a Helm chart as the DaemonSet's origin (instance {instance}): the next deployment of the chart reverts the write"),
            "set the image in the chart's values: strategy git or file, with `values`; where Argo CD renders the chart, see \
             ignoreDifferences",
        )
    })
}

/// Returns the warning about pods that have no credentials for the registry. Examines pods, because the pull secrets of
/// the ServiceAccount appear in pods, but not in the DaemonSet's template.
fn no_pull_secrets(context: &Context<'_>, live: &LiveDaemonSet) -> Option<RolloutWarning> {
    let prefix = &context.inputs.cells.location.prefix;
    let host = prefix.split('/').next().unwrap_or_default();
    let pods = &context.inputs.snapshot.pods;
    let mut own_pods = pods.iter().filter(|pod| pod.daemon_set == live.version.uid).peekable();
    let from_registry = |image: &String| image.strip_prefix(host).is_some_and(|path| path.starts_with('/'));
    let pulls_without_secrets =
        |pod: &PodFacts| pod.ready && pod.pull_secrets == 0 && pod.images.values().any(from_registry);
    let template = &live.manifest["spec"]["template"]["spec"]["imagePullSecrets"];
    let has_none = own_pods.peek().is_some()
        && own_pods.all(|pod| pod.pull_secrets == 0)
        && template.as_array().is_none_or(Vec::is_empty)
        && !pods.iter().any(pulls_without_secrets)
        && !CLOUD_REGISTRIES.iter().any(|suffix| host.ends_with(suffix));
    has_none.then(|| {
        RolloutWarning::new(
            RolloutWarning::PULL_SECRETS,
            format!("the DaemonSet's pods have no imagePullSecrets, and {host} refuses pulls without credentials"),
            "add imagePullSecrets to the pod template or to its ServiceAccount, unless the nodes have credentials of their own",
        )
    })
}

/// Returns the warning about the pods that the first write restarts.
fn restarts(context: &Context<'_>, live: &LiveDaemonSet) -> Option<RolloutWarning> {
    let (pods, limit) = (live.desired, unavailable_limit(live.max_unavailable, live.desired));
    let in_order = "to choose order and time, use updateStrategy OnDelete, and `upgrade` in the rollout";
    match live.update {
        _ if pods == 0 || context.spec.upgrade().is_some() => None,
        UpdateStrategy::OnDelete => Some(RolloutWarning::new(
            "restarts-no-pod",
            format!(
                "updateStrategy OnDelete keeps the {pods} pods on their current image until each pod is deleted"
            ),
            "add `upgrade` to the rollout, or delete the pods",
        )),
        UpdateStrategy::RollingUpdate if limit >= pods && pods > 1 => Some(RolloutWarning::new(
            "restarts-all-pods",
            format!(
                "the updateStrategy restarts all {pods} pods at once, and each restart reloads a node's driver"
            ),
            format!("lower rollingUpdate.maxUnavailable; {in_order}"),
        )),
        UpdateStrategy::RollingUpdate => Some(RolloutWarning::new(
            "restarts-pods",
            format!(
                "the updateStrategy restarts {pods} pods, {limit} at a time, and each restart reloads a node's driver"
            ),
            in_order,
        )),
    }
}

#[cfg(test)]
mod tests;
