//! Options of what prints schemas.

use clap::{Args, ValueEnum};

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
