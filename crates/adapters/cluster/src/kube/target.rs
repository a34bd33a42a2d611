//! Targets and scopes of watches, and reasons why a watch delivers nothing.

use std::collections::BTreeSet;

use farrier_core::{image::OperatorResource, plan::ObservedKind};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    batch::v1::Job,
    core::v1::{Node, Pod},
};
use kube::api::{ApiResource, GroupVersionKind};

use super::{
    super::error::{ApiError, MissingPermission},
    object::ObjectKey,
};

/// The objects that a watch delivers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum WatchTarget {
    /// DaemonSets of the whole cluster.
    DaemonSets,
    /// Nodes of the whole cluster.
    Nodes,
    /// Pods of one DaemonSet.
    Pods { namespace: String, daemon_set: String, uid: String },
    /// An operator's resources of one kind.
    Resources(OperatorResource),
    /// All pods of a node that an upgrade drains.
    Workloads { node: String },
    /// Jobs in a namespace that check nodes with a new driver.
    Checks { namespace: String },
}

impl WatchTarget {
    /// Returns the API resource of the target's kind.
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

    /// Returns the target's namespace, if reading the target takes a permission in that namespace only.
    pub(super) fn namespace(&self) -> Option<&str> {
        match self {
            Self::Pods { namespace, .. } | Self::Checks { namespace } => Some(namespace),
            Self::DaemonSets | Self::Nodes | Self::Resources(_) | Self::Workloads { .. } => None,
        }
    }

    pub(super) fn observed_kind(&self) -> ObservedKind {
        match self {
            Self::DaemonSets => ObservedKind::DaemonSets,
            Self::Nodes => ObservedKind::Nodes,
            Self::Pods { .. } => ObservedKind::Pods,
            Self::Resources(_) => ObservedKind::Resources,
            Self::Workloads { .. } => ObservedKind::Workloads,
            Self::Checks { .. } => ObservedKind::Checks,
        }
    }
}

/// Selection of objects and labels that a watch was started with. The watch is restarted if the needed selection differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchScope {
    /// The DaemonSets to keep.
    Named(BTreeSet<ObjectKey>),
    /// The node labels to keep.
    Labels(BTreeSet<String>),
    /// A label selector.
    Selector(String),
    /// A field selector.
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

/// Reason why a watch delivers nothing.
#[derive(Clone, Debug)]
pub(super) enum WatchFailure {
    /// farrier lacks the permission to read the objects.
    Forbidden(MissingPermission),
    /// The API server gave no response or an unexpected one, or did not accept the credentials.
    Failing { attempts: u32, error: ApiError },
    /// The API does not serve this kind.
    NotServed,
}
