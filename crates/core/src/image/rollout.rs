//! Rollout targets and strategies of an image.

mod entry;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumDiscriminants, IntoStaticStr};

pub(super) use self::entry::rollouts;
use super::UpgradeSpec;
use crate::definition::{
    ParseError, Period,
    checked::{DnsLabel, DnsName, GitAddress, GitBranch, LocalPath, OneLine, RepositoryPath},
};

/// A rollout target: an object with an image field that farrier rewrites.
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
    doc = "Strategy for rewriting a rollout target."
)]
// The enum defines the schema. `RolloutForm` exists for better error messages.
#[schemars(!try_from, deny_unknown_fields, transform = entry::with_alternatives)]
pub enum RolloutSpec {
    /// A DaemonSet in the cluster whose nodes share one kernel.
    Image {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// Limits for watching the first pods with a new image.
        #[serde(flatten)]
        watch: Watch,
        /// Replaces the driver on one node after the other. Default: the DaemonSet's update strategy decides.
        upgrade: Option<Box<UpgradeSpec>>,
    },
    /// A DaemonSet over mixed kernels. Each kernel gets its own copy with its own image.
    PerKernel {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// Limits for watching the first pods with a new image.
        #[serde(flatten)]
        watch: Watch,
        /// Replaces the driver on one node after the other. Default: the DaemonSet's update strategy decides.
        upgrade: Option<Box<UpgradeSpec>>,
        /// How long a copy is kept after its last node has left.
        #[serde(default = "default_grace")]
        retire_after: Period,
    },
    /// A DaemonSet over mixed or changing kernels. One image contains the modules for all of them.
    Union {
        /// The container whose image is set.
        #[serde(flatten)]
        target: DaemonSetContainer,
        /// Limits for watching the first pods with a new image.
        #[serde(flatten)]
        watch: Watch,
        /// Replaces the driver on one node after the other. Default: the DaemonSet's update strategy decides.
        upgrade: Option<Box<UpgradeSpec>>,
        /// How long a kernel stays in the image after its last node has left.
        #[serde(default = "default_grace")]
        drop_after: Period,
    },
    /// Nothing is rewritten: an operator computes the tag and finds the image by itself.
    PublishOnly {
        /// Operator resource whose tag form one of the image's tags must have. Default: no check.
        resource: Option<OperatorResource>,
    },
    /// The resource from which an operator creates its DaemonSet.
    CustomResource {
        /// The resource.
        #[serde(flatten)]
        target: ResourceName,
    },
    /// A DaemonSet or an operator's resource in a directory of manifests outside the cluster (GitOps).
    File {
        /// The file or directory, relative to the definitions directory.
        path: LocalPath,
        /// Value of a chart that has the image. Default: the DaemonSet's manifest, or the kustomization's `images`.
        values: Option<ChartImage>,
        /// The container whose image is set, or the resource.
        #[serde(flatten)]
        #[schemars(with = "DaemonSetContainer")]
        target: ManifestObject,
    },
    /// A DaemonSet or an operator's resource in a Git repository that Argo CD or Flux applies to the cluster.
    Git {
        /// Repository, branch and path of the manifest.
        #[serde(flatten)]
        location: GitLocation,
        /// The container whose image is set, or the resource.
        #[serde(flatten)]
        #[schemars(with = "DaemonSetContainer")]
        target: ManifestObject,
        /// Subject of the commit. `{image}`, `{daemonSet}`, `{resource}`, `{container}`, `{from}` and `{to}` are replaced with
        /// their values.
        message: Option<OneLine>,
        /// Prefix of proposal branches. farrier pushes one branch for each change, for a pull request, instead of pushing to
        /// `branch`.
        proposals: Option<GitBranch>,
    },
}

