//! Adapter: the pass: observe, plan, build, check, assemble, publish, roll out, report.
//!
//! Decisions are made in [`crate::plan`]; here they are carried out.

mod bases;
mod boot;
mod broken_chains;
mod build;
mod carry;
mod check;
mod check_report;
mod contents;
mod copies;
mod documents;
mod entrypoint;
mod error;
mod failures;
mod gc;
mod host_trees;
mod kernel_record;
pub mod live;
mod mark;
mod needs;
mod observe;
mod pass;
mod pass_report;
mod proof;
mod provenance;
mod publish;
mod report;
mod resign;
mod retry;
mod reuse;
mod root_fs;
mod side_by_side;
mod signatures;
mod signing;
mod single;
#[cfg(test)]
mod testing;
mod text;
mod tracked;
mod union;
mod verify;

use std::sync::Arc;

use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

pub use boot::QemuBoot;
pub use build::{BuildOptions, Built};
pub use carry::{Carried, CarryReport, Carrying, Lacking};
pub use check::{BootCheck, BootChecker};
pub use check_report::StoredReport;
pub use entrypoint::LazyEntrypoint;
pub use error::{PassError, TargetError};
pub use failures::Failures;
pub use gc::{GcError, GcImage, GcOptions, GcReport, GcState, Leftover, StoredKind};
pub use kernel_record::REPOSITORY as KERNEL_RECORD;
pub use observe::Memory;
pub use pass::Planned;
pub use pass_report::{PassReport, RolloutReport, TargetReport};
pub use report::{Reporter, Stage};
pub use retry::chain;
pub use side_by_side::BuildLimits;
pub use single::BuildOutcome;
pub use verify::{CheckResult, VerifyCheck, VerifyReport};

use crate::{
    cache::Cache,
    cluster::Fence,
    engine::{self, Engine, EngineChoice, EngineEnv, EngineError},
    headers::Fetcher,
    image::Definitions,
    registry::{Keyring, Registry, RegistryLocation},
    signing::ModuleSigner,
};

/// Everything that a pass works with. A clone shares engine, registry and cache.
#[derive(Clone)]
pub struct Controller {
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
    /// The distribution protocol, for base images that stand elsewhere.
    pub remote: Arc<dyn Registry>,
    /// What the engine is given when it pulls a toolchain.
    pub credentials: Keyring,
    /// What compiles; connected when the first build needs it, so that a pass with nothing to do
    /// needs no engine.
    pub engine: LazyEngine,
    /// What is put into images that start with it.
    pub entrypoint: LazyEntrypoint,
    /// How much may be built at once.
    pub limits: BuildLimits,
    /// Who signs modules, where somebody does.
    pub module_signer: Option<Arc<ModuleSigner>>,
    /// Boots kernels for definitions with `check.boot: true`; without one, those fail.
    pub boot_checker: Option<Arc<dyn BootChecker>>,
    /// Hears what happens.
    pub reporter: Arc<dyn Reporter>,
    /// Says whether this process may still write; `None` where nobody else could be the writer.
    pub fence: Option<Arc<dyn Fence>>,
    /// Stops the pass; nothing half-done is left behind.
    pub cancel: CancellationToken,
}

impl Controller {
    /// Fails where this process may not write (any more). Asked before each write to a registry or cluster.
    pub(crate) fn may_write(&self) -> Result<(), TargetError> {
        match self.fence.as_ref().and_then(|fence| fence.closed()) {
            Some(why) => Err(TargetError::Fenced { why }),
            None => Ok(()),
        }
    }
}

/// A registry that is only read.
#[derive(Clone)]
pub struct NeedsFrom {
    /// As the user named it.
    pub location: RegistryLocation,
    /// The same, connected.
    pub registry: Arc<dyn Registry>,
}

/// An engine that is connected at its first use, and once for all clones.
#[derive(Clone)]
pub struct LazyEngine {
    choice: EngineChoice,
    env: EngineEnv,
    engine: Arc<OnceCell<Arc<dyn Engine>>>,
}

impl LazyEngine {
    /// Remembers the choice.
    pub fn new(choice: EngineChoice, env: EngineEnv) -> Self {
        Self { choice, env, engine: Arc::default() }
    }

    /// The engine, connected now if it was not.
    pub async fn get(&self) -> Result<Arc<dyn Engine>, EngineError> {
        self.engine.get_or_try_init(|| engine::connect(self.choice, &self.env)).await.cloned()
    }
}
