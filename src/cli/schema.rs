//! `farrier schema`: the JSON Schema of a definition, or of the check report; the definition of DriverBuild.

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::{Exit, Result, args::OutputForm, output};
use crate::{definitions, status};

#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The kind of document
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
    /// What `farrier check -o json` prints
    CheckReport,
    /// The CustomResourceDefinition of DriverBuild, as YAML for `kubectl apply`
    Crd,
}

/// Prints the schema of one kind.
pub fn schema(kind: SchemaKind) -> Result<Exit> {
    match of(kind) {
        Some(schema) => output::show(OutputForm::Json, &schema, |_| String::new())?,
        None => output::result(&status::crd_yaml()?)?,
    }
    Ok(Exit::Done)
}

/// The schema of one kind; `None` for the definition of DriverBuild, which is YAML.
pub fn of(kind: SchemaKind) -> Option<Value> {
    Some(match kind {
        SchemaKind::Crd => return None,
        SchemaKind::DriverImage => definitions::schema::driver_image(),
        SchemaKind::KernelFamily => definitions::schema::kernel_family(),
        SchemaKind::AnnouncedKernels => definitions::schema::announced_kernels(),
        SchemaKind::Site => definitions::schema::site(),
        SchemaKind::CheckReport => definitions::schema::check_report(),
    })
}