/// Location of manifests in a Git repository.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema, derive_more::Display)]
#[display("{repository}, branch {branch}{}", path.as_ref().map(|path| format!(", {path}")).unwrap_or_default())]
pub struct GitLocation {
    /// The repository.
    pub repository: GitAddress,
    /// The branch that the cluster follows.
    pub branch: GitBranch,
    /// The file or directory in the repository. Default: the whole repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<RepositoryPath>,
    /// Value of a chart that has the image. Default: the DaemonSet's manifest, or the kustomization's `images`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<ChartImage>,
}

/// An image among the values of a Helm chart, or the parameters of an Argo CD Application.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChartValue {
    /// The file, relative to `path`.
    pub file: RepositoryPath,
    /// Path of the value: `driver.image`, or `spec.source.helm.parameters[name=driver.image].value`. The value is a whole image, or
    /// a mapping with `repository` and optional `registry`, `tag` and `digest`.
    pub path: OneLine,
}

/// An image among the values of a chart, for the DaemonSet that the chart makes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ChartImage {
    /// Place of the image.
    #[serde(flatten)]
    pub value: ChartValue,
    /// Container that gets the image.
    #[serde(skip)]
    pub target: DaemonSetContainer,
}

/// A container of a DaemonSet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema, derive_more::Display)]
#[serde(rename_all = "camelCase")]
#[display("DaemonSet {namespace}/{daemon_set}, container {container}")]
pub struct DaemonSetContainer {
    /// The DaemonSet's namespace.
    pub namespace: DnsLabel,
    /// The DaemonSet's name.
    pub daemon_set: DnsName,
    /// The container or init container whose image is set.
    pub container: DnsLabel,
}

/// An operator's resource.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
pub struct ResourceName {
    /// Kind of the resource.
    pub resource: OperatorResource,
    /// Namespace of the resource; for a Module only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<DnsLabel>,
    /// Name of the resource.
    pub name: DnsName,
}

impl ResourceName {
    /// The name, after the namespace if there is one.
    pub fn full_name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{namespace}/{}", self.name),
            None => self.name.to_string(),
        }
    }
}

/// A rollout target in manifests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(untagged)]
pub enum ManifestObject {
    /// A container of a DaemonSet.
    DaemonSet(DaemonSetContainer),
    /// An operator's resource.
    Resource(ResourceName),
}

/// A kind of resource from which an operator installs a driver (contracts: Network Operator `mellanox.com/v1alpha1`, GPU
/// Operator `nvidia.com/v1` and `nvidia.com/v1alpha1`, Kernel Module Management `kmm.sigs.x-k8s.io/v1beta1`).
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
    /// `nvidia.com/v1alpha1`, fields directly in `spec`, with a `nodeSelector`.
    #[serde(rename = "NVIDIADriver")]
    #[strum(serialize = "NVIDIADriver")]
    NvidiaDriver,
    /// `kmm.sigs.x-k8s.io/v1beta1`, `spec.moduleLoader.container`, in a namespace.
    Module,
    /// `nvidia.com/v1alpha1`. It describes no driver, so it cannot be a rollout target. If one exists, the GPU Operator takes the
    /// driver from NVIDIADriver resources and ignores a ClusterPolicy.
    #[serde(rename = "GPUCluster", skip_deserializing)]
    #[strum(serialize = "GPUCluster")]
    GpuCluster,
}

impl OperatorResource {
    /// Kinds that can be rollout targets.
    pub const TARGETS: [Self; 5] =
        [Self::NicClusterPolicy, Self::NicNodePolicy, Self::ClusterPolicy, Self::NvidiaDriver, Self::Module];

    /// Whether the resource belongs to the GPU Operator.
    pub fn is_of_gpu_operator(self) -> bool {
        matches!(self, Self::ClusterPolicy | Self::NvidiaDriver | Self::GpuCluster)
    }

