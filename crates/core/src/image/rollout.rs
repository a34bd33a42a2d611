//! Pure: what is rewritten when an image is there.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumDiscriminants, IntoStaticStr};

use super::UpgradeSpec;
use crate::definition::{
    NotA, Period,
    checked::{DnsLabel, DnsName, GitAddress, GitBranch, LocalPath, OneLine, RepositoryPath},
};

/// One thing whose image field is rewritten.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, EnumDiscriminants)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "strategy",
    try_from = "RolloutForm"
)]
#[strum_discriminants(
    name(Strategy),
    derive(Hash, PartialOrd, Ord, Serialize, Deserialize, IntoStaticStr),
    serde(rename_all = "kebab-case"),
    strum(serialize_all = "kebab-case"),
    doc = "How a target is rewritten."
)]
// The schema is that of the enum; the form below exists for the messages.
#[schemars(!try_from, deny_unknown_fields)]
pub enum RolloutSpec {
    /// A DaemonSet of the cluster whose nodes share one kernel.
    Image {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// How the pods with a new image are watched.
        #[serde(flatten)]
        watch: Watch,
        /// How its nodes get another driver, one after the other; as its update strategy likes when absent.
        upgrade: Option<Box<UpgradeSpec>>,
    },
    /// A DaemonSet over mixed kernels: each kernel gets a copy of its own, with its own image.
    PerKernel {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// How the pods with a new image are watched.
        #[serde(flatten)]
        watch: Watch,
        /// How its nodes get another driver, one after the other; as its update strategy likes when absent.
        upgrade: Option<Box<UpgradeSpec>>,
        /// How long a copy is kept after its last node has left.
        #[serde(default = "default_grace")]
        retire_after: Period,
    },
    /// A DaemonSet over mixed or changing kernels: one image holds the modules for all of them.
    Union {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// How the pods with a new image are watched.
        #[serde(flatten)]
        watch: Watch,
        /// How its nodes get another driver, one after the other; as its update strategy likes when absent.
        upgrade: Option<Box<UpgradeSpec>>,
        /// How long a kernel stays in the image after its last node has left it.
        #[serde(default = "default_grace")]
        drop_after: Period,
    },
    /// Nothing is rewritten: an operator computes the tag by itself, and finds it.
    PublishOnly {
        /// Whose form of tag one of the image's tags must have; not looked at when absent.
        resource: Option<OperatorResource>,
    },
    /// The resource from which an operator makes its DaemonSet.
    CustomResource {
        /// Its kind.
        resource: OperatorResource,
        /// Its name.
        name: DnsName,
    },
    /// A DaemonSet in a directory of manifests beside the cluster (GitOps).
    File {
        /// The file or directory, relative to the definitions directory.
        path: LocalPath,
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
    },
    /// A DaemonSet in a Git repository, from which Argo CD or Flux takes it over into the cluster.
    Git {
        /// Where it stands.
        #[serde(flatten)]
        place: GitPlace,
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// The commit's subject, in which `{image}`, `{daemonSet}`, `{container}`, `{from}` and `{to}` stand for what they say.
        message: Option<OneLine>,
        /// What the names of branches begin with that are pushed in the place of `branch`, one for each change, for a pull request.
        proposals: Option<GitBranch>,
    },
}

/// Manifests in a Git repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema, derive_more::Display)]
#[display("{repository}, branch {branch}{}", path.as_ref().map(|path| format!(", {path}")).unwrap_or_default())]
pub struct GitPlace {
    /// The repository.
    pub repository: GitAddress,
    /// The branch that the cluster follows.
    pub branch: GitBranch,
    /// The file or directory in it; without it, the whole repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<RepositoryPath>,
}

/// A container of a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DaemonSetContainer {
    /// The DaemonSet's namespace.
    pub namespace: DnsLabel,
    /// The DaemonSet's name.
    pub daemon_set: DnsName,
    /// The container or init container whose image is set.
    pub container: DnsLabel,
}

