//! Engine errors, their hints, and their classification by an engine's error message.

use std::{error::Error, io};

use farrier_local::cache::FULL_DISK;

use super::EngineKind;

/// Result of an engine's operation.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No engine responds, or the chosen engine does not. Contains each tried engine with its error.
    #[error("no build engine: {0}")]
    Unavailable(String),
    /// A step of the Dockerfile failed, or the Dockerfile cannot be run: the engine's message, with the step and its exit
    /// code. Permanent.
    #[error("build step failed: {0}")]
    Step(String),
    /// A step exceeded the memory limit: which step, and the limit. Permanent.
    #[error("build step stopped: {0}")]
    MemoryLimit(String),
    /// A step exceeded a limit of files or processes: which step, and which limit. Permanent.
    #[error("build step stopped: {0}")]
    FixedLimit(String),
    /// The pod of a build exceeded its deadline. Permanent.
    #[error("build step stopped: {0}")]
    Deadline(String),
    /// A message arrived that the runner does not send at that point: a step forged it. Permanent.
    #[error("build tampered with: {0}")]
    Tampered(String),
    /// The sandbox or pod lacks confinement that the site requires.
    #[error("build refused: {0}")]
    Unconfined(String),
    /// The engine's disk is full. Permanent until space is freed.
    #[error("{engine} has no space left to {action}: {message}")]
    DiskFull { engine: EngineKind, action: String, message: String },
    /// The registry lacks the image or denies access to it. Permanent.
    #[error("{engine} cannot pull {reference}: {message}")]
    Pull { engine: EngineKind, reference: String, message: String },
    /// The engine itself failed or disconnected. Transient.
    #[error("{engine} failed to {action}")]
    Engine { engine: EngineKind, action: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// The pod of a build ended without a result, or cannot be created: the cluster's message, a remedy, and whether a retry
    /// may succeed.
    #[error("{message}")]
    Pod { message: String, hint: String, is_transient: bool },
    #[error("payload refused")]
    Payload(#[from] farrier_local::archive::UnpackError),
    /// An I/O error on this machine.
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("build canceled")]
    Canceled,
}

impl EngineError {
    /// Whether a retry of the same call may soon succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Engine { .. } | Self::Pod { is_transient: true, .. })
    }

    /// Whether a signal killed a step, most likely because the machine ran out of memory.
    pub fn is_killed(&self) -> bool {
        // 128 and the number of SIGKILL.
        matches!(self, Self::Step(message) if message.ends_with("exit code 137"))
    }

    /// Returns a remedy, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unavailable(tried) if tried.contains("ermission denied") => Some(
                "run farrier as root or as a member of the group that owns the socket, or choose another engine with --engine"
                    .to_owned(),
            ),
            Self::Unavailable(_) => Some(
                "enable what the sandbox lacks, or start the Docker daemon (`systemctl start docker`) or Podman's socket; \
                 --engine chooses one of them"
                    .to_owned(),
            ),
            Self::Step(_) if self.is_killed() => {
                Some("the step was killed: most likely the machine ran out of memory".to_owned())
            }
            Self::DiskFull { engine: EngineKind::Docker, .. } => {
                Some("free space in Docker's data directory: `docker system df` shows its usage".to_owned())
            }
            Self::DiskFull { .. } => Some(FULL_DISK.to_owned()),
            Self::Pod { hint, .. } => Some(hint.clone()),
            Self::Tampered(_) => Some(
                "a step of this build forged messages of the runner: treat the driver's source as hostile, and keep the log"
                    .to_owned(),
            ),
            Self::Unconfined(_) => Some(
                "build on a newer kernel, or lower builds.landlock in site.yaml".to_owned(),
            ),
            Self::MemoryLimit(_) => {
                Some("raise build.memory in the definition if the build needs more".to_owned())
            }
            Self::FixedLimit(_) => Some("use less in the build: this limit is fixed".to_owned()),
            Self::Deadline(_) => {
                Some("raise build.deadline in the definition if the build needs more time".to_owned())
            }
            Self::Pull { .. } => Some("check the image's name and the registry's credentials".to_owned()),
            Self::Engine { engine: EngineKind::Docker, .. } => {
                Some("see the engine's own log; farrier retries automatically".to_owned())
            }
            Self::Engine { engine: EngineKind::Kubernetes, .. } => Some("farrier retries automatically".to_owned()),
            Self::Engine { engine: EngineKind::Sandbox, .. } => {
                Some("farrier retries automatically; if the build fails again, choose another engine with --engine".to_owned())
            }
            Self::Step(_) | Self::Payload(_) | Self::Io(_) | Self::Canceled => None,
        }
    }

    /// Error for a `modules` stage that ran but left no directory `/out`.
    pub(super) fn no_out() -> Self {
        Self::Step("the modules stage created no /out".to_owned())
    }

    pub(super) fn engine(
        engine: EngineKind,
        action: impl Into<String>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Engine { engine, action: action.into(), source: source.into() }
    }

    /// Classifies a failed build by the engine's message: if the message ends in the system's text for `ENOSPC`, the
    /// engine's disk is full, otherwise a step failed. Ignores the step's output and its text.
    pub(super) fn from_build(engine: EngineKind, step: Option<&str>, message: String) -> Self {
        let is_full = is_disk_full(&message);
        let message = match step {
            Some(step) => format!("{step}: {message}"),
            None => message,
        };
        if is_full {
            Self::DiskFull { engine, action: "build".to_owned(), message }
        } else {
            Self::Step(message)
        }
    }

    /// Classifies a failed pull: a refusal by the registry is permanent, any other error is transient.
    pub(super) fn from_pull(engine: EngineKind, reference: &str, message: String) -> Self {
        const REFUSALS: [&str; 8] = [
            "denied",
            "unauthorized",
            "not found",
            "manifest unknown",
            "name unknown",
            "invalid reference",
            "no matching manifest",
            "authentication required",
        ];
        let lower = message.to_lowercase();
        if is_disk_full(&message) {
            Self::DiskFull { engine, action: format!("pull {reference}"), message }
        } else if REFUSALS.iter().any(|words| lower.contains(words)) {
            Self::Pull { engine, reference: reference.to_owned(), message }
        } else {
            Self::engine(engine, format!("pull {reference}"), message)
        }
    }
}

