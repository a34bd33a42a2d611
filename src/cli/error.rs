//! Exit codes, and errors as people read them.

use std::process::ExitCode;

use crate::{
    cache::CacheError,
    cluster::ClusterError,
    controller::{PassError, TargetError, chain},
    definitions::DefinitionErrors,
    headers::{FetchError, TreeError},
    payload::PayloadError,
    registry::RegistryError,
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
    /// The registry.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A header tree.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// Fetching.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Module files.
    #[error(transparent)]
    Payload(#[from] PayloadError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// Standard output.
    #[error("write the result")]
    Output(#[from] std::io::Error),
}

impl CliError {
    /// The exit code of a command that ends with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Usage(_)
            | Self::Definitions(_)
            | Self::Tree(_)
            | Self::Pass(PassError::Cluster(_))
            | Self::Cluster(_) => Exit::Wrong,
            Self::Target(error) => match error {
                TargetError::Cancelled => Exit::Interrupted,
                error if error.is_usage() => Exit::Wrong,
                error if error.is_unreachable() => Exit::Unreachable,
                _ => Exit::Failed,
            },
            Self::Registry(error) if error.is_transient() => Exit::Unreachable,
            Self::Fetch(error) if error.is_transient() => Exit::Unreachable,
            Self::Pass(PassError::Cache(_))
            | Self::Cache(_)
            | Self::Output(_)
            | Self::Payload(_)
            | Self::Registry(_)
            | Self::Fetch(_) => Exit::Failed,
        }
    }

    /// What to do about it.
    fn hint(&self) -> Option<String> {
        match self {
            Self::Target(error) => error.hint(),
            Self::Registry(error) => error.hint(),
            Self::Fetch(error) => error.hint(),
            Self::Usage(_)
            | Self::Definitions(_)
            | Self::Tree(_)
            | Self::Payload(_)
            | Self::Pass(_)
            | Self::Cluster(_)
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
