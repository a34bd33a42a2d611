//! Metadata that farrier writes to published manifests and reads back.

pub mod annotations;
mod check_report;
pub mod media_type;
mod module_signer;
mod record;
mod union;

pub use annotations::{FactsError, ImageFacts};
pub use check_report::{CheckReportDocument, ReusedFrom};
pub use module_signer::ModuleSignerFact;
pub use record::RegistryRecord;
pub use union::{UnionMetadata, UnionPart, assemble_union};
