//! Adapter: why an image was not built, checked, published or changed.

use std::io;

use crate::{
    boot::BootError,
    cache::{CacheError, is_full_disk},
    cluster::ClusterError,
    engine::EngineError,
    error_chain,
    image::ReferenceError,
    inputs::FetchError,
    oci::ImageError,
    payload::PayloadError,
    plan::{NeedReason, SkipReason},
    provenance::KeyError,
    registry::{self, RegistryError},
    signing::SigningError,
};

/// What kind of finding ended the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindingKind {
    /// The driver does not compile against this kernel, or the toolchain lacks the kernel's compiler or a tool.
    Compile,
    /// It did not compile within its deadline.
    TooLong,
    /// A build step forged messages of the runner.
    Tampered,
    /// The kernel would refuse the modules.
    Refused,
    /// It is not known whether the modules load, and the definition does not accept that.
    Unknown,
    /// The kernel, booted, did not load the modules.
    BootRefused,
    /// The command or a definition is wrong.
    Usage,
    /// A registry, an image, a tree or a kernel is not as the work needs it.
    Unmet,
}

/// What is wrong with what was asked for, rather than with a system that the work needs.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Finding {
    /// Which kind.
    pub kind: FindingKind,
    /// What is wrong.
    pub message: String,
    /// What people want to see below the message: a report, the end of a log.
    pub detail: Vec<String>,
    /// What to do.
    pub hint: Option<String>,
}

/// What work on one image comes to.
pub type Result<T, E = TargetError> = std::result::Result<T, E>;

/// Why one image was not built or published for one kernel.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The image, its definition or what it is made from.
    #[error(transparent)]
    Finding(#[from] Finding),
    /// There is nothing to build of this subject (`<image> for <target>`), and why.
    #[error("{0}: {1}")]
    Skipped(String, SkipReason),
    /// Whether this subject can be built could not be found out: an outside system did not answer.
    #[error("{0}: {1}")]
    Unresolved(String, SkipReason),
    /// An image that another is compiled against cannot be built.
    #[error("{image} is compiled against {need}, which cannot be built: {}", error_chain(error.as_ref()))]
    Need {
        /// The image that was asked for.
        image: String,
        /// The image that it needs.
        need: String,
        /// Why not.
        error: Box<TargetError>,
    },
    /// Nodes and rollout targets cannot be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A boot check that came to no result.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// A reference in a definition.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Fetching.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The engine.
    #[error(transparent)]
    Engine(EngineError),
    /// The registry.
    #[error(transparent)]
    Registry(RegistryError),
    /// The payload, its layer or the binary that the image starts with.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The key that signs modules or images.
    #[error(transparent)]
    Signing(#[from] SigningError),
    /// A file of a definition or of the cache.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An input is another one than that which the build was planned with.
    #[error("{0} changed after the build was planned")]
    Outdated(String),
    /// Another farrier may be the writer by now: why this one may not write.
    #[error("not written: {0}")]
    Fenced(String),
    /// Ctrl-C, SIGTERM.
    #[error("interrupted")]
    Cancelled,
}

impl From<RegistryError> for TargetError {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Cancelled => Self::Cancelled,
            RegistryError::Image(error) => Self::Image(error),
            error => Self::Registry(error),
        }
    }
}

impl From<EngineError> for TargetError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Cancelled => Self::Cancelled,
            error => Self::Engine(error),
        }
    }
}

impl TargetError {
    /// A finding of this kind, and what to do.
    pub(crate) fn finding(kind: FindingKind, message: String, hint: Option<String>) -> Self {
        Finding { kind, message, detail: Vec::new(), hint }.into()
    }

    /// Something is not as the work needs it, and what to do.
    pub(crate) fn unmet(message: String, hint: &str) -> Self {
        Self::finding(FindingKind::Unmet, message, Some(hint.to_owned()))
    }

    /// An image that does not exist.
    pub(crate) fn no_such_image(reference: impl std::fmt::Display) -> Self {
        Self::finding(FindingKind::Unmet, format!("base image {reference} does not exist"), None)
    }

    /// A cell whose image or family is not among the definitions.
    pub(crate) fn definition_gone(subject: &str) -> Self {
        Self::finding(FindingKind::Unmet, format!("{subject}: its definition is gone"), None)
    }

    /// No suite and no directory has headers for a kernel.
    pub(crate) fn headers_missing(looked_for: &str, hint: String) -> Self {
        Self::finding(FindingKind::Unmet, format!("no headers for this kernel: {looked_for}"), Some(hint))
    }

    /// A public key that signatures of images are checked with, from a file or a field of the site's definition.
    pub(crate) fn image_key(from: &str, source: KeyError) -> Self {
        let message = format!("use the public key of {from}: {}", error_chain(&source));
        Self::finding(FindingKind::Usage, message, Some(source.hint().to_owned()))
    }