    /// The API's `kind`.
    pub fn kind(self) -> &'static str {
        self.into()
    }

    /// The API group.
    pub fn group(self) -> &'static str {
        match self {
            Self::NicClusterPolicy | Self::NicNodePolicy => "mellanox.com",
            Self::ClusterPolicy | Self::NvidiaDriver | Self::GpuCluster => "nvidia.com",
            Self::Module => "kmm.sigs.x-k8s.io",
        }
    }

    /// The API version.
    pub fn version(self) -> &'static str {
        match self {
            Self::ClusterPolicy => "v1",
            Self::NicClusterPolicy | Self::NicNodePolicy | Self::NvidiaDriver | Self::GpuCluster => {
                "v1alpha1"
            }
            Self::Module => "v1beta1",
        }
    }

    /// Plural name, as used in API paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::NicClusterPolicy => "nicclusterpolicies",
            Self::NicNodePolicy => "nicnodepolicies",
            Self::ClusterPolicy => "clusterpolicies",
            Self::NvidiaDriver => "nvidiadrivers",
            Self::Module => "modules",
            Self::GpuCluster => "gpuclusters",
        }
    }

    /// Label with the value `true` that selects the nodes for the operator's driver.
    pub(crate) fn node_label(self) -> Option<&'static str> {
        match self {
            Self::NicClusterPolicy | Self::NicNodePolicy => {
                Some("feature.node.kubernetes.io/pci-15b3.present")
            }
            Self::ClusterPolicy | Self::NvidiaDriver => Some("nvidia.com/gpu.deploy.driver"),
            Self::Module | Self::GpuCluster => None,
        }
    }

    /// Path of the driver's fields below `spec`.
    pub fn driver_path(self) -> &'static [&'static str] {
        match self {
            Self::NicClusterPolicy | Self::NicNodePolicy => &["ofedDriver"],
            Self::ClusterPolicy => &["driver"],
            Self::NvidiaDriver | Self::GpuCluster => &[],
            Self::Module => &["moduleLoader", "container"],
        }
    }
}

/// Limits for watching the first pods with a new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Watch {
    /// How long the first pods with a new image may take to become ready. After that, farrier restores the old image.
    #[serde(default = "default_deadline")]
    pub deadline: Period,
    /// How long a pod must stay ready without a container restart to count as ready. A container that crashes at its start is
    /// briefly ready each time. The DaemonSet's `minReadySeconds` applies if it is longer.
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
    /// The DaemonSet's container that is the target; `None` if the target is not a DaemonSet.
    pub fn daemon_set(&self) -> Option<&DaemonSetContainer> {
        match self {
            Self::Image { target, .. }
            | Self::PerKernel { target, .. }
            | Self::Union { target, .. }
            | Self::File { target: ManifestObject::DaemonSet(target), .. }
            | Self::Git { target: ManifestObject::DaemonSet(target), .. } => Some(target),
            _ => None,
        }
    }

    /// The operator's resource that is the target, if it is one.
    pub fn resource(&self) -> Option<&ResourceName> {
        match self {
            Self::CustomResource { target }
            | Self::File { target: ManifestObject::Resource(target), .. }
            | Self::Git { target: ManifestObject::Resource(target), .. } => Some(target),
            _ => None,
        }
    }

    /// Namespace of the target, if it has one.
    pub fn namespace(&self) -> Option<&DnsLabel> {
        let in_resource = || self.resource()?.namespace.as_ref();
        self.daemon_set().map(|target| &target.namespace).or_else(in_resource)
    }

    /// Prefix of the branches that farrier pushes for pull requests.
    pub fn proposals(&self) -> Option<&str> {
        match self {
            Self::Git { proposals, .. } => proposals.as_deref(),
            _ => None,
        }
    }

    /// Limits for watching the first pods with a new image; `None` for strategies that do not watch pods.
    pub fn watch(&self) -> Option<Watch> {
        match self {
            Self::Image { watch, .. } | Self::PerKernel { watch, .. } | Self::Union { watch, .. } => {
                Some(*watch)
            }
            _ => None,
        }
    }

    /// Settings for replacing the driver on one node after the other, if any.
    pub fn upgrade(&self) -> Option<&UpgradeSpec> {
        match self {
            Self::Image { upgrade, .. } | Self::PerKernel { upgrade, .. } | Self::Union { upgrade, .. } => {
                upgrade.as_deref()
            }
            _ => None,
        }
    }

    /// The rollout strategy.
    pub fn strategy(&self) -> Strategy {
        self.into()
    }
}

