//! Errors of building, checking, publishing and rolling out an image.

use std::io;

use farrier_cluster::ClusterError;
use farrier_core::{
    image::{Definitions, ImageName, ReferenceError},
    plan::{NeedReason, SkipReason},
    provenance::KeyError,
};
use farrier_engines::EngineError;
use farrier_inputs::FetchError;
use farrier_local::cache::{CacheError, is_full_disk};
use farrier_payload::PayloadError;
use farrier_signing::SigningError;
use farrier_store::{
    StoreError,
    registry::{self, RegistryError, root_cause},
};

use super::boot::BootCheckError;
use oci::{ImageError, error_chain};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProblemKind {
    /// The driver does not compile against this kernel, or the toolchain lacks the kernel's compiler or a tool.
    Compile,
    /// The build exceeded its deadline.
    TooLong,
    /// The build exceeded its memory or another limit.
    OverLimit,
    /// The machine killed a process of the build, most likely for lack of memory.
    Killed,
    /// A build step forged runner messages.
    Tampered,
    /// The kernel would refuse the modules.
    Refused,
    /// The verdict of the check is `unknown`, which the definition denies.
    Unknown,
    /// In the boot check the kernel did not load the modules.
    BootRefused,
    /// The command or a definition is wrong.
    Usage,
    /// A registry, an image, a tree or a kernel does not meet a requirement.
    Unmet,
}

/// A problem with the command, the image, its definition or its inputs, as opposed to a failure of an external system.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BuildProblem {
    pub kind: ProblemKind,
    pub message: String,
    /// Details to show below the message, such as a report or the end of a log.
    pub detail: Vec<String>,
    pub hint: Option<String>,
}

/// Result of work on one image.
pub type Result<T, E = BuildError> = std::result::Result<T, E>;

/// Reason why an image was not built or published for a kernel.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// A problem with the command, the image, its definition or its inputs.
    #[error(transparent)]
    Problem(#[from] BuildProblem),
    /// The subject (`<image> for <target>`) has nothing to build, with the reason.
    #[error("{0}: {1}")]
    Skipped(String, SkipReason),
    /// An external system did not respond, so it is unknown whether the subject can be built.
    #[error("{0}: {1}")]
    Unresolved(String, SkipReason),
    /// A needed image cannot be built.
    #[error("{image} is compiled against {need}, which cannot be built: {}", error_chain(error.as_ref()))]
    Need {
        /// The requested image.
        image: String,
        /// The image that it needs.
        need: String,
        /// The reason why the needed image cannot be built.
        error: Box<BuildError>,
    },
    /// Nodes or rollout targets cannot be read or written.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A boot check has no result.
    #[error(transparent)]
    Boot(#[from] BootCheckError),
    /// A reference in a definition is invalid.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// An input cannot be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    Engine(EngineError),
    #[error(transparent)]
    Registry(RegistryError),
    /// The payload, its layer or the entrypoint binary is unusable.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The image is invalid or cannot be assembled.
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The key that signs modules or images cannot be used.
    #[error(transparent)]
    Signing(#[from] SigningError),
    /// A file of a definition or of the cache cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An input changed after the build was planned.
    #[error("{0} changed after the build was planned")]
    Outdated(String),
    /// The fence is closed, because another replica may be the writer by now. Holds the reason.
    #[error("not written: {0}")]
    Fenced(String),
    /// Canceled by Ctrl-C or SIGTERM.
    #[error("interrupted")]
    Canceled,
}

impl From<RegistryError> for BuildError {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Canceled => Self::Canceled,
            RegistryError::Image(error) => Self::Image(error),
            error => Self::Registry(error),
        }
    }
}

impl From<EngineError> for BuildError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Canceled => Self::Canceled,
            error => Self::Engine(error),
        }
    }
}

impl BuildError {
    /// Creates an error of this kind, with a hint.
    pub fn problem(kind: ProblemKind, message: String, hint: Option<String>) -> Self {
        BuildProblem { kind, message, detail: Vec::new(), hint }.into()
    }

