//! `farrier schema`: the JSON Schema of a definition, or of the check report; the definition of DriverBuild.

use super::{CliError, Exit, args::SchemaKind, printer};
use crate::{definitions, status};

/// Prints the schema of one kind.
pub fn schema(kind: SchemaKind) -> Result<Exit, CliError> {
    let schema = match kind {
        SchemaKind::Crd => {
            printer::result(&status::crd_yaml()?)?;
            return Ok(Exit::Done);
        }
        SchemaKind::DriverImage => definitions::schema::driver_image(),
        SchemaKind::KernelFamily => definitions::schema::kernel_family(),
        SchemaKind::AnnouncedKernels => definitions::schema::announced_kernels(),
        SchemaKind::Site => definitions::schema::site(),
        SchemaKind::CheckReport => definitions::schema::check_report(),
    };
    printer::result(&printer::json(&schema)?)?;
    Ok(Exit::Done)
}
