//! Building blocks that all kinds of definitions share.

mod apt;
pub mod checked;
mod form;
mod period;
mod quantity;
mod rpm;

pub use apt::{AptPackages, AptSuites, BootstrapSpec};
use checked::ImageName;
pub(crate) use form::text_schema;
pub use form::{NonEmpty, OneOf, ParseError, TEXT, one_of, without_logins};
pub use period::Period;
pub use quantity::{Cpus, Memory};
pub use rpm::{FurtherRpmPackages, RpmArchive, RpmPackages, RpmRepository, RpmSigned, RpmToolchain};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Version of the definition language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// `farrier.dev/v1alpha1`.
    #[serde(rename = "farrier.dev/v1alpha1")]
    V1Alpha1,
}

/// Metadata of a definition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name: a DNS label (RFC 1123), unique among definitions of the same kind.
    pub name: ImageName,
}

/// Whether a field has its default value. Such fields are omitted from serialized output.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