/// [`RolloutSpec`] as written in the file, with the fields of all strategies; [`Strategy::accepts`] has the fields of each. Serde's
/// internally tagged enums lose the position of an error.
#[serde_with::skip_serializing_none]
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RolloutForm {
    strategy: Strategy,
    namespace: Option<DnsLabel>,
    daemon_set: Option<DnsName>,
    container: Option<DnsLabel>,
    containers: Option<Vec<DnsLabel>>,
    path: Option<LocalPath>,
    repository: Option<GitAddress>,
    branch: Option<GitBranch>,
    values: Option<ChartValue>,
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
    /// The strategy's name in definitions.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the strategy accepts a field.
    fn accepts(self, field: &str) -> bool {
        let fields = match self {
            Self::Image => "namespace daemonSet container deadline stableFor upgrade",
            Self::PerKernel => "namespace daemonSet container deadline stableFor retireAfter upgrade",
            Self::Union => "namespace daemonSet container deadline stableFor dropAfter upgrade",
            Self::PublishOnly => "resource",
            Self::CustomResource => "resource namespace name",
            Self::File => "path values namespace daemonSet container resource name",
            Self::Git => {
                "repository branch path values namespace daemonSet container resource name message proposals"
            }
        };
        field == "strategy" || fields.split(' ').any(|known| known == field)
    }
}

impl TryFrom<RolloutForm> for RolloutSpec {
    type Error = String;

    fn try_from(form: RolloutForm) -> Result<Self, Self::Error> {
        let strategy = form.strategy;
        let fields = serde_json::to_value(&form).map_err(|error| error.to_string())?;
        let mut fields = fields.as_object().into_iter().flat_map(|fields| fields.keys());
        if let Some(field) = fields.find(|field| !strategy.accepts(field)) {
            return Err(format!("strategy `{}` has no `{field}`", strategy.as_str()));
        }
        if form.deadline.is_some_and(|deadline| deadline.duration().is_zero()) {
            return Err("a `deadline` of zero would restore the previous image at once".to_owned());
        }
        let missing = |field: &str| format!("strategy `{}` needs a `{field}`", strategy.as_str());
        let resource_name = |resource: OperatorResource| {
            let (namespace, name) =
                (form.namespace.clone(), form.name.clone().ok_or_else(|| missing("name"))?);
            let is_namespaced = resource == OperatorResource::Module;
            if is_namespaced != namespace.is_some() {
                return Err(format!(
                    "a {resource} has {} `namespace`",
                    if is_namespaced { "a" } else { "no" }
                ));
            }
            Ok(ResourceName { resource, namespace, name })
        };
        let container = || {
            Ok::<_, String>(DaemonSetContainer {
                namespace: form.namespace.clone().ok_or_else(|| missing("namespace"))?,
                daemon_set: form.daemon_set.clone().ok_or_else(|| missing("daemonSet"))?,
                container: form.container.clone().ok_or_else(|| missing("container"))?,
            })
        };
        let manifest_object = || match form.resource {
            None if form.name.is_some() => Err("`name` needs a `resource`".to_owned()),
            None => container().map(ManifestObject::DaemonSet),
            Some(_) if form.daemon_set.is_some() || form.container.is_some() || form.values.is_some() => {
                Err("`resource` excludes `daemonSet`, `container` and `values`".to_owned())
            }
            Some(kind) => resource_name(kind).map(ManifestObject::Resource),
        };
        let watch = Watch {
            deadline: form.deadline.unwrap_or_else(default_deadline),
            stable_for: form.stable_for.unwrap_or_else(default_stable_for),
        };
        let upgrade = form.upgrade.map(UpgradeSpec::checked).transpose()?.map(Box::new);
        Ok(match strategy {
            Strategy::Image => Self::Image { target: container()?, watch, upgrade },
            Strategy::PerKernel => {
                let retire_after = form.retire_after.unwrap_or_else(default_grace);
                Self::PerKernel { target: container()?, watch, upgrade, retire_after }
            }
            Strategy::Union => {
                let drop_after = form.drop_after.unwrap_or_else(default_grace);
                Self::Union { target: container()?, watch, upgrade, drop_after }
            }
            Strategy::PublishOnly => Self::PublishOnly { resource: form.resource },
            Strategy::CustomResource => {
                let kind = form.resource.ok_or_else(|| missing("resource"))?;
                Self::CustomResource { target: resource_name(kind)? }
            }
            Strategy::File => {
                let target = manifest_object()?;
                let path = form.path.ok_or_else(|| missing("path"))?;
                Self::File { path, values: chart_image(form.values, &target), target }
            }
            Strategy::Git => {
                let target = manifest_object()?;
                let location = GitLocation {
                    repository: form.repository.ok_or_else(|| missing("repository"))?,
                    branch: form.branch.ok_or_else(|| missing("branch"))?,
                    path: form.path.map(|path| repository_path(&path)).transpose()?,
                    values: chart_image(form.values, &target),
                };
                Self::Git { location, target, message: form.message, proposals: form.proposals }
            }
        })
    }
}

