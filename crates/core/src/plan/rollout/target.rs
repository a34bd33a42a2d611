//! Pure: what is rewritten, named.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::image::{DaemonSetContainer, OperatorResource, RolloutSpec, Strategy};

/// The object that a rollout is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum RolloutObject {
    /// A container of a DaemonSet.
    DaemonSet(DaemonSetContainer),
    /// An operator's resource.
    Resource {
        /// Its kind.
        resource: OperatorResource,
        /// Its name.
        name: String,
    },
    /// None.
    Nothing {},
}

/// One rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutTarget {
    /// How it is rewritten.
    pub strategy: Strategy,
    /// The directory or file, as the definition names it; for `file`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// What is rewritten.
    #[serde(flatten)]
    pub object: RolloutObject,
}

impl RolloutTarget {
    /// The target that a definition names.
    pub fn of(spec: &RolloutSpec) -> Self {
        let path = match spec {
            RolloutSpec::File { path, .. } => Some(path.to_path_buf()),
            _ => None,
        };
        let object = match (spec.daemon_set(), spec) {
            (Some(found), _) => RolloutObject::DaemonSet(found.clone()),
            (None, RolloutSpec::CustomResource { resource, name }) => {
                RolloutObject::Resource { resource: *resource, name: name.to_string() }
            }
            (None, _) => RolloutObject::Nothing {},
        };
        Self { strategy: spec.strategy(), path, object }
    }

    /// What only one rollout may write, whatever its strategy.
    pub fn field(&self) -> Option<(Option<&Path>, &RolloutObject)> {
        (self.object != RolloutObject::Nothing {}).then_some((self.path.as_deref(), &self.object))
    }
}

impl fmt::Display for RolloutTarget {
    /// `DaemonSet kube-system/driver, container main`, then the directory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { strategy: _, path, object } = self;
        match object {
            RolloutObject::DaemonSet(DaemonSetContainer { namespace, daemon_set, container }) => {
                write!(f, "DaemonSet {namespace}/{daemon_set}, container {container}")?;
            }
            RolloutObject::Resource { resource, name } => write!(f, "{resource} {name}")?,
            RolloutObject::Nothing {} => f.write_str("published tags")?,
        }
        path.as_ref().map_or(Ok(()), |path| write!(f, ", in {}", path.display()))
    }
}
