//! Exit codes, and errors in the form that users read.

use std::{error::Error, io, process::ExitCode};

use farrier_builder::services::BuildError;
use farrier_cluster::ClusterError;
use farrier_controller::{rollback::RollbackError, runtime::HttpError};
use farrier_definitions::DefinitionErrors;
use farrier_engines::EngineError;
use farrier_inputs::{FetchError, TreeError};
use farrier_local::cache::CacheError;
use farrier_net::NetError;
use farrier_payload::PayloadError;
use farrier_signing::SigningError;
use farrier_store::registry::{self, RegistryError};
use oci::{ImageError, error_chain};

/// Exit code of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Exit {
    /// Everything succeeded.
    Done = 0,
    /// Some target failed.
    Failed,
    /// The command, the configuration or a definition is wrong.
    Usage,
    /// An outside system could not be reached.
    Unreachable,
    /// Interrupted by Ctrl-C or SIGTERM; shells use the same code for SIGINT.
    Interrupted = 130,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Result of a command.
pub type Result<T, E = CliError> = std::result::Result<T, E>;

/// Error that ends a command.
#[derive(Debug)]
pub struct CliError {
    pub(crate) error: Box<dyn Error + Send + Sync>,
    pub(crate) exit: Exit,
    pub(crate) hint: Option<String>,
}

impl CliError {
    /// Makes an error for a wrong argument, or for a wrong file that an argument names.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { error: message.into().into(), exit: Exit::Usage, hint: None }
    }

    /// Makes the same error as [`CliError::usage`], with a hint.
    pub fn hinted(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..Self::usage(message) }
    }

    /// Makes an error for a missing object that a valid command names.
    pub fn absent(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { exit: Exit::Failed, ..Self::hinted(message, hint) }
    }

    /// Adds the name of the image that the error is about.
    #[must_use]
    pub fn of_image(self, image: &str) -> Self {
        Self { error: Box::new(ImageCheckError { image: image.to_owned(), source: self.error }), ..self }
    }

    /// Returns the exit code of a command that ends with this error.
    pub fn exit(&self) -> Exit {
        self.exit
    }

    /// Returns the error in one line, and the hint.
    pub fn message_and_hint(&self) -> (String, String) {
        (error_chain(self.error.as_ref()), self.hint.clone().unwrap_or_default())
    }

    /// Renders the error for users: the message, its causes, details, and the hint.
    pub fn render(&self) -> String {
        let error: &(dyn Error + 'static) = self.error.as_ref();
        if let Some(errors) = error.downcast_ref::<DefinitionErrors>() {
            return errors.render();
        }
        if self.exit == Exit::Interrupted {
            return "interrupted".to_owned();
        }
        let mut text = format!("error: {}", error_chain(error));
        for line in error.downcast_ref().map(BuildError::detail).unwrap_or_default() {
            text.push_str("\n  ");
            text.push_str(&line);
        }
        if let Some(hint) = &self.hint {
            text.push_str("\nhint: ");
            text.push_str(hint);
        }
        text
    }
}

/// Failure to check an image.
#[derive(Debug, thiserror::Error)]
#[error("cannot check image {image}")]
struct ImageCheckError {
    image: String,
    source: Box<dyn Error + Send + Sync>,
}

/// Failure to write to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the result")]
pub struct OutputError(#[from] pub io::Error);

/// Maps each error type to its exit code and hint. Commands of optional features use it in their own module.
macro_rules! exit_codes {
    ($($error:ty: $exit:expr, $hint:expr;)+) => {$(
        impl From<$error> for $crate::error::CliError {
            fn from(error: $error) -> Self {
                let exit: fn(&$error) -> $crate::error::Exit = $exit;
                let hint: fn(&$error) -> Option<String> = $hint;
                Self { exit: exit(&error), hint: hint(&error), error: Box::new(error) }
            }
        }
    )+};
}
#[allow(unused_imports, reason = "without features nothing else uses it")]
pub(crate) use exit_codes;

exit_codes! {
    DefinitionErrors: |_| Exit::Usage, |_| None;
    NetError: |_| Exit::Usage, NetError::hint;
    SigningError: |_| Exit::Usage, SigningError::hint;
    TreeError: |_| Exit::Usage, |error| Some(error.remedy().to_owned());
    HttpError: |_| Exit::Usage, |_| Some("choose another address with --listen, or --listen off".to_owned());
    ClusterError: |error| if error.is_unreachable() { Exit::Unreachable } else { Exit::Usage }, ClusterError::hint;
    RollbackError: |error| match error {
        RollbackError::Cluster(error) if error.is_unreachable() => Exit::Unreachable,
        _ => Exit::Usage,
    }, |error| match error {
        RollbackError::Cluster(error) => error.hint(),
        RollbackError::Unknown { .. } => None,
    };
    BuildError: |error| match error {
        BuildError::Canceled => Exit::Interrupted,
        error if error.is_usage() => Exit::Usage,
        error if error.is_unreachable() => Exit::Unreachable,
        _ => Exit::Failed,
    }, BuildError::hint;
    RegistryError: |error| match error {
        error if registry::is_forbidden(error) => Exit::Usage,
        error if error.is_transient() || error.is_unreachable() => Exit::Unreachable,
        _ => Exit::Failed,
    }, registry::hint;
    FetchError: |error| match error {
        error if error.is_usage() => Exit::Usage,
        error if error.is_transient() => Exit::Unreachable,
        _ => Exit::Failed,
    }, FetchError::hint;
    // Only `farrier check` uses an engine directly.
    EngineError: |error| match error {
        EngineError::Canceled => Exit::Interrupted,
        EngineError::Unavailable(_) => Exit::Unreachable,
        error if error.is_transient() => Exit::Unreachable,
        _ => Exit::Failed,
    }, |error| match error {
        EngineError::Unavailable(_) => Some(
            "start the Docker daemon (`systemctl start docker`) or Podman's socket, and make sure that you may use it; or name \
             the image with its registry, without `docker:`"
                .to_owned(),
        ),
        error => error.hint(),
    };
    ImageError: |_| Exit::Failed, |_| None;
    PayloadError: |_| Exit::Failed, PayloadError::hint;
    CacheError: |_| Exit::Failed, CacheError::hint;
    OutputError: |_| Exit::Failed, |_| None;
    io::Error: |_| Exit::Failed, |_| None;
}
