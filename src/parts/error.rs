//! Adapter: why an image was not built, checked, published or changed.

use std::{io, path::PathBuf};

use crate::{
    boot::BootError,
    cache::CacheError,
    engine::{Diagnosis, EngineError},
    fault::chain,
    image::ReferenceError,
    inputs::FetchError,
    kernel::Compiler,
    kmod::CannotVerify,
    oci::ImageError,
    payload::PayloadError,
    plan::{NeedReason, SkipReason},
    provenance::KeyError,
    registry::{self, RegistryError},
    signing::SigningError,
};

/// Why one image was not built or published for one kernel.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// No suite and no directory has headers for this kernel.
    #[error("no headers for this kernel: {looked_for}")]
    HeadersMissing {
        /// What was looked for, where.
        looked_for: String,
        /// What to do.
        hint: String,
    },
    /// The toolchain image lacks the kernel's compiler or a tool.
    #[error(
        "the kernel was built with {wanted}, which the toolchain image of family {family} lacks; it offers {offered}"
    )]
    CompilerMissing {
        /// The compiler from the header set.
        wanted: Compiler,
        /// The kernel family.
        family: String,
        /// What the probe found.
        offered: String,
    },
    /// The driver does not compile against this kernel.
    #[error("compile failed: {}", first_error(.diagnosis.as_ref(), .message))]
    Compile {
        /// The first compiler error, where one was recognised.
        diagnosis: Option<Diagnosis>,
        /// The engine's words.
        message: String,
        /// The last lines of the log.
        tail: Vec<String>,
        /// The whole log.
        log: PathBuf,
    },
    /// The kernel would refuse the modules.
    #[error("check refused the modules: {summary}")]
    Refused {
        /// The first findings.
        summary: String,
        /// The whole report, as a table.
        report: String,
    },
    /// It is not known whether the modules load, and the definition does not accept that.
    #[error("the check does not know whether the modules load, and check.unknown is deny: {summary}")]
    Unknown {
        /// The first finding.
        summary: String,
        /// What would settle the findings.
        settle: Vec<String>,
        /// The whole report, as a table.
        report: String,
    },
    /// The kernel, booted, did not load the modules.
    #[error("the boot check failed: {summary}")]
    BootRefused {
        /// The first module that failed, and the kernel's words.
        summary: String,
        /// The whole report, as a table.
        report: String,
    },
    /// There is nothing to build for this kernel.
    #[error("{subject}: {reason}")]
    Skipped {
        /// `<image> for <target>`.
        subject: String,
        /// Why.
        reason: SkipReason,
    },
    /// An image that another is compiled against cannot be built.
    #[error("{image} is compiled against {need}, which cannot be built: {}", chain(error.as_ref()))]
    Need {
        /// The image that was asked for.
        image: String,
        /// The image that it needs.
        need: String,
        /// Why not.
        error: Box<TargetError>,
    },
    /// The command or a definition is wrong.
    #[error("{0}")]
    Usage(String),
    /// A registry, an image or a tree is not as the work needs it.
    #[error("{message}")]
    Unmet {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: Option<String>,
    },
    /// A public key that signatures of images are checked with.
    #[error("use the public key of {from}")]
    ImageKey {
        /// The file, or the field of the site's definition.
        from: String,
        /// What is wrong with it.
        #[source]
        source: KeyError,
    },
    /// The kernel takes no signature of the site's key.
    #[error("modules cannot be signed for kernel {kernel}")]
    CannotVerify {
        /// The kernel.
        kernel: String,
        /// Why not.
        #[source]
        source: CannotVerify,
    },
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
    /// Another farrier may be the writer by now.
    #[error("not written: {why}")]
    Fenced {
        /// Why this one may not write.
        why: String,
    },
    /// Ctrl-C, SIGTERM.
    #[error("interrupted")]
    Cancelled,
}

fn first_error(diagnosis: Option<&Diagnosis>, message: &str) -> String {
    diagnosis.map_or_else(|| message.to_owned(), ToString::to_string)
}

impl From<RegistryError> for TargetError {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Cancelled => Self::Cancelled,
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
    /// Something is not as the work needs it, and what to do.
    pub(crate) fn unmet(message: String, hint: &str) -> Self {
        Self::Unmet { message, hint: Some(hint.to_owned()) }
    }

