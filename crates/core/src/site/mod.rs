//! Site settings (`site.yaml` in the definitions directory): network access, mirrors, credentials, signing, signature policy and
//! limits.

mod builds;
mod host;
mod ignore_nodes;
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
pub use ignore_nodes::{IgnoreNodes, IgnoredTaint, TaintEffect, ignore_nodes};
pub use mirrors::{ImagePrefix, MirrorRule, Prefix, image_candidates, url_candidates};
pub use network::{Credentials, Host, Login, Proxy};
pub use policy::{Policy, RequireSigned, Signatures, SiteCheck, UnprovenPolicy};
pub use secret::{SecretKey, SecretName, SecretSource};
pub use signing::{ExistingImages, ImageSigning, KeySource, ModuleSigning, RevokedKey, Signed};

use crate::definition::{ApiVersion, Memory, Metadata, Period, checked::OneLine, is_default};
pub use crate::definition::{ParseError, without_logins};

/// `site.yaml`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Site {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `Site`.
    pub kind: SiteKind,
    /// The site's name, for display.
    pub metadata: Metadata,
    /// The specification.
    #[serde(default)]
    pub spec: SiteSpec,
}

/// The only valid value of a site's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SiteKind {
    /// `Site`.
    Site,
}

impl SiteSpec {
    /// Files that contain secrets, as named in the definition. They never leave the machine.
    pub fn secret_files(&self) -> Vec<PathBuf> {
        let Self {
            mirrors: _,
            proxy,
            hosts,
            credentials,
            module_signing,
            image_signing,
            revoked: _,
            policy: _,
            check: _,
            kernel_limits: _,
            ignore_nodes: _,
            startup_taint: _,
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

/// Settings for all images, kernels and commands of one site.
#[serde_with::apply(Vec => #[serde(default, skip_serializing_if = "Vec::is_empty")])]
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SiteSpec {
    /// Alternative locations for images and files. The longest matching prefix applies.
    pub mirrors: Vec<MirrorRule>,
    /// The proxy for hosts that are not reached directly. Default: the environment's settings.
    pub proxy: Option<Proxy>,
    /// Settings for single hosts. With `--offline`, farrier may access only these hosts, the mirrors, and the registry and
    /// cluster of the command line.
    pub hosts: Vec<Host>,
    /// Additional credentials, in order of precedence. Docker's own file comes last.
    pub credentials: Vec<Credentials>,
    /// Signs modules, for kernels that load signed modules only.
    pub module_signing: Option<ModuleSigning>,
    /// Signs published images.
    pub image_signing: Option<ImageSigning>,
    /// Revoked keys for images, whose signatures farrier ignores.
    pub revoked: Vec<RevokedKey>,
    /// Requirements for images before a rollout.
    #[serde(default, skip_serializing_if = "is_default")]
    pub policy: Policy,
    /// Requirements of the load check, for all images.
    #[serde(default, skip_serializing_if = "is_default")]
    pub check: SiteCheck,
    /// Limits on the kernels that nodes report.
    #[serde(default, skip_serializing_if = "is_default")]
    pub kernel_limits: KernelLimits,
    /// Nodes that farrier ignores: those that match one of these rules.
    pub ignore_nodes: Vec<IgnoreNodes>,
    /// Removes the taint `farrier.dev/driver-not-ready` from a node once all drivers of the node are loaded.
    #[serde(default, skip_serializing_if = "is_default")]
    pub startup_taint: bool,
    /// Limits on disk usage.
    #[serde(default, skip_serializing_if = "is_default")]
    pub storage: Storage,
    /// Settings for builds in a cluster.
    #[serde(default, skip_serializing_if = "is_default")]
    pub builds: Builds,
    /// Author and signing key of commits to Git repositories.
    pub git: Option<GitCommits>,
}

impl SiteSpec {
    /// Returns the settings for network access to hosts.
    pub fn network(&self) -> (&[MirrorRule], Option<&Proxy>, &[Host], &[Credentials]) {
        (&self.mirrors, self.proxy.as_ref(), &self.hosts, &self.credentials)
    }
}

/// Author and signing key of commits, for the repositories of `git` rollouts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GitCommits {
    /// Name of author and committer.
    pub name: OneLine,
    /// Email address of author and committer.
    pub email: OneLine,
    /// The private key that signs commits, in OpenSSH's format and without a passphrase. Default: commits are not signed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signing_key: Option<SecretSource>,
}

/// Limits on the disk space that farrier uses. The least recently used content is evicted first. Content used by a running build
/// is never evicted, even above the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Storage {
    /// Header sets, sources, packages, root file systems and blobs in the cache directory. Work directories of running builds are
    /// not counted.
    pub cache: Memory,
    /// Build logs in the cache directory.
    pub logs: Memory,
    /// Toolchain images that farrier created in a Docker or Podman daemon, with or without headers.
    pub engine_images: Memory,
}

impl Default for Storage {
    fn default() -> Self {
        let gibibytes = |number: u64| Memory::from_bytes(number << 30);
        // The pod's cache in `deploy/` has 20 GiB; a third of it is reserved for running builds.
        Self { cache: gibibytes(12), logs: gibibytes(1), engine_images: gibibytes(30) }
    }
}

/// Limits on the kernels that nodes report. Each node reports its own kernel, and each kernel costs builds, images and a layer in
/// union images. farrier skips a node above the limits, which are higher than any real fleet needs. Other nodes are not affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KernelLimits {
    /// Kernels that one node may run or announce within `within`. Above that limit, a kernel of the node counts only if other
    /// nodes run it, too. The limit applies until the excess kernels are older than `within`.
    pub per_node: NonZeroU32,
    /// Time window of `perNode`, counted from farrier's start. `0s` disables the limit.
    pub within: Period,
    /// Number of different kernels of all nodes together. Kernels of the most nodes take precedence, then the ones seen first.
    pub distinct: NonZeroU32,
}

impl Default for KernelLimits {
    fn default() -> Self {
        let number = |number| NonZeroU32::new(number).unwrap_or(NonZeroU32::MIN);
        // `distinct` is the number of kernels that fit into the layers of a union image.
        Self { per_node: number(16), within: Period::seconds(24 * 3600), distinct: number(100) }
    }
}