/// Whether an engine's message ends in the system's text for `ENOSPC`, as it does if a full disk is the cause. The same text
/// elsewhere in the message is untrusted, because it may come from a build step.
pub(super) fn is_disk_full(message: &str) -> bool {
    let message = message.trim_end_matches(|c: char| c.is_whitespace() || "\"'.)}".contains(c));
    [": no space left on device", ": disk quota exceeded"].iter().any(|end| message.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_engine_faults_are_transient() {
        assert!(EngineError::engine(EngineKind::Docker, "build", "connection reset").is_transient());
        assert!(!EngineError::no_out().is_transient());
        assert!(!EngineError::Canceled.is_transient());
    }

    #[test]
    fn a_full_disk_is_told_from_a_failed_step() {
        let sorted = |step, words: &str| EngineError::from_build(EngineKind::Docker, step, words.to_owned());
        let full = sorted(None, "write /x: no space left on device");
        assert!(matches!(full, EngineError::DiskFull { .. }));
        assert!(full.hint().is_some_and(|hint| hint.contains("free space")));
        assert!(matches!(sorted(None, "unknown instruction: FRMO"), EngineError::Step(_)));
        let step = "RUN echo : no space left on device";
        assert!(matches!(sorted(Some(step), "OCI runtime create failed"), EngineError::Step(_)));
        assert!(matches!(
            sorted(None, "cannot run `x: no space left on device` in it"),
            EngineError::Step(_)
        ));
    }

    #[test]
    fn a_killed_step_hints_at_memory() {
        let step = EngineError::Step("RUN make: exit code 137".into());
        assert!(step.hint().is_some_and(|hint| hint.contains("memory")));
        assert!(!EngineError::Step("RUN echo exit code 137: exit code 2".into()).is_killed());
    }

    #[test]
    fn refused_pulls_are_permanent_and_broken_ones_are_not() {
        let sort = |words: &str| EngineError::from_pull(EngineKind::Docker, "r/x:1", words.to_owned());
        assert!(matches!(sort("pull access denied for x"), EngineError::Pull { .. }));
        assert!(matches!(sort("manifest unknown"), EngineError::Pull { .. }));
        assert!(sort("dial tcp: connection refused").is_transient());
    }

    #[test]
    fn unavailable_says_what_to_do() {
        let denied = EngineError::Unavailable("docker: Permission denied (os error 13)".into());
        assert!(denied.hint().is_some_and(|hint| hint.contains("group")));
        let absent = EngineError::Unavailable("docker: no socket".into());
        assert!(absent.hint().is_some_and(|hint| hint.contains("--engine")));
    }
}
