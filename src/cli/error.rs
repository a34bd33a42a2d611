//! Exit codes, and errors as people read them.

use std::{path::PathBuf, process::ExitCode};

use crate::{
    boot::BootError,
    bundle::BundleError,
    cache::CacheError,
    cluster::ClusterError,
    controller::{PassError, TargetError, chain},
    definitions::DefinitionErrors,
    engine::EngineError,
    headers::{FetchError, HostError, TreeError},
    net::NetError,
    oci::ImageError,
    payload::{ImportError, PayloadError},
    registry::RegistryError,
    runtime::HttpError,
    signing::SigningError,
};

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exit {
    /// Everything that was to be done is done.
    Done,
    /// Some target failed.
    Failed,
    /// The command, the configuration or a definition is wrong.
    Wrong,
    /// An outside system could not be reached.
    Unreachable,
    /// Ctrl-C or SIGTERM, as shells report SIGINT.
    Interrupted,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::Wrong => 2,
            Exit::Unreachable => 3,
            Exit::Interrupted => 130,
        })
    }
}

/// What ends a command early.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// An argument, or a file that it names, is wrong.
    #[error("{0}")]
    Usage(String),
    /// Definitions.
    #[error(transparent)]
    Definitions(#[from] DefinitionErrors),
    /// A pass could not be made.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// A target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The cluster.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The address for probes and figures.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The site's words on the network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A bundle.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A header tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// Fetching.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Module files.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// An image that is checked.
    #[error("check image {image}")]
    Image {
        /// Which.
        image: String,
        /// What is wrong.
        #[source]
        source: ImageCause,
    },
    /// The running kernel.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A kernel to check against of which there is nothing.
    #[error("find the {what} of the kernel: there is no {looked_for}")]
    NoKernel {
        /// What was to be found: headers, image.
        what: &'static str,
        /// The packages or file.
        looked_for: String,
        /// What to do.
        hint: String,
    },
    /// A boot check that came to no result.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The key or certificate that signs.
    #[error(transparent)]
    Signing(#[from] SigningError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Standard output.
    #[error("write the result")]
    Output(#[from] std::io::Error),
}

/// Why an image cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum ImageCause {
    /// What the user named is not there, or is not what it should be.
    #[error("{message}")]
    Named {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: String,
    },
    /// The engine that holds it.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The registry that holds it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Its manifest.
    #[error(transparent)]
    Manifest(#[from] ImageError),
    /// Its layers.
    #[error(transparent)]
    Layers(#[from] ImportError),
    /// A file of this machine.
    #[error("{action} {path}")]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

impl ImageCause {
    fn exit(&self) -> Exit {
        match self {
            Self::Named { .. } => Exit::Wrong,
            Self::Engine(EngineError::Cancelled) => Exit::Interrupted,
            Self::Engine(EngineError::Unavailable { .. }) => Exit::Unreachable,
            Self::Engine(error) if error.is_transient() => Exit::Unreachable,
            Self::Registry(error) if error.is_transient() => Exit::Unreachable,
            Self::Engine(_) | Self::Registry(_) | Self::Manifest(_) | Self::Layers(_) | Self::Io { .. } => {
                Exit::Failed
            }
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::Named { hint, .. } => Some(hint.clone()),
            Self::Engine(EngineError::Unavailable { .. }) => Some(
                "start the Docker daemon (`systemctl start docker`) or Podman's socket, and see that you may use it; \
                 or name the image with its registry, without `docker:`"
                    .to_owned(),
            ),
            Self::Engine(error) => error.hint(),
            Self::Registry(error) => error.hint(),
            Self::Manifest(_) | Self::Layers(_) | Self::Io { .. } => None,
        }
    }
}

impl CliError {
    /// The exit code of a command that ends with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Cluster(error) | Self::Pass(PassError::Cluster(error)) if error.is_unreachable() => {
                Exit::Unreachable
            }
            Self::Usage(_)
            | Self::Definitions(_)
            | Self::Net(_)
            | Self::Registry(RegistryError::Net(NetError::Offline { .. }))
            | Self::Tree(_)
            | Self::Pass(PassError::Cluster(_))
            | Self::Host(_)
            | Self::NoKernel { .. }
            | Self::Http(_)
            | Self::Cluster(_)
            | Self::Signing(_) => Exit::Wrong,
            Self::Image { source, .. } => source.exit(),
            Self::Boot(BootError::Cancelled) => Exit::Interrupted,
            // The emulator and its init are outside systems.
            Self::Boot(
                BootError::NoEmulator { .. } | BootError::NoEntrypoint(_) | BootError::Start { .. },
            ) => Exit::Unreachable,
            Self::Target(error) => match error {
                TargetError::Cancelled => Exit::Interrupted,
                error if error.is_usage() => Exit::Wrong,
                error if error.is_unreachable() => Exit::Unreachable,
                _ => Exit::Failed,
            },
            Self::Registry(error) | Self::Bundle(BundleError::Registry(error)) if error.is_transient() => {
                Exit::Unreachable
            }
            Self::Bundle(error) if error.is_usage() => Exit::Wrong,
            Self::Fetch(error) if error.is_usage() => Exit::Wrong,
            Self::Fetch(error) if error.is_transient() => Exit::Unreachable,
            Self::Pass(PassError::Cache(_))
            | Self::Cache(_)
            | Self::Output(_)
            | Self::Payload(_)
            | Self::Boot(_)
            | Self::Bundle(_)
            | Self::Registry(_)
            | Self::Fetch(_) => Exit::Failed,
        }
    }

    /// What to do about it.
    fn hint(&self) -> Option<String> {
        match self {
            Self::Target(error) => error.hint(),
            Self::Registry(error) => error.hint(),
            Self::Net(error) => error.hint(),
            Self::Bundle(error) => error.hint(),
            Self::Fetch(error) => error.hint(),
            Self::Cluster(error) | Self::Pass(PassError::Cluster(error)) => error.hint(),
            Self::Image { source, .. } => source.hint(),
            Self::Signing(error) => error.hint(),
            Self::Host(error) => Some(error.remedy().to_owned()),
            Self::Boot(error) => Some(error.hint()),
            Self::NoKernel { hint, .. } => Some(hint.clone()),
            Self::Tree(error) => Some(error.remedy().to_owned()),
            Self::Http(_) => Some("choose another one with --listen, or --listen off".to_owned()),
            Self::Usage(_)
            | Self::Definitions(_)
            | Self::Payload(_)
            | Self::Pass(PassError::Cache(_))
            | Self::Cache(_)
            | Self::Output(_) => None,
        }
    }

    /// The error as people read it: what failed, its causes, details, and what to do.
    pub fn render(&self) -> String {
        let mut text = match self {
            Self::Definitions(errors) => return errors.render(),
            other => format!("error: {}", chain(other)),
        };
        if let Self::Target(error) = self {
            for line in error.detail() {
                text.push_str("\n  ");
                text.push_str(&line);
            }
        }
        if let Some(hint) = self.hint() {
            text.push_str("\nhint: ");
            text.push_str(&hint);
        }
        text
    }
}
