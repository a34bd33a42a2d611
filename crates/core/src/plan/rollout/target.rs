//! Pure: what is rewritten, named.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::image::{OperatorResource, RolloutSpec};

/// How a target is rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// One image in a DaemonSet of the cluster.
    Image,
    /// A DaemonSet for each kernel.
    PerKernel,
    /// One image with the modules of all kernels.
    Union,
    /// Nothing; the tag is enough.
    PublishOnly,
    /// The resource of an operator.
    CustomResource,
    /// One image in a directory of manifests.
    File,
}

/// The object that a rollout is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum RolloutObject {
    /// A container of a DaemonSet.
    DaemonSet {
        /// The DaemonSet's namespace.
        namespace: String,
        /// The DaemonSet's name.
        daemon_set: String,
        /// The container's name.
        container: String,
    },
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
        let strategy = match spec {
            RolloutSpec::Image { .. } => Strategy::Image,
            RolloutSpec::PerKernel { .. } => Strategy::PerKernel,
            RolloutSpec::Union { .. } => Strategy::Union,
            RolloutSpec::PublishOnly { .. } => Strategy::PublishOnly,
            RolloutSpec::CustomResource { .. } => Strategy::CustomResource,
            RolloutSpec::File { .. } => Strategy::File,
        };
        let path = match spec {
            RolloutSpec::File { path, .. } => Some(path.to_path_buf()),
            _ => None,
        };
        let object = match (spec.daemon_set(), spec) {
            (Some(found), _) => RolloutObject::DaemonSet {
                namespace: found.namespace.to_owned(),
                daemon_set: found.daemon_set.to_owned(),
                container: found.container.to_owned(),
            },
            (None, RolloutSpec::CustomResource { resource, name }) => {
                RolloutObject::Resource { resource: *resource, name: name.to_string() }
            }
            (None, _) => RolloutObject::Nothing {},
        };
        Self { strategy, path, object }
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
            RolloutObject::DaemonSet { namespace, daemon_set, container } => {
                write!(f, "DaemonSet {namespace}/{daemon_set}, container {container}")?;
            }
            RolloutObject::Resource { resource, name } => write!(f, "{resource} {name}")?,
            RolloutObject::Nothing {} => f.write_str("published tags")?,
        }
        path.as_ref().map_or(Ok(()), |path| write!(f, ", in {}", path.display()))
    }
}