    /// The tag was taken by other content while this build ran.
    pub(crate) fn overtaken(tag: &crate::image::ImageReference) -> Self {
        let message =
            format!("tag {tag} was published by another farrier during this build, with other inputs");
        Self::unmet(message, "look at the other publisher's definitions, then run again")
    }

    /// A name that is no driver image's.
    pub(crate) fn no_image<'a>(
        name: impl std::fmt::Display,
        known: impl IntoIterator<Item = &'a crate::image::ImageName>,
    ) -> Self {
        let known: Vec<String> = known.into_iter().map(ToString::to_string).collect();
        let message = format!("no driver image is named {name}; there is {}", known.join(", "));
        Self::finding(FindingKind::Usage, message, None)
    }

    /// A fault of an outside system that may pass within seconds: worth another try in this pass.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Fetch(error) => error.is_transient(),
            Self::Engine(error) => error.is_transient(),
            Self::Registry(error) => error.is_transient(),
            Self::Need { error, .. } => error.is_transient(),
            _ => false,
        }
    }

    /// Will the same inputs fail again, so that trying again before one changes is a waste?
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Finding(Finding {
                kind: FindingKind::Compile | FindingKind::Tampered | FindingKind::Refused,
                ..
            }) => true,
            Self::Payload(error) | Self::Boot(BootError::Payload(error)) => error.is_permanent(),
            _ => self.is_of_policy() || self.is_of_deadline(),
        }
    }

    /// Did what the definition asks of the check make the failure? Asked for less, the same inputs may do.
    pub fn is_of_policy(&self) -> bool {
        matches!(self, Self::Finding(Finding { kind: FindingKind::Unknown | FindingKind::BootRefused, .. }))
    }

    /// Did the definition's deadline make the failure? Given more time, the same inputs may do.
    pub fn is_of_deadline(&self) -> bool {
        match self {
            Self::Finding(finding) => finding.kind == FindingKind::TooLong,
            Self::Payload(error) | Self::Boot(BootError::Payload(error)) => error.is_of_deadline(),
            _ => false,
        }
    }

    /// Was an outside system out of reach?
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

    /// What people want to see below the message: a report, the end of a log.
    pub fn detail(&self) -> Vec<String> {
        match self {
            Self::Finding(finding) => finding.detail.clone(),
            Self::Need { error, .. } => error.detail(),
            _ => Vec::new(),
        }
    }

    /// Is the command or a definition wrong, rather than the world?
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Need { error, .. } => error.is_usage(),
            Self::Finding(finding) => finding.kind == FindingKind::Usage,
            Self::Cluster(error) => !error.is_unreachable(),
            Self::Reference(_) | Self::Skipped(..) | Self::Signing(_) => true,
            _ => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        self.own_hint().or_else(|| {
            (!self.has_words_of_a_step() && is_full_disk(self))
                .then(|| "the disk is full: free some room; nothing incomplete was left".to_owned())
        })
    }

    /// Whether its text holds what a build step chose to print or to be called.
    fn has_words_of_a_step(&self) -> bool {
        matches!(self, Self::Finding(_) | Self::Engine(EngineError::Step(_) | EngineError::Limit(_)))
    }

    fn own_hint(&self) -> Option<String> {
        match self {
            Self::Finding(finding) => finding.hint.clone(),
            Self::Skipped(_, SkipReason::Need { need, why: NeedReason::NotPublished { .. } }) => {
                Some(format!(
                    "build {need} with --push first, or build with --push: then what is needed is built before"
                ))
            }
            Self::Cluster(error) => error.hint(),
            Self::Boot(error) => Some(error.hint()),
            Self::Signing(error) => error.hint(),
            Self::Fetch(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Registry(error) => registry::hint(error),
            Self::Payload(error) => error.hint(),
            Self::Need { error, .. } => error.hint(),
            Self::Outdated(_) => Some(
                "run again: it is planned with what is there now; a running loop does so by itself"
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreError;

    #[test]
    fn a_full_disk_is_known_through_errors_that_stand_for_their_cause() {
        for error in [
            TargetError::Io(io::Error::from_raw_os_error(28)),
            TargetError::Payload(PayloadError::Io(io::Error::from_raw_os_error(28))),
            TargetError::Cache(CacheError(io::Error::from_raw_os_error(122))),
            TargetError::Fetch(FetchError::Store(StoreError::Pack(io::Error::from_raw_os_error(28)))),
        ] {
            assert!(error.hint().is_some_and(|hint| hint.contains("the disk is full")), "{error:?}");
        }
        assert_eq!(TargetError::Io(io::Error::from_raw_os_error(13)).hint(), None);
        let step = EngineError::Step("RUN echo No space left on device: exit code 1".to_owned());
        assert_eq!(TargetError::Engine(step).hint(), None);
    }
}
