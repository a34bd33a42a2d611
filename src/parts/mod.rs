//! Adapter: what builds, operations on images and the loop share: definitions, cache, registries, engine, reporter.

mod boot;
mod error;
mod lazy;
mod registries;
mod report;
mod retry;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

pub use boot::{BootCheck, BootChecker, QemuBoot};
pub use error::TargetError;
pub use lazy::{LazyEngine, LazyEntrypoint};
pub use registries::NeedsFrom;
pub(crate) use registries::image_location;
pub use report::{Reporter, Stage};

use self::retry::with_retry;
use crate::{
    cache::Cache,
    cluster::Fence,
    image::Definitions,
    inputs::Fetcher,
    plan::Budget,
    registry::{Keyring, Registry, RegistryLocation},
    signing::ModuleSigner,
};

/// Requests to a registry at a time, where several are independent of each other.
pub(crate) const AT_ONCE: usize = 16;

/// How much may be built at once.
#[derive(Clone, Copy, Debug)]
pub struct BuildLimits {
    /// Builds, whatever they take.
    pub at_once: usize,
    /// What they may take together.
    pub budget: Budget,
}

/// Everything that builds and operations on images work with. A clone shares engine, registry and cache.
#[derive(Clone)]
pub struct Parts {
    /// What is to be built.
    pub definitions: Definitions,
    /// Fetches headers, sources and root file systems.
    pub fetcher: Fetcher,
    /// Header sets, logs, failures.
    pub cache: Cache,
    /// Where images go, as the user named it.
    pub location: RegistryLocation,
    /// The same, connected.
    pub registry: Arc<dyn Registry>,
    /// Where needed images are looked up, when that is not where images go: a build that publishes nothing.
    pub needs_from: Option<NeedsFrom>,
    /// The distribution protocol, for base images of other registries.
    pub remote: Arc<dyn Registry>,
    /// Credentials for the engine when it pulls a toolchain.
    pub credentials: Keyring,
    /// What compiles; connected when the first build needs it, so that a pass with nothing to do
    /// needs no engine.
    pub engine: LazyEngine,
    /// The binary that is put into images that start with it.
    pub entrypoint: LazyEntrypoint,
    /// How much may be built at once.
    pub limits: BuildLimits,
    /// Signs modules, where the site has them signed.
    pub module_signer: Option<Arc<ModuleSigner>>,
    /// Boots kernels for definitions with `check.boot: true`; without one, those fail.
    pub boot_checker: Option<Arc<dyn BootChecker>>,
    /// Receives what happens.
    pub reporter: Arc<dyn Reporter>,
    /// Says whether this process may still write; `None` where no other process could be the writer.
    pub fence: Option<Arc<dyn Fence>>,
    /// Stops the work; nothing half-done is left behind.
    pub cancel: CancellationToken,
}

impl Parts {
    /// Fails where this process may not write (any more). Asked before each write to a registry or cluster.
    pub(crate) fn may_write(&self) -> Result<(), TargetError> {
        match self.fence.as_ref().and_then(|fence| fence.closed()) {
            Some(why) => Err(TargetError::Fenced { why }),
            None => Ok(()),
        }
    }

    /// Runs `action` until it succeeds, fails for good, or the retry policy gives up. Registries retry by themselves.
    pub(crate) async fn retry<T, E, F>(&self, what: &str, action: impl FnMut() -> F) -> Result<T, TargetError>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<TargetError>,
    {
        with_retry(what, &self.cancel, action).await
    }
}