    /// Creates an error about an unmet requirement, with a hint.
    pub fn unmet(message: String, hint: &str) -> Self {
        Self::problem(ProblemKind::Unmet, message, Some(hint.to_owned()))
    }

    /// Creates an error about a wrong command, configuration or definition, with a hint.
    pub fn usage(message: String, hint: &str) -> Self {
        Self::problem(ProblemKind::Usage, message, Some(hint.to_owned()))
    }

    /// Error for an image that does not exist.
    pub(crate) fn no_such_image(reference: impl std::fmt::Display) -> Self {
        Self::problem(ProblemKind::Unmet, format!("image {reference} does not exist"), None)
    }

    /// Error for a cell whose image or family is no longer defined.
    pub fn definition_gone(subject: &str) -> Self {
        Self::problem(ProblemKind::Unmet, format!("{subject}: its definition no longer exists"), None)
    }

    /// Error for a kernel whose headers are in no suite and no directory.
    pub fn headers_missing(looked_for: &str, hint: String) -> Self {
        Self::problem(ProblemKind::Unmet, format!("no headers for this kernel: {looked_for}"), Some(hint))
    }

    /// Error for an unusable public key for image signatures, from a file or a field of the site's definition.
    pub(crate) fn image_key(from: &str, source: KeyError) -> Self {
        let message = format!("the public key of {from} cannot be used: {}", error_chain(&source));
        Self::usage(message, source.hint())
    }

    /// Error for a tag that another publisher moved to other content during the build.
    pub(crate) fn tag_conflict(tag: &farrier_core::image::ImageReference) -> Self {
        let message =
            format!("tag {tag} was published by another farrier during this build, with other inputs");
        Self::unmet(message, "look at the other publisher's definitions, then run again")
    }

    /// Error for a name that matches no driver image.
    pub fn no_image(name: impl std::fmt::Display, definitions: &Definitions) -> Self {
        let known: Vec<&str> = definitions.images.keys().map(ImageName::as_str).collect();
        let message = format!("no driver image is named {name}; known: {}", known.join(", "));
        let is_built_in = definitions.root.as_os_str().is_empty();
        let hint = "only the built-in images are known: name your definitions directory with --definitions, FARRIER_DEFINITIONS or farrier.yaml";
        Self::problem(ProblemKind::Usage, message, is_built_in.then(|| hint.to_owned()))
    }

