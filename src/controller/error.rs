//! Adapter: why a target, or a whole pass, failed.

use crate::{
    boot::BootError,
    cache::CacheError,
    cluster::ClusterError,
    engine::{Diagnosis, EngineError},
    headers::FetchError,
    image::ReferenceError,
    kernel::Compiler,
    kmod::CannotVerify,
    oci::ImageError,
    payload::{EntrypointError, ExposedError, ImportError, LayerFileError, PayloadError, SignModulesError},
    plan::{NeedReason, SkipReason},
    provenance::KeyError,
    registry::RegistryError,
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
        log: std::path::PathBuf,
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
    /// The definition asks for a boot check, and there is nothing to make it with.
    #[error("image {image} asks for a boot check (check.boot: true), and this farrier cannot boot kernels")]
    NoBootChecker {
        /// The image.
        image: String,
    },
    /// The kernel that is to be booted is nowhere.
    #[error("boot the kernel: there is no {looked_for}")]
    KernelImageMissing {
        /// The packages or file.
        looked_for: String,
        /// What to do.
        hint: String,
    },
    /// A boot check that came to no result.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The binary that the image starts with.
    #[error(transparent)]
    Entrypoint(#[from] EntrypointError),
    /// What is published was accepted under another policy.
    #[error("{reference} is published with the verdict unknown, and check.unknown is deny")]
    PublishedUnknown {
        /// The reference.
        reference: String,
    },
    /// An image that is to be rolled out is not in the registry any more.
    #[error("{reference} is not in the registry any more")]
    Vanished {
        /// The image, by digest.
        reference: String,
    },
    /// The tag was taken by other content while this build ran.
    #[error("tag {tag} was published by somebody else during this build, with other inputs")]
    Overtaken {
        /// The reference.
        tag: String,
    },
    /// The tag holds an image of other inputs (guarantee 3).
    #[error("{reference} holds an image of other inputs")]
    Conflict {
        /// The reference.
        reference: String,
    },
    /// The same inputs failed before, and would again.
    #[error("the same inputs failed at {at}: {message}")]
    FailedBefore {
        /// When.
        at: jiff::Timestamp,
        /// How.
        message: String,
    },
    /// There is nothing to build for this kernel.
    #[error("{subject}: {reason}")]
    Skipped {
        /// `<image> for <target>`.
        subject: String,
        /// Why.
        reason: SkipReason,
    },
    /// No definition has this name.
    #[error("no driver image is named {name}; there is {}", .known.join(", "))]
    NoImage {
        /// The name.
        name: String,
        /// Those that exist.
        known: Vec<String>,
    },
    /// `version: {source: ...}` names a source without a version.
    #[error("image {image}: source {source_name} has no version; only apt sources have one")]
    NoVersion {
        /// The image.
        image: String,
        /// The source.
        source_name: String,
    },
    /// A cell whose image or family is not among the definitions.
    #[error("{0}: its definition is gone")]
    Definition(String),
    /// A definition's file cannot be read.
    #[error("read {path}")]
    Input {
        /// The file.
        path: std::path::PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A base image that does not exist.
    #[error("base image {0} does not exist")]
    BaseMissing(String),
    /// A reference in a definition.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Fetching.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The registry.
    #[error(transparent)]
    Registry(RegistryError),
    /// The payload.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// An image that another is compiled against cannot be built.
    #[error("{image} is compiled against {need}, which cannot be built: {}", crate::fault::chain(error.as_ref()))]
    Need {
        /// The image that was asked for.
        image: String,
        /// The image that it needs.
        need: String,
        /// Why not.
        error: Box<TargetError>,
    },
    /// What the payload exposes.
    #[error(transparent)]
    Exposed(#[from] ExposedError),
    /// A needed image that does not hold what it says that it exposes. Not permanent: the fault is that image's, which
    /// may be published anew while the inputs of this build stay as they are.
    #[error("needed image {image} does not hold the headers that it claims to expose: {why}")]
    NeedLacks {
        /// The image, by digest.
        image: String,
        /// What is wrong with it.
        why: String,
    },
    /// A needed image that was there when the build was planned.
    #[error("needed image {reference} is not in the registry any more")]
    NeedVanished {
        /// The image.
        reference: String,
    },
    /// A tree that a user brings, which is not the one that the build was planned with.
    #[error("need {need}: its tree has been changed since the build was planned, to {origin}")]
    TreeChanged {
        /// The need's name.
        need: String,
        /// What is there now.
        origin: String,
    },
    /// A public key that signatures of images are checked with.
    #[error("use the public key of {from}")]
    ImageKey {
        /// The file, or what of the site's definition.
        from: String,
        /// What is wrong with it.
        #[source]
        source: KeyError,
    },
    /// Others write signatures of the same image, faster than this one can.
    #[error("{tag} lacks what was added to it, {tries} times: others write it, too")]
    SignaturesLost {
        /// Repository and tag.
        tag: String,
        /// How often it was tried.
        tries: u32,
    },
    /// A layer.
    #[error(transparent)]
    Layer(#[from] LayerFileError),
    /// An engine-made image.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The kernel takes no signature of the site's key.
    #[error("modules cannot be signed for kernel {kernel}")]
    CannotVerify {
        /// The kernel.
        kernel: String,
        /// Why not.
        #[source]
        source: CannotVerify,
    },
    /// The key that signs modules.
    #[error(transparent)]
    Signing(#[from] SigningError),
    /// The modules are not signed.
    #[error(transparent)]
    SignModules(#[from] SignModulesError),
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

impl TargetError {
    /// A fault of an outside system that may pass within seconds: worth another try in this pass.
    pub fn is_fault(&self) -> bool {
        match self {
            Self::Fetch(error) => error.is_transient(),
            Self::Engine(error) => error.is_transient(),
            Self::Registry(error) => error.is_transient(),
            Self::Need { error, .. } => error.is_fault(),
            _ => false,
        }
    }

    /// Will the same inputs fail again, so that trying again before one changes is a waste?
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::CompilerMissing { .. } | Self::Compile { .. } | Self::Refused { .. } => true,
            Self::Exposed(error) => error.is_permanent(),
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
        let needed = |error: &Self| matches!(error, Self::Need { error, .. } if error.is_usage());
        needed(self)
            || matches!(
                self,
                Self::NoImage { .. }
                    | Self::NoVersion { .. }
                    | Self::Reference(_)
                    | Self::Skipped { .. }
                    | Self::Signing(_)
                    | Self::ImageKey { .. }
            )
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        self.own_hint().or_else(|| {
            let full = causes(self).any(|cause| cause.kind() == std::io::ErrorKind::StorageFull);
            full.then(|| "the disk is full: free some room; nothing incomplete was left".to_owned())
        })
    }

    fn own_hint(&self) -> Option<String> {
        match self {
            Self::HeadersMissing { hint, .. } | Self::KernelImageMissing { hint, .. } => Some(hint.clone()),
            Self::CompilerMissing { wanted, family, .. } => Some(format!(
                "add the package of {wanted} to the toolchain of kernels family {family}, or name an image that has it"
            )),
            Self::Compile { log, .. } => Some(format!(
                "the whole log is {}; these inputs are not compiled again until one of them changes (driver version, patch, template, kernel)",
                log.display()
            )),
            Self::Refused { .. } => Some("the modules do not fit this kernel: see the report above".to_owned()),
            Self::Unknown { settle, .. } => Some(format!(
                "what would settle it: {}; or accept it with check.unknown: allow",
                settle.join("; ")
            )),
            Self::BootRefused { .. } => Some(
                "the kernel itself does not load the modules: see its words above; it is not tried again until an input changes"
                    .to_owned(),
            ),
            Self::Boot(error) => Some(error.hint()),
            Self::Entrypoint(error) => Some(error.hint()),
            Self::NoBootChecker { .. } => Some("leave check.boot out, or run a farrier that can".to_owned()),
            Self::PublishedUnknown { .. } => Some(
                "settle what is unknown and raise the version, or accept it with check.unknown: allow".to_owned(),
            ),
            Self::Overtaken { .. } => Some("look at the other publisher's definitions, then run again".to_owned()),
            Self::Conflict { .. } => Some(
                "a published tag never changes: raise the version or change the tag pattern (with {{signer}} in it, another signing certificate gives another tag), delete the tag, or set onConflict: overwrite"
                    .to_owned(),
            ),
            Self::FailedBefore { .. } => Some("change an input, or build with --force".to_owned()),
            Self::CannotVerify { .. } => Some(
                "sign with an RSA key, for a kernel that has SHA-256 or SHA-512 built in, or leave moduleSigning out of site.yaml"
                    .to_owned(),
            ),
            Self::Signing(error) | Self::SignModules(SignModulesError::Signing { source: error, .. }) => error.hint(),
            Self::Fetch(error) => error.hint(),
            Self::Engine(error) => error.hint(),
            Self::Registry(error) => error.hint(),
            Self::Layer(error) => error.hint(),
            Self::ImageKey { source, .. } => Some(source.hint().to_owned()),
            Self::SignaturesLost { .. } => Some("run again; what is there is kept".to_owned()),
            Self::Exposed(error) => error.hint(),
            Self::Need { error, .. } => error.hint(),
            Self::Skipped { reason: SkipReason::Need { need, why: NeedReason::NotPublished { .. } }, .. } => {
                Some(format!("build {need} with --push first, or build with --push: then what is needed is built before"))
            }
            Self::NeedLacks { .. } => Some(
                "delete the needed image's tag: then it is built and published again, and this one after it"
                    .to_owned(),
            ),
            Self::NeedVanished { .. } => Some("run again: it is built and published first".to_owned()),
            Self::TreeChanged { .. } => Some("run again".to_owned()),
            _ => None,
        }
    }
}

/// The system's answers among an error's causes.
fn causes<'a>(error: &'a (dyn std::error::Error + 'static)) -> impl Iterator<Item = &'a std::io::Error> {
    std::iter::successors(Some(error), |error| error.source()).filter_map(|cause| cause.downcast_ref())
}

/// Why a pass could not be made at all.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Nodes and rollout targets could not be read.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