    /// An image that does not exist.
    pub(crate) fn no_such_image(reference: impl std::fmt::Display) -> Self {
        Self::Unmet { message: format!("base image {reference} does not exist"), hint: None }
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
        Self::Usage(format!("no driver image is named {name}; there is {}", known.join(", ")))
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
            Self::CompilerMissing { .. } | Self::Compile { .. } | Self::Refused { .. } => true,
            Self::Payload(error) => error.is_permanent(),
            _ => self.is_of_policy(),
        }
    }

    /// Did what the definition asks of the check make the failure? Asked for less, the same inputs may do.
    pub fn is_of_policy(&self) -> bool {
        matches!(self, Self::Unknown { .. } | Self::BootRefused { .. })
    }

    /// Was an outside system out of reach?
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_unreachable(),
            Self::Engine(EngineError::Unavailable { .. }) => true,
            Self::Fetch(error) => error.is_transient(),
            Self::Need { error, .. } => error.is_unreachable(),
            _ => false,
        }
    }

    /// What people want to see below the message: a report, the end of a log.
    pub fn detail(&self) -> Vec<String> {
        match self {
            Self::Compile { diagnosis: None, tail, .. } => tail.clone(),
            Self::Refused { report, .. }
            | Self::Unknown { report, .. }
            | Self::BootRefused { report, .. } => report.lines().map(str::to_owned).collect(),
            Self::Need { error, .. } => error.detail(),
            _ => Vec::new(),
        }
    }

    /// Is the command or a definition wrong, rather than the world?
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Need { error, .. } => error.is_usage(),
            Self::Usage(_)
            | Self::Reference(_)
            | Self::Skipped { .. }
            | Self::Signing(_)
            | Self::ImageKey { .. } => true,
            _ => false,
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        self.own_hint().or_else(|| {
            let full = causes(self).any(|cause| cause.kind() == io::ErrorKind::StorageFull);
            full.then(|| "the disk is full: free some room; nothing incomplete was left".to_owned())
        })
    }

    fn own_hint(&self) -> Option<String> {
        let text = match self {
            Self::HeadersMissing { hint, .. } => hint,
            Self::CompilerMissing { wanted, family, .. } => {
                return Some(format!(
                    "add the package of {wanted} to the toolchain of kernels family {family}, or name an image that has it"
                ));
            }
            Self::Compile { log, .. } => {
                return Some(format!(
                    "the whole log is {}; these inputs are not compiled again until one of them changes (driver version, patch, template, kernel)",
                    log.display()
                ));
            }
            Self::Refused { .. } => "the modules do not fit this kernel: see the report above",
            Self::Unknown { settle, .. } => {
                return Some(format!(
                    "what would settle it: {}; or accept it with check.unknown: allow",
                    settle.join("; ")
                ));
            }
            Self::BootRefused { .. } => {
                "the kernel itself does not load the modules: see its messages above; it is not tried again until an input changes"
            }
            Self::CannotVerify { .. } => {
                "sign with an RSA key, for a kernel that has SHA-256 or SHA-512 built in, or leave moduleSigning out of site.yaml"
            }
            Self::Skipped {
                reason: SkipReason::Need { need, why: NeedReason::NotPublished { .. } }, ..
            } => {
                return Some(format!(
                    "build {need} with --push first, or build with --push: then what is needed is built before"
                ));
            }
            Self::ImageKey { source, .. } => source.hint(),
            Self::Unmet { hint, .. } => return hint.clone(),
            Self::Boot(error) => return Some(error.hint()),
            Self::Signing(error) => return error.hint(),
            Self::Fetch(error) => return error.hint(),
            Self::Engine(error) => return error.hint(),
            Self::Registry(error) => return registry::hint(error),
            Self::Payload(error) => return error.hint(),
            Self::Need { error, .. } => return error.hint(),
            _ => return None,
        };
        Some(text.to_owned())
    }
}

/// The system's answers among an error's causes.
fn causes<'a>(error: &'a (dyn std::error::Error + 'static)) -> impl Iterator<Item = &'a io::Error> {
    std::iter::successors(Some(error), |error| error.source()).filter_map(|cause| cause.downcast_ref())
}