    /// Whether an external system had a fault that may pass within seconds, so that a retry is worthwhile.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Fetch(error) => error.is_transient(),
            Self::Engine(error) => error.is_transient(),
            Self::Registry(error) => error.is_transient(),
            Self::Need { error, .. } => error.is_transient(),
            _ => false,
        }
    }

    /// Returns the host and the cause of a transient fault, if they are known.
    pub(super) fn fault(&self) -> Option<(&str, String)> {
        match self {
            Self::Registry(error) | Self::Fetch(FetchError::Store(StoreError::Registry(error))) => {
                error.fault()
            }
            Self::Fetch(FetchError::Transfer(url, error)) => {
                Some((url.split('/').nth(2)?, root_cause(error.as_ref())))
            }
            _ => None,
        }
    }

    /// Whether the same inputs would fail again, so that a retry is useless until an input changes.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Problem(BuildProblem {
                kind:
                    ProblemKind::Compile | ProblemKind::OverLimit | ProblemKind::Tampered | ProblemKind::Refused,
                ..
            }) => true,
            Self::Payload(error) => error.is_permanent(),
            Self::Boot(error) => error.is_permanent,
            _ => self.is_caused_by_policy() || self.is_caused_by_deadline(),
        }
    }

    /// Whether the definition's check policy caused the failure. With a laxer policy the same inputs may succeed.
    pub(crate) fn is_caused_by_policy(&self) -> bool {
        matches!(
            self,
            Self::Problem(BuildProblem { kind: ProblemKind::Unknown | ProblemKind::BootRefused, .. })
        )
    }

    /// Whether a resource limit stopped the build. With more memory in the definition the same inputs may succeed.
    pub(crate) fn is_caused_by_limit(&self) -> bool {
        matches!(self, Self::Problem(BuildProblem { kind: ProblemKind::OverLimit, .. }))
    }

    /// Whether the definition's deadline caused the failure. With more time the same inputs may succeed.
    pub fn is_caused_by_deadline(&self) -> bool {
        match self {
            Self::Problem(problem) => problem.kind == ProblemKind::TooLong,
            Self::Payload(error) => error.is_caused_by_deadline(),
            Self::Boot(error) => error.is_caused_by_deadline,
            _ => false,
        }
    }

    /// Whether an external system was unreachable.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_unreachable(),
            Self::Engine(EngineError::Unavailable(_)) | Self::Unresolved(..) => true,
            Self::Fetch(error) => error.is_transient(),
            Self::Cluster(error) => error.is_unreachable(),
            Self::Need { error, .. } => error.is_unreachable(),
            _ => false,
        }
    }

    /// Whether an external system gave no answer, so that a plan is incomplete: it was unreachable, or refused the request.
    pub(crate) fn is_unanswered(&self) -> bool {
        match self {
            Self::Registry(RegistryError::Denied { .. } | RegistryError::TokenServer { .. }) => true,
            Self::Fetch(error) if error.is_refusal() => true,
            Self::Need { error, .. } => error.is_unanswered(),
            error => error.is_unreachable(),
        }
    }

    /// Returns details to show below the message, such as a report or the end of a log.
    pub fn detail(&self) -> Vec<String> {
        match self {
            Self::Problem(problem) => problem.detail.clone(),
            Self::Need { error, .. } => error.detail(),
            _ => Vec::new(),
        }
    }

    /// Whether the command or a definition is wrong, as opposed to an external system.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Need { error, .. } => error.is_usage(),
            Self::Problem(problem) => problem.kind == ProblemKind::Usage,
            Self::Cluster(error) => !error.is_unreachable(),
            Self::Reference(_) | Self::Skipped(..) | Self::Signing(_) => true,
            _ => false,
        }
    }

    /// Returns a hint for the user.
    pub fn hint(&self) -> Option<String> {
        self.own_hint().or_else(|| {
            (!self.contains_step_output() && is_full_disk(self))
                .then(|| "the disk is full: free some space; no incomplete files were left".to_owned())
        })
    }

    /// Whether the message holds text that a build step controls.
    fn contains_step_output(&self) -> bool {
        matches!(
            self,
            Self::Problem(_)
                | Self::Engine(
                    EngineError::Step(_) | EngineError::MemoryLimit(_) | EngineError::FixedLimit(_)
                )
        )
    }

    fn own_hint(&self) -> Option<String> {
        match self {
            Self::Problem(problem) => problem.hint.clone(),
            Self::Skipped(_, SkipReason::Need { need, why: NeedReason::NotPublished { .. } }) => {
                Some(format!(
                    "build {need} with --push first, or pass --push: farrier then builds the needed images first"
                ))
            }
            Self::Cluster(error) => error.hint(),
            Self::Boot(error) => Some(error.hint.clone()),
            Self::Signing(error) => error.hint(),
            Self::Fetch(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Registry(error) => registry::hint(error),
            Self::Payload(error) => error.hint(),
            Self::Need { error, .. } => error.hint(),
            Self::Outdated(_) => Some(
                "run again to plan with the current inputs; a running controller does so automatically"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_recognized_through_wrapping_errors() {
        for error in [
            BuildError::Io(io::Error::from_raw_os_error(28)),
            BuildError::Payload(PayloadError::Io(io::Error::from_raw_os_error(28))),
            BuildError::Cache(CacheError(io::Error::from_raw_os_error(122))),
            BuildError::Fetch(FetchError::Store(StoreError::Pack(io::Error::from_raw_os_error(28)))),
        ] {
            assert!(error.hint().is_some_and(|hint| hint.contains("the disk is full")), "{error:?}");
        }
        assert_eq!(BuildError::Io(io::Error::from_raw_os_error(13)).hint(), None);
        let step = EngineError::Step("RUN echo No space left on device: exit code 1".to_owned());
        assert_eq!(BuildError::Engine(step).hint(), None);
    }
}
