//! Pure: what one watch is for, and why it brings nothing.

use std::collections::BTreeSet;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    batch::v1::Job,
    core::v1::{Node, Pod},
};
use kube::api::{ApiResource, GroupVersionKind};

use super::{
    super::error::{ApiError, MissingRight},
    object::Key,
};
use crate::{image::OperatorResource, plan::Seen};

/// What one watch is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Target {
    /// Those of the whole cluster.
    DaemonSets,
    /// Those of the whole cluster.
    Nodes,
    /// Those of one DaemonSet.
    Pods { namespace: String, daemon_set: String, uid: String },
    /// An operator's resources of one kind.
    Resources(OperatorResource),
    /// All pods of a node that an upgrade drains.
    Workloads { node: String },
    /// The Jobs of a namespace that check nodes with a new driver.
    Checks { namespace: String },
}

impl Target {
    /// The kind in the API's terms.
    pub(super) fn resource(&self) -> ApiResource {
        match self {
            Self::DaemonSets => ApiResource::erase::<DaemonSet>(&()),
            Self::Nodes => ApiResource::erase::<Node>(&()),
            Self::Pods { .. } | Self::Workloads { .. } => ApiResource::erase::<Pod>(&()),
            Self::Checks { .. } => ApiResource::erase::<Job>(&()),
            Self::Resources(kind) => {
                let gvk = GroupVersionKind::gvk(kind.group(), kind.version(), kind.kind());
                ApiResource::from_gvk_with_plural(&gvk, kind.plural())
            }
        }
    }

    /// The namespace, where what cannot be read there says nothing of another.
    pub(super) fn namespace(&self) -> Option<&str> {
        match self {
            Self::Pods { namespace, .. } | Self::Checks { namespace } => Some(namespace),
            Self::DaemonSets | Self::Nodes | Self::Resources(_) | Self::Workloads { .. } => None,
        }
    }

    pub(super) fn seen(&self) -> Seen {
        match self {
            Self::DaemonSets => Seen::DaemonSets,
            Self::Nodes => Seen::Nodes,
            Self::Pods { .. } => Seen::Pods,
            Self::Resources(_) => Seen::Resources,
            Self::Workloads { .. } => Seen::Workloads,
            Self::Checks { .. } => Seen::Checks,
        }
    }
}

/// What a watch was started for. A watch with another scope than what is needed now is started anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchScope {
    /// The DaemonSets that are kept.
    Named(BTreeSet<Key>),
    /// The labels that are kept.
    Labels(BTreeSet<String>),
    /// The objects' labels.
    Selector(String),
    /// The objects' fields.
    Fields(String),
    /// All objects.
    All,
}

impl WatchScope {
    pub(super) fn covers(&self, needed: &Self) -> bool {
        match (self, needed) {
            (Self::Labels(have), Self::Labels(need)) => have.is_superset(need),
            (have, need) => have == need,
        }
    }
}

/// Why a watch brings nothing.
#[derive(Clone, Debug)]
pub(super) enum Trouble {
    /// farrier may not read it.
    Forbidden(MissingRight),
    /// No answer, or not the right one; or the credentials are not accepted.
    Failing { attempts: u32, error: ApiError },
    /// The API does not serve this kind.
    Absent,
}