/// A kind of resource from which an operator makes a driver DaemonSet (contracts: Network Operator
/// `mellanox.com/v1alpha1`, GPU Operator `nvidia.com/v1` and `nvidia.com/v1alpha1`).
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    Display,
    IntoStaticStr,
)]
pub enum OperatorResource {
    /// `mellanox.com/v1alpha1`, `spec.ofedDriver`.
    NicClusterPolicy,
    /// `mellanox.com/v1alpha1`, `spec.ofedDriver`, with a `nodeSelector`.
    NicNodePolicy,
    /// `nvidia.com/v1`, `spec.driver`.
    ClusterPolicy,
    /// `nvidia.com/v1alpha1`, fields in `spec` itself, with a `nodeSelector`.
    #[serde(rename = "NVIDIADriver")]
    #[strum(serialize = "NVIDIADriver")]
    NvidiaDriver,
}

impl OperatorResource {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::NicClusterPolicy, Self::NicNodePolicy, Self::ClusterPolicy, Self::NvidiaDriver];

    /// Is it the GPU Operator's, rather than the Network Operator's?
    pub fn is_of_gpu_operator(self) -> bool {
        matches!(self, Self::ClusterPolicy | Self::NvidiaDriver)
    }

    /// The API's `kind`.
    pub fn kind(self) -> &'static str {
        self.into()
    }

    /// The API group.
    pub fn group(self) -> &'static str {
        if self.is_of_gpu_operator() { "nvidia.com" } else { "mellanox.com" }
    }

    /// The API version.
    pub fn version(self) -> &'static str {
        match self {
            Self::ClusterPolicy => "v1",
            Self::NicClusterPolicy | Self::NicNodePolicy | Self::NvidiaDriver => "v1alpha1",
        }
    }

    /// The name in the API's paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::NicClusterPolicy => "nicclusterpolicies",
            Self::NicNodePolicy => "nicnodepolicies",
            Self::ClusterPolicy => "clusterpolicies",
            Self::NvidiaDriver => "nvidiadrivers",
        }
    }

    /// Key and value of the node label by which the operator finds the nodes for its driver.
    pub fn node_label(self) -> (&'static str, &'static str) {
        let gpu = self.is_of_gpu_operator();
        let key =
            if gpu { "nvidia.com/gpu.deploy.driver" } else { "feature.node.kubernetes.io/pci-15b3.present" };
        (key, "true")
    }

    /// Where the driver's fields stand below `spec`.
    pub fn driver_path(self) -> &'static [&'static str] {
        match self {
            Self::NicClusterPolicy | Self::NicNodePolicy => &["ofedDriver"],
            Self::ClusterPolicy => &["driver"],
            Self::NvidiaDriver => &[],
        }
    }
}

/// How the first pods with a new image are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Watch {
    /// How long the first pods with a new image may take to get ready before the old image is put back.
    #[serde(default = "default_deadline")]
    pub deadline: Period,
    /// How long a pod must stay ready, without a restart of a container, until it counts as ready: a container that
    /// crashes at its start is ready for a moment each time. The DaemonSet's `minReadySeconds` counts where it is longer.
    #[serde(default = "default_stable_for")]
    pub stable_for: Period,
}

fn default_stable_for() -> Period {
    Period::seconds(120)
}

fn default_deadline() -> Period {
    Period::seconds(600)
}

fn default_grace() -> Period {
    Period::seconds(86400)
}

impl RolloutSpec {
    /// The DaemonSet's container that it is about; `None` for those that are about no DaemonSet.
    pub fn daemon_set(&self) -> Option<&DaemonSetContainer> {
        match self {
            Self::Image { target, .. }
            | Self::PerKernel { target, .. }
            | Self::Union { target, .. }
            | Self::File { target, .. }
            | Self::Git { target, .. } => Some(target),
            Self::PublishOnly { .. } | Self::CustomResource { .. } => None,
        }
    }

    /// What the names of branches begin with that are pushed for pull requests.
    pub fn proposals(&self) -> Option<&str> {
        match self {
            Self::Git { proposals, .. } => proposals.as_deref(),
            _ => None,
        }
    }

    /// How the first pods with a new image are watched; `None` where they are not.
    pub fn watch(&self) -> Option<Watch> {
        match self {
            Self::Image { watch, .. } | Self::PerKernel { watch, .. } | Self::Union { watch, .. } => {
                Some(*watch)
            }
            _ => None,
        }
    }

    /// How its nodes get another driver, one after the other.
    pub fn upgrade(&self) -> Option<&UpgradeSpec> {
        match self {
            Self::Image { upgrade, .. } | Self::PerKernel { upgrade, .. } | Self::Union { upgrade, .. } => {
                upgrade.as_deref()
            }
            _ => None,
        }
    }

