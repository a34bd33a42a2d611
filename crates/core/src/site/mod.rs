//! Pure: the site (`site.yaml` in the definitions directory): which hosts may be asked and how, who signs, what must
//! be signed.

mod builds;
mod commits;
mod host;
mod kernel_limits;
mod mirrors;
mod network;
mod policy;
mod secret;
mod signing;
mod storage;

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use builds::{Builds, PodAdditions};
pub use commits::GitCommits;
pub use host::{HostPolicy, HostPort, NoProxy, ProxyUrl};
pub use kernel_limits::KernelLimits;
pub use mirrors::{Images, MirrorRule, Prefix, image_candidates, url_candidates};
pub use network::{Credentials, Host, Login, Proxy};
pub use policy::{Policy, RequireSigned, Signatures};
pub use secret::{SecretKey, SecretName, SecretSource};
pub use signing::{Existing, ImageSigning, KeySource, ModuleSigning, Signed};
pub use storage::Storage;

use crate::definition::{ApiVersion, Metadata};
pub use crate::definition::{NotA, without_logins};

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

impl SiteSpec {
    /// Files that hold secrets, as the definition names them; they never leave the machine.
    pub fn secret_files(&self) -> Vec<PathBuf> {
        let Self {
            mirrors: _,
            proxy,
            hosts,
            credentials,
            module_signing,
            image_signing,
            policy: _,
            kernel_limits: _,
            storage: _,
            builds: _,
            git,
        } = self;
        let mut sources: Vec<&SecretSource> =
            hosts.iter().flat_map(|host| [&host.client_key, &host.ssh_key]).flatten().collect();
        sources.extend(git.iter().filter_map(|git| git.signing_key.as_ref()));
        let logins = hosts.iter().map(|host| &host.login).chain(proxy.iter().map(|proxy| &proxy.login));
        sources.extend(logins.flatten().map(|login| &login.password));
        let mut files = Vec::new();
        for credentials in credentials {
            match credentials {
                Credentials::DockerConfig(path) => files.push(path.to_path_buf()),
                Credentials::Basic { registry: _, user: _, password } => sources.push(password),
                Credentials::PullSecret(_) => {}
            }
        }
        let keys = [
            module_signing.as_ref().map(|signing| (&signing.key, &signing.passphrase)),
            image_signing.as_ref().map(|signing| (&signing.key, &signing.passphrase)),
        ];
        for (key, passphrase) in keys.into_iter().flatten() {
            if let KeySource::File(path) = key {
                files.push(path.to_path_buf());
            }
            sources.extend(passphrase);
        }
        files.extend(sources.into_iter().filter_map(|source| match source {
            SecretSource::File(path) => Some(path.to_path_buf()),
            SecretSource::Secret(_) => None,
        }));
        files
    }
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
    /// How many kernels nodes may bring.
    #[serde(default, skip_serializing_if = "KernelLimits::is_default")]
    pub kernel_limits: KernelLimits,
    /// How much is kept on a disk.
    #[serde(default, skip_serializing_if = "Storage::is_default")]
    pub storage: Storage,
    /// How builds run in a cluster.
    #[serde(default, skip_serializing_if = "Builds::is_default")]
    pub builds: Builds,
    /// Who commits to Git repositories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub git: Option<GitCommits>,
}

impl SiteSpec {
    /// What decides how hosts are reached.
    pub fn network(&self) -> (&[MirrorRule], Option<&Proxy>, &[Host], &[Credentials]) {
        let Self {
            mirrors,
            proxy,
            hosts,
            credentials,
            module_signing: _,
            image_signing: _,
            policy: _,
            kernel_limits: _,
            storage: _,
            builds: _,
            git: _,
        } = self;
        (mirrors, proxy.as_ref(), hosts, credentials)
    }
}
