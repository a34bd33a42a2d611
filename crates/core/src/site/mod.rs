//! Pure: the site (`site.yaml` in the definitions directory): which hosts may be asked and how, who signs, what must
//! be signed.

mod builds;
mod host;
mod mirrors;
mod network;
mod policy;
mod secret;
mod signing;

use std::{num::NonZeroU32, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use builds::{Builds, PodAdditions};
pub use host::{HostPolicy, HostPort, NoProxy, ProxyUrl};
pub use mirrors::{Images, MirrorRule, Prefix, image_candidates, url_candidates};
pub use network::{Credentials, Host, Login, Proxy};
pub use policy::{Policy, RequireSigned, Signatures};
pub use secret::{SecretKey, SecretName, SecretSource};
pub use signing::{Existing, ImageSigning, KeySource, ModuleSigning, Signed};

use crate::definition::{ApiVersion, Memory, Metadata, Period, checked::OneLine, is_default};
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
#[serde_with::apply(Vec => #[serde(default, skip_serializing_if = "Vec::is_empty")])]
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SiteSpec {
    /// Where images and files are fetched from instead of where definitions say. The longest prefix that matches counts.
    pub mirrors: Vec<MirrorRule>,
    /// The proxy for hosts that are not reached directly; without this, what the environment says.
    pub proxy: Option<Proxy>,
    /// How single hosts are reached. With `--offline` these, the mirrors, the registry and the cluster of the command line
    /// are all that may be asked.
    pub hosts: Vec<Host>,
    /// Further credentials, in the order in which they are looked through; Docker's own file comes last.
    pub credentials: Vec<Credentials>,
    /// Who signs modules, for kernels that load no others.
    pub module_signing: Option<ModuleSigning>,
    /// Who signs published images.
    pub image_signing: Option<ImageSigning>,
    /// What must hold before a rollout.
    #[serde(default, skip_serializing_if = "Policy::is_empty")]
    pub policy: Policy,
    /// How many kernels nodes may bring.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kernel_limits: KernelLimits,
    /// How much is kept on a disk.
    #[serde(default, skip_serializing_if = "is_default")]
    pub storage: Storage,
    /// How builds run in a cluster.
    #[serde(default, skip_serializing_if = "is_default")]
    pub builds: Builds,
    /// Who commits to Git repositories.
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

/// Who commits, in the repositories of `git` rollouts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitCommits {
    /// The name of author and committer.
    pub name: OneLine,
    /// Their email address.
    pub email: OneLine,
    /// The private key, in OpenSSH's form and without a passphrase, that signs commits; without it they are not signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signing_key: Option<SecretSource>,
}

/// How much farrier keeps on a disk. What was not used for longest goes first; what a running build uses never goes, also
/// where that is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Storage {
    /// Header sets, sources, packages, root file systems and blobs in the cache directory. The work of running builds comes
    /// on top of it.
    pub cache: Memory,
    /// Logs of builds in the cache directory.
    pub logs: Memory,
    /// Toolchains, and toolchains with headers, that farrier made in a Docker or Podman daemon.
    pub engine_images: Memory,
}

impl Default for Storage {
    fn default() -> Self {
        let gibibytes = |number: u64| Memory::from_bytes(number << 30);
        // Of the 20 GiB that the pod's cache has in `deploy/`, a third is left for running builds.
        Self { cache: gibibytes(12), logs: gibibytes(1), engine_images: gibibytes(30) }
    }
}

/// How many kernels nodes may bring. A node says itself which kernel it runs, and each kernel costs builds, images and a
/// place in the fleet's images. More than any real fleet has is not taken up: such a node is left alone, and holds no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KernelLimits {
    /// Kernels that one node may run or announce within `within`. One that names more is not believed until they are
    /// older: only kernels that other nodes run too count of it.
    pub per_node: NonZeroU32,
    /// See `perNode`. It is counted from farrier's start; `0s` takes the limit away.
    pub within: Period,
    /// Kernels that all nodes may run together. Those that the most nodes run count, then those that came first.
    pub distinct: NonZeroU32,
}

impl Default for KernelLimits {
    fn default() -> Self {
        let number = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        // As many as a union image has layers for.
        Self { per_node: number(16), within: Period::seconds(24 * 3600), distinct: number(100) }
    }
}
