//! Pure: the site (`site.yaml` in the definitions directory): which hosts may be asked and how, who signs, what must
//! be signed.

mod network;
mod policy;
mod secret;
mod signing;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use network::{Credentials, Host, MirrorRule, Proxy};
pub use policy::Policy;
pub use secret::{SecretKey, SecretName, SecretSource};
pub use signing::{Existing, ImageSigning, KeySource, ModuleSigning, Signed};

use crate::image::{ApiVersion, Metadata};

/// `site.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Site {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `Site`.
    pub kind: SiteKind,
    /// The site's name, for people.
    pub metadata: Metadata,
    /// What it says.
    #[serde(default)]
    pub spec: SiteSpec,
}

/// The one value of a site's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SiteKind {
    /// `Site`.
    Site,
}

/// What holds for all images, kernels and commands of one site.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SiteSpec {
    /// Where images and files are fetched from instead of where definitions say. The longest prefix that matches counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mirrors: Vec<MirrorRule>,
    /// The proxy for hosts that are not reached directly; without this, what the environment says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Proxy>,
    /// How single hosts are reached. With `--offline` these, the mirrors, the registry and the cluster of the command line
    /// are all that may be asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
    /// Further credentials, in the order in which they are looked through; Docker's own file comes last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub credentials: Vec<Credentials>,
    /// Who signs modules, for kernels that load no others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub module_signing: Option<ModuleSigning>,
    /// Who signs published images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_signing: Option<ImageSigning>,
    /// What must hold before a rollout.
    #[serde(default, skip_serializing_if = "Policy::is_empty")]
    pub policy: Policy,
}