    /// How the target is rewritten.
    pub fn strategy(&self) -> Strategy {
        self.into()
    }
}

/// [`RolloutSpec`] as written: serde's internally tagged enums lose the place of an error.
#[serde_with::skip_serializing_none]
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RolloutForm {
    strategy: Strategy,
    namespace: Option<DnsLabel>,
    daemon_set: Option<DnsName>,
    container: Option<DnsLabel>,
    path: Option<LocalPath>,
    repository: Option<GitAddress>,
    branch: Option<GitBranch>,
    message: Option<OneLine>,
    proposals: Option<GitBranch>,
    deadline: Option<Period>,
    stable_for: Option<Period>,
    retire_after: Option<Period>,
    drop_after: Option<Period>,
    upgrade: Option<UpgradeSpec>,
    resource: Option<OperatorResource>,
    name: Option<DnsName>,
}

impl Strategy {
    /// The name in definitions.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether it has a field beside `strategy`.
    fn has(self, field: &str) -> bool {
        let fields = match self {
            Self::Image => "namespace daemonSet container deadline stableFor upgrade",
            Self::PerKernel => "namespace daemonSet container deadline stableFor retireAfter upgrade",
            Self::Union => "namespace daemonSet container deadline stableFor dropAfter upgrade",
            Self::PublishOnly => "resource",
            Self::CustomResource => "resource name",
            Self::File => "path namespace daemonSet container",
            Self::Git => "repository branch path namespace daemonSet container message proposals",
        };
        field == "strategy" || fields.split(' ').any(|known| known == field)
    }
}

impl TryFrom<RolloutForm> for RolloutSpec {
    type Error = String;

    fn try_from(form: RolloutForm) -> Result<Self, Self::Error> {
        let strategy = form.strategy;
        let given = serde_json::to_value(&form).map_err(|error| error.to_string())?;
        let mut given = given.as_object().into_iter().flat_map(|given| given.keys());
        if let Some(field) = given.find(|field| !strategy.has(field)) {
            return Err(format!("strategy `{}` has no `{field}`", strategy.as_str()));
        }
        let needed = |field: &str| format!("strategy `{}` needs a `{field}`", strategy.as_str());
        let target = || {
            Ok::<_, String>(DaemonSetContainer {
                namespace: form.namespace.ok_or_else(|| needed("namespace"))?,
                daemon_set: form.daemon_set.ok_or_else(|| needed("daemonSet"))?,
                container: form.container.ok_or_else(|| needed("container"))?,
            })
        };
        let watch = Watch {
            deadline: form.deadline.unwrap_or_else(default_deadline),
            stable_for: form.stable_for.unwrap_or_else(default_stable_for),
        };
        let upgrade = form.upgrade.map(UpgradeSpec::checked).transpose()?.map(Box::new);
        Ok(match strategy {
            Strategy::Image => Self::Image { target: target()?, watch, upgrade },
            Strategy::PerKernel => {
                let retire_after = form.retire_after.unwrap_or_else(default_grace);
                Self::PerKernel { target: target()?, watch, upgrade, retire_after }
            }
            Strategy::Union => {
                let drop_after = form.drop_after.unwrap_or_else(default_grace);
                Self::Union { target: target()?, watch, upgrade, drop_after }
            }
            Strategy::PublishOnly => Self::PublishOnly { resource: form.resource },
            Strategy::CustomResource => Self::CustomResource {
                resource: form.resource.ok_or_else(|| needed("resource"))?,
                name: form.name.ok_or_else(|| needed("name"))?,
            },
            Strategy::File => {
                Self::File { path: form.path.ok_or_else(|| needed("path"))?, target: target()? }
            }
            Strategy::Git => {
                let place = GitPlace {
                    repository: form.repository.ok_or_else(|| needed("repository"))?,
                    branch: form.branch.ok_or_else(|| needed("branch"))?,
                    path: form.path.map(|path| in_repository(&path)).transpose()?,
                };
                Self::Git { place, target: target()?, message: form.message, proposals: form.proposals }
            }
        })
    }
}

fn in_repository(path: &LocalPath) -> Result<RepositoryPath, String> {
    path.to_string_lossy().parse().map_err(|error: NotA| error.to_string())
}
