//! The names of rollout targets.

use std::{
    fmt,
    path::{Component, Path, PathBuf},
};

use serde::Serialize;

use crate::image::{
    ChartImage, ChartValue, DaemonSetContainer, GitLocation, ResourceName, RolloutSpec, Strategy,
};

/// Object that a rollout rewrites.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(untagged, rename_all_fields = "camelCase")]
pub enum RolloutObject {
    /// Container of a DaemonSet.
    DaemonSet(DaemonSetContainer),
    /// Operator's resource, by kind and name.
    Resource(ResourceName),
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
            Self::Resource(name) => Some(format!("{}/{}", name.resource, name.full_name())),
            Self::Nothing {} => None,
        }
    }
}

/// Location of manifests outside the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(untagged)]
pub enum ManifestLocation {
    /// A directory or file on this machine.
    #[display("{}", path.display())]
    Local {
        /// Path, as written in the definition.
        path: PathBuf,
        /// Image of a chart.
        #[serde(skip_serializing_if = "Option::is_none")]
        values: Option<ChartImage>,
    },
    /// A Git repository.
    Git(GitLocation),
}

impl ManifestLocation {
    /// Returns the location that a definition names, if any.
    pub fn of(spec: &RolloutSpec) -> Option<Self> {
        match spec {
            RolloutSpec::File { path, values, .. } => {
                Some(Self::Local { path: path.to_path_buf(), values: values.clone() })
            }
            RolloutSpec::Git { location, .. } => Some(Self::Git(location.clone())),
            RolloutSpec::Image { .. }
            | RolloutSpec::PerKernel { .. }
            | RolloutSpec::Union { .. }
            | RolloutSpec::PublishOnly { .. }
            | RolloutSpec::CustomResource { .. } => None,
        }
    }

    /// Returns the path of the manifests, without `.` parts.
    fn path(&self) -> PathBuf {
        match self {
            Self::Local { path, .. } => without_dots(path),
            Self::Git(location) => {
                let path = location.path.as_ref().map(ToString::to_string).unwrap_or_default();
                without_dots(Path::new(path.trim_start_matches('/')))
            }
        }
    }

    /// Whether both locations may contain the same file.
    fn overlaps(&self, other: &Self) -> bool {
        let is_same_tree = match (self, other) {
            (Self::Local { .. }, Self::Local { .. }) => true,
            (Self::Git(one), Self::Git(other)) => {
                let [first, second] =
                    [one, other].map(|location| normalized_address(location.repository.as_ref()));
                (first, &one.branch) == (second, &other.branch)
            }
            _ => false,
        };
        let [path, other_path] = [self, other].map(Self::path);
        is_same_tree && (path.starts_with(&other_path) || other_path.starts_with(&path))
    }

    /// Returns the file and the path of the chart value that holds the image, if any.
    fn chart_value(&self) -> Option<(PathBuf, &str)> {
        let values = match self {
            Self::Local { values, .. } | Self::Git(GitLocation { values, .. }) => values.as_ref(),
        };
        let ChartValue { file, path } = &values?.value;
        Some((without_dots(&self.path().join(&**file)), &**path))
    }
}

fn without_dots(path: &Path) -> PathBuf {
    path.components().filter(|part| *part != Component::CurDir).collect()
}

/// Normalizes a repository's address, so that its usual spellings are equal. Hosts, and most servers, ignore case.
fn normalized_address(address: &str) -> String {
    let address = address.trim_end_matches('/');
    address.strip_suffix(".git").unwrap_or(address).to_lowercase()
}

/// One rollout target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutTarget {
    /// Strategy of the rollout.
    pub strategy: Strategy,
    /// Location of the manifests; for `file` and `git`.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub location: Option<ManifestLocation>,
    /// Object that is rewritten.
    #[serde(flatten)]
    pub object: RolloutObject,
}

impl RolloutTarget {
    /// Returns the target that a definition names.
    pub fn of(spec: &RolloutSpec) -> Self {
        let object = match (spec.daemon_set(), spec) {
            (Some(container), _) => RolloutObject::DaemonSet(container.clone()),
            (None, _) => spec.resource().cloned().map_or(RolloutObject::Nothing {}, RolloutObject::Resource),
        };
        Self { strategy: spec.strategy(), location: ManifestLocation::of(spec), object }
    }

    /// Returns namespace and name of a DaemonSet in the cluster. Rollouts to the same DaemonSet are written together.
    pub fn live_daemon_set(&self) -> Option<(&str, &str)> {
        match (&self.location, &self.object) {
            (None, RolloutObject::DaemonSet(target)) => Some((&target.namespace, &target.daemon_set)),
            _ => None,
        }
    }

    /// Whether two rollouts may write the same field, whatever their strategies.
    pub(crate) fn may_share_field(&self, other: &Self) -> bool {
        self.object != RolloutObject::Nothing {}
            && self.object == other.object
            && match (&self.location, &other.location) {
                (None, None) => true,
                (Some(one), Some(other)) => one.overlaps(other),
                // The object in a Git repository is applied to the cluster.
                (None, Some(location)) | (Some(location), None) => {
                    matches!(location, ManifestLocation::Git(_))
                }
            }
    }

    /// Whether both rollouts write the same value of a chart, for example the value of several DaemonSets.
    pub(super) fn shares_chart_value(&self, other: &Self) -> bool {
        let (Some(one), Some(other)) = (&self.location, &other.location) else { return false };
        one.overlaps(other) && one.chart_value().is_some_and(|value| other.chart_value() == Some(value))
    }
}

impl fmt::Display for RolloutTarget {
    /// Formats `DaemonSet kube-system/driver, container main`, followed by the location of its manifest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { strategy: _, location, object } = self;
        match object {
            RolloutObject::DaemonSet(container) => write!(f, "{container}")?,
            RolloutObject::Resource(name) => write!(f, "{} {}", name.resource, name.full_name())?,
            RolloutObject::Nothing {} => f.write_str("published tags")?,
        }
        location.as_ref().map_or(Ok(()), |location| write!(f, ", in {location}"))
    }
}
