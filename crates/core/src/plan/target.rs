//! The names of rollout targets.

use std::{fmt, path::PathBuf};

use serde::Serialize;

use crate::image::{DaemonSetContainer, GitPlace, OperatorResource, RolloutSpec, Strategy};

/// Object that a rollout rewrites.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum RolloutObject {
    /// Container of a DaemonSet.
    DaemonSet(DaemonSetContainer),
    /// Operator's resource, by kind and name.
    Resource { resource: OperatorResource, name: String },
    /// No object.
    Nothing {},
}

impl RolloutObject {
    /// Returns the name that `farrier rollback` takes: `namespace/name` of a DaemonSet, `Kind/name` of an operator's
    /// resource.
    pub fn name(&self) -> Option<String> {
        match self {
            Self::DaemonSet(DaemonSetContainer { namespace, daemon_set, .. }) => {
                Some(format!("{namespace}/{daemon_set}"))
            }
            Self::Resource { resource, name } => Some(format!("{resource}/{name}")),
            Self::Nothing {} => None,
        }
    }
}

/// Place of manifests outside the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(untagged)]
pub enum ManifestLocation {
    /// A directory or file on this machine.
    #[display("{}", path.display())]
    Local {
        /// Path, as written in the definition.
        path: PathBuf,
    },
    /// A Git repository.
    Git(GitPlace),
}

impl ManifestLocation {
    /// Returns the place that a definition names, if any.
    pub fn of(spec: &RolloutSpec) -> Option<Self> {
        match spec {
            RolloutSpec::File { path, .. } => Some(Self::Local { path: path.to_path_buf() }),
            RolloutSpec::Git { place, .. } => Some(Self::Git(place.clone())),
            RolloutSpec::Image { .. }
            | RolloutSpec::PerKernel { .. }
            | RolloutSpec::Union { .. }
            | RolloutSpec::PublishOnly { .. }
            | RolloutSpec::CustomResource { .. } => None,
        }
    }
}

/// One rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutTarget {
    /// Strategy of the rollout.
    pub strategy: Strategy,
    /// Place of the manifests; for `file` and `git`.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub place: Option<ManifestLocation>,
    /// Object that is rewritten.
    #[serde(flatten)]
    pub object: RolloutObject,
}

impl RolloutTarget {
    /// Returns the target that a definition names.
    pub fn of(spec: &RolloutSpec) -> Self {
        let object = match (spec.daemon_set(), spec) {
            (Some(found), _) => RolloutObject::DaemonSet(found.clone()),
            (None, RolloutSpec::CustomResource { resource, name }) => {
                RolloutObject::Resource { resource: *resource, name: name.to_string() }
            }
            (None, _) => RolloutObject::Nothing {},
        };
        Self { strategy: spec.strategy(), place: ManifestLocation::of(spec), object }
    }

    /// Returns namespace and name of a DaemonSet in the cluster. Rollouts to the same one are written together.
    pub fn live_daemon_set(&self) -> Option<(&str, &str)> {
        match (&self.place, &self.object) {
            (None, RolloutObject::DaemonSet(found)) => Some((&found.namespace, &found.daemon_set)),
            _ => None,
        }
    }

    /// Returns the field that only one rollout may write, whatever its strategy.
    pub fn field(&self) -> Option<(Option<&ManifestLocation>, &RolloutObject)> {
        (self.object != RolloutObject::Nothing {}).then_some((self.place.as_ref(), &self.object))
    }
}

impl fmt::Display for RolloutTarget {
    /// Formats `DaemonSet kube-system/driver, container main`, followed by the place of its manifest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { strategy: _, place, object } = self;
        match object {
            RolloutObject::DaemonSet(DaemonSetContainer { namespace, daemon_set, container }) => {
                write!(f, "DaemonSet {namespace}/{daemon_set}, container {container}")?;
            }
            RolloutObject::Resource { resource, name } => write!(f, "{resource} {name}")?,
            RolloutObject::Nothing {} => f.write_str("published tags")?,
        }
        place.as_ref().map_or(Ok(()), |place| write!(f, ", in {place}"))
    }
}
