//! `farrier schema`: the JSON Schema of a definition, or of the check report; the definition of DriverBuild.

use clap::{Args, ValueEnum};

use super::{CliError, Exit, args::OutputForm, output};
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
pub fn schema(kind: SchemaKind) -> Result<Exit, CliError> {
    let schema = match kind {
        SchemaKind::Crd => return Ok(output::result(&status::crd_yaml()?).map(|()| Exit::Done)?),
        SchemaKind::DriverImage => definitions::schema::driver_image(),
        SchemaKind::KernelFamily => definitions::schema::kernel_family(),
        SchemaKind::AnnouncedKernels => definitions::schema::announced_kernels(),
        SchemaKind::Site => definitions::schema::site(),
        SchemaKind::CheckReport => definitions::schema::check_report(),
    };
    output::show(OutputForm::Json, &schema, |_| String::new())?;
    Ok(Exit::Done)
}
