//! The strategy `git`: sets an image in a Git repository by a commit, then waits until the cluster has the image.

use super::{
    Change, Context, DaemonSetChange, Decided, HoldReason, ManifestLocation, PlannedRollout, RolloutDecision,
    RolloutTarget, daemon_set::manifests, manifest,
};
use crate::{
    image::{ImageReference, RolloutSpec, Version},
    plan::ObservedKind,
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
    match &decided.decision {
        RolloutDecision::Rewrite { .. } => proposed(context, target, &decided),
        RolloutDecision::AlreadySet { image } => not_synced(context, image),
        _ => None,
    }
    .map_or(Ok(decided), Err)
}

/// Holds a change that was already proposed. A change is proposed only once: a closed pull request whose branch remains
/// counts as rejected.
fn proposed(context: &Context<'_>, target: &RolloutTarget, decided: &Decided) -> Option<HoldReason> {
    let place = target.place.as_ref()?;
    let proposals = &manifests(context.inputs, place).ok()?.proposals;
    let [Change::DaemonSet(change)] = decided.changes.as_slice() else { return None };
    let GitCommit { branch, message: _ } = commit(context.spec, context.image.as_str(), change)?;
    proposals.contains(&branch).then_some(HoldReason::Proposed { branch })
}

/// Returns the hold where the cluster does not have the repository's image yet. A directory of manifests has no live
/// DaemonSets to compare with.
fn not_synced(context: &Context<'_>, image: &ImageReference) -> Option<HoldReason> {
    let (snapshot, wanted) = (context.inputs.snapshot, context.spec.daemon_set()?);
    if snapshot.read_only_nodes {
        return None;
    }
    if let Some(detail) = snapshot.unseen.get(&ObservedKind::DaemonSets) {
        return Some(HoldReason::Unseen { what: ObservedKind::DaemonSets, detail: detail.clone() });
    }
    let found = match snapshot.daemon_sets.iter().find(|found| found.is_named(wanted)) {
        None => "it has no such DaemonSet".to_owned(),
        Some(found) => match found.image_of(&wanted.container) {
            None => "its DaemonSet has no such container".to_owned(),
            Some(found) if found == image.to_string() => return None,
            Some(found) => format!("it has {found}"),
        },
    };
    Some(HoldReason::NotSynced { found })
}

/// Returns the commit that makes a planned change; `None` for other strategies.
pub fn git_commit(spec: &RolloutSpec, rollout: &PlannedRollout, change: &Change) -> Option<GitCommit> {
    let (Change::DaemonSet(change), Some(ManifestLocation::Git(_))) = (change, &rollout.target.place) else {
        return None;
    };
    commit(spec, rollout.image.as_str(), change)
}

fn commit(spec: &RolloutSpec, image: &str, change: &DaemonSetChange) -> Option<GitCommit> {
    let RolloutSpec::Git { place, target, message, proposals } = spec else { return None };
    let (from, to) = change.image_changes().into_iter().map(|change| (change.expected, change.to)).next()?;
    let daemon_set = format!("{}/{}", target.namespace, target.daemon_set);
    let message = match message {
        None => format!("DaemonSet {daemon_set}: {image} for container {}", target.container),
        Some(message) => filled(message, &|name| match name {
            "image" => Some(image),
            "daemonSet" => Some(&daemon_set),
            "container" => Some(&target.container),
            "from" => Some(&from),
            "to" => Some(&to),
            _ => None,
        }),
    };
    let branch = match proposals {
        None => place.branch.to_string(),
        Some(prefix) => {
            let (target, digest) = (daemon_set.replace('/', "-"), digest_of(&to));
            format!("{prefix}{target}-{}-{digest}", spec.daemon_set()?.container)
        }
    };
    Some(GitCommit { branch, message: format!("{message}\n\nfrom {from}\nto {to}\n") })
}

/// Replaces each `{name}` that has a value.
fn filled<'a>(text: &str, value: &dyn Fn(&str) -> Option<&'a str>) -> String {
    let mut parts = text.split('{');
    let mut filled = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once('}').and_then(|(name, rest)| Some((value(name)?, rest))) {
            Some((value, rest)) => filled.extend([value, rest]),
            None => filled.extend(["{", part]),
        }
    }
    filled
}

/// Returns the first 12 digits of an image's digest.
fn digest_of(image: &str) -> String {
    match image.parse().map(|image: ImageReference| image.version) {
        Ok(Version::Digest(digest)) => digest.short().to_owned(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests;
