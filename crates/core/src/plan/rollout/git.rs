//! The strategy `git`: sets an image in a Git repository by a commit, then waits until the cluster has the image.

use super::{
    Change, Context, Decided, HoldReason, ManifestLocation, PlannedRollout, RolloutDecision, RolloutTarget,
    daemon_set::manifests, handover::short_hash, manifest, resource, single::single, watch::is_same_image,
};
use crate::{
    image::{ImageReference, RolloutSpec, Version},
    plan::{ObservedKind, ResourceFacts},
};

/// Commit to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GitCommit {
    /// Branch that the commit is pushed to, never by force.
    pub branch: String,
    /// Commit message.
    pub message: String,
}

pub(super) fn decide(context: &Context<'_>, target: &RolloutTarget) -> Result<Decided, HoldReason> {
    let decided = manifest::decide(context, target)?;
    let hold = match &decided.decision {
        decision if decision.is_change() => proposed(context, target, &decided),
        // A directory of manifests has no live objects to compare with.
        _ if context.inputs.snapshot.read_only_nodes => None,
        RolloutDecision::AlreadySet { image } => not_synced(context, image),
        RolloutDecision::Settled { .. } => resource_not_synced(context, target),
        _ => None,
    };
    hold.map_or(Ok(decided), Err)
}

/// Returns the hold for a change that was already proposed. A change is proposed only once: a closed pull request whose
/// branch remains counts as rejected.
fn proposed(context: &Context<'_>, target: &RolloutTarget, decided: &Decided) -> Option<HoldReason> {
    let location = target.location.as_ref()?;
    let proposals = &manifests(context.inputs, location).ok()?.proposals;
    let [change] = decided.changes.as_slice() else { return None };
    let GitCommit { branch, message: _ } = commit(context.spec, context.image.as_str(), change)?;
    proposals.contains(&branch).then_some(HoldReason::Proposed { branch })
}

/// Returns the hold where the cluster does not have the repository's image yet.
fn not_synced(context: &Context<'_>, image: &ImageReference) -> Option<HoldReason> {
    let (snapshot, target) = (context.inputs.snapshot, context.spec.daemon_set()?);
    if let Some(why) = unseen(context, ObservedKind::DaemonSets) {
        return Some(why);
    }
    let found = match snapshot.daemon_sets.iter().find(|daemon_set| daemon_set.is_named(target)) {
        None => "it has no such DaemonSet".to_owned(),
        Some(daemon_set) => match daemon_set.image_of(&target.container) {
            None => "its DaemonSet has no such container".to_owned(),
            Some(current) if is_same_image(current, &image.to_string()) => return None,
            Some(current) => format!("it has {current}"),
        },
    };
    Some(HoldReason::NotSynced { found })
}

/// Returns the hold where the cluster's resource does not have the repository's fields yet.
fn resource_not_synced(context: &Context<'_>, target: &RolloutTarget) -> Option<HoldReason> {
    let name = context.spec.resource()?;
    if let Some(why) = unseen(context, ObservedKind::Resources) {
        return Some(why);
    }
    let in_repository = resource::current(single::<ResourceFacts>(context.inputs, target, name).ok()?);
    let found = match context.inputs.snapshot.resources.iter().find(|resource| resource.is_named(name)) {
        None => "it has no such resource".to_owned(),
        Some(live) if resource::current(live) == in_repository => return None,
        Some(live) => format!("it has {}", resource::current(live)),
    };
    Some(HoldReason::NotSynced { found })
}

fn unseen(context: &Context<'_>, kind: ObservedKind) -> Option<HoldReason> {
    let detail = context.inputs.snapshot.unseen.get(&kind)?;
    Some(HoldReason::Unseen { what: kind, detail: detail.clone() })
}

/// Returns the commit that makes a planned change; `None` for other strategies.
pub fn git_commit(spec: &RolloutSpec, rollout: &PlannedRollout, change: &Change) -> Option<GitCommit> {
    let Some(ManifestLocation::Git(_)) = &rollout.target.location else { return None };
    commit(spec, rollout.image.as_str(), change)
}

fn commit(spec: &RolloutSpec, image: &str, change: &Change) -> Option<GitCommit> {
    let RolloutSpec::Git { location, message, proposals, .. } = spec else { return None };
    let (from, to) = match change {
        Change::DaemonSet(change) => {
            change.image_changes().into_iter().map(|change| (change.expected, change.to)).next()?
        }
        Change::Resource(change) => {
            let path = change.kind.driver_path().iter();
            let fields = path.fold(&change.spec, |value, key| &value[*key]);
            (resource::text_of(change.expected.as_ref()?), resource::text_of(fields))
        }
        _ => return None,
    };
    let object = change.object();
    let daemon_set =
        spec.daemon_set().map(|target| (format!("{}/{}", target.namespace, target.daemon_set), target));
    let message = match message {
        None => {
            let container =
                daemon_set.as_ref().map(|(_, target)| format!(" for container {}", target.container));
            format!("{object}: {image}{}", container.unwrap_or_default())
        }
        Some(message) => fill_placeholders(message, &|name| match name {
            "image" => Some(image),
            "daemonSet" => daemon_set.as_ref().map(|(name, _)| name.as_str()),
            "resource" => spec.resource().map(|_| object.as_str()),
            "container" => daemon_set.as_ref().map(|(_, target)| &*target.container),
            "from" => Some(&from),
            "to" => Some(&to),
            _ => None,
        }),
    };
    let branch = match proposals {
        None => location.branch.to_string(),
        Some(prefix) => match &daemon_set {
            Some((name, target)) => {
                format!("{prefix}{}-{}-{}", name.replace('/', "-"), target.container, short_digest(&to))
            }
            None => format!("{prefix}{}-{}", object.replace([' ', '/'], "-"), short_hash(&[&to])),
        },
    };
    Some(GitCommit { branch, message: format!("{message}\n\nfrom {from}\nto {to}\n") })
}

/// Replaces each `{name}` that has a value.
fn fill_placeholders<'a>(text: &str, value: &dyn Fn(&str) -> Option<&'a str>) -> String {
    let mut parts = text.split('{');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once('}').and_then(|(name, suffix)| Some((value(name)?, suffix))) {
            Some((value, suffix)) => filled.extend([value, suffix]),
            None => filled.extend(["{", part]),
        }
    }
    filled
}

/// Returns the first 12 digits of an image's digest.
fn short_digest(image: &str) -> String {
    match image.parse().map(|image: ImageReference| image.version) {
        Ok(Version::Digest(digest)) => digest.short().to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
