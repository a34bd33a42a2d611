//! `farrier schema`: prints the JSON Schema of a definition or of the check report, or the
//! CustomResourceDefinition of DriverBuild.

use clap::{Args, ValueEnum};
use farrier_controller::status;
use farrier_core::{
    image::DriverImage,
    kernel::{AnnouncedKernels, KernelFamily},
    site::Site,
};
use kmod::CheckReport;
use schemars::{generate::SchemaSettings, schema_for};
use serde_json::Value;

use super::{Exit, Result, args::OutputFormat, output};

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// Kind of document
    #[arg(value_enum, default_value_t = SchemaKind::DriverImage)]
    pub kind: SchemaKind,
}

/// Documents with a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchemaKind {
    /// images/*.yaml
    DriverImage,
    /// kernels/*.yaml
    KernelFamily,
    /// announced/*.yaml
    AnnouncedKernels,
    /// site.yaml
    Site,
    /// Output of `farrier check -o json`
    CheckReport,
    /// The CustomResourceDefinition of DriverBuild, as YAML for `kubectl apply`
    Crd,
}

/// Prints the schema of one kind.
pub fn schema(kind: SchemaKind) -> Result<Exit> {
    match schema_of(kind) {
        Some(schema) => output::show(OutputFormat::Json, &schema, |_| String::new())?,
        None => output::result(&status::crd_yaml()?)?,
    }
    Ok(Exit::Done)
}

/// Returns the schema of one kind, derived from its type; `schema/` holds the schemas as files. Returns
/// `None` for DriverBuild, whose definition is YAML.
pub fn schema_of(kind: SchemaKind) -> Option<Value> {
    let schema = match kind {
        SchemaKind::Crd => return None,
        SchemaKind::DriverImage => schema_for!(DriverImage),
        SchemaKind::KernelFamily => schema_for!(KernelFamily),
        SchemaKind::AnnouncedKernels => schema_for!(AnnouncedKernels),
        SchemaKind::Site => schema_for!(Site),
        SchemaKind::CheckReport => {
            let settings = SchemaSettings::draft2020_12().for_serialize();
            settings.into_generator().into_root_schema_for::<CheckReport>()
        }
    };
    Some(schema.to_value())
}