fn chart_image(value: Option<ChartValue>, target: &ManifestObject) -> Option<ChartImage> {
    let ManifestObject::DaemonSet(target) = target else { return None };
    Some(ChartImage { value: value?, target: target.clone() })
}

fn repository_path(path: &LocalPath) -> Result<RepositoryPath, String> {
    path.to_string_lossy().parse().map_err(|error: ParseError| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_deadline_of_zero_is_refused() {
        let read = |deadline: &str| {
            let form = json!({
                "strategy": "image", "namespace": "n", "daemonSet": "d", "container": "c", "deadline": deadline,
            });
            serde_json::from_value::<RolloutSpec>(form)
        };
        assert!(read("1s").is_ok());
        assert!(read("0s").unwrap_err().to_string().contains("at once"));
    }

    #[test]
    fn a_resource_is_named_in_the_cluster_and_in_manifests() {
        let read = |more: serde_json::Value| {
            let mut form = json!({"strategy": "file", "path": "gitops"});
            form.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let read: Result<RolloutSpec, _> = serde_json::from_value(form);
            read.map(|spec| spec.resource().unwrap().full_name()).map_err(|error| error.to_string())
        };
        let module = json!({"resource": "Module", "namespace": "kmm", "name": "acme"});
        assert_eq!(read(module.clone()), Ok("kmm/acme".to_owned()));
        assert_eq!(read(json!({"resource": "NVIDIADriver", "name": "gpu"})), Ok("gpu".to_owned()));
        let mut live = module;
        live["strategy"] = "custom-resource".into();
        let live: RolloutSpec = serde_json::from_value(live).unwrap();
        assert_eq!(live.resource().unwrap().full_name(), "kmm/acme");
        let wrong = [
            json!({"resource": "Module", "name": "acme"}),
            json!({"resource": "ClusterPolicy", "name": "p", "namespace": "gpu"}),
            json!({"resource": "ClusterPolicy"}),
            json!({"name": "p"}),
            json!({"resource": "ClusterPolicy", "name": "p", "daemonSet": "d"}),
        ];
        insta::assert_snapshot!(wrong.map(|form| read(form).unwrap_err()).join("\n"), @r"
        a Module has a `namespace`
        a ClusterPolicy has no `namespace`
        strategy `file` needs a `name`
        `name` needs a `resource`
        `resource` excludes `daemonSet`, `container` and `values`
        ");
    }
}
