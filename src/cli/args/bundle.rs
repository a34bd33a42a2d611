//! Options of what carries images to another site.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{PlatformArgs, RegistryArg};

#[derive(Debug, Subcommand)]
pub enum BundleCommand {
    /// Write a bundle; after an interruption the same command goes on where it stopped
    Export(BundleExportArgs),
    /// Verify a bundle, then push what the registry lacks of it; it can be repeated at any time
    Import(BundleImportArgs),
    /// List what is in a bundle
    Inspect(BundleInspectArgs),
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("what").args(["kernel", "reference"]).required(true).multiple(true)))]
pub struct BundleExportArgs {
    #[command(flatten)]
    pub carry: CarryArgs,
    /// Carry this along too, and what refers to it: repository:tag below the registry's prefix (repeatable)
    #[arg(long, value_name = "NAME:TAG")]
    pub reference: Vec<String>,
    /// Write a bundle although something is missing that images are made from, or an image is not published
    #[arg(long)]
    pub incomplete: bool,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// The bundle to write
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
    /// Leave out what this previous bundle holds: the bundle, or what `bundle inspect -o json` printed of it
    #[arg(long, value_name = "FILE")]
    pub since: Option<PathBuf>,
    /// farrier's own image, to carry it along; it becomes `farrier` in the site's registry
    #[arg(long, value_name = "REFERENCE")]
    pub farrier_image: Option<String>,
}

#[derive(Debug, Args)]
pub struct BundleImportArgs {
    /// The bundle
    pub file: PathBuf,
    #[command(flatten)]
    pub registry: RegistryArg,
    /// Write the bundle's definitions into this directory, too
    #[arg(long, value_name = "DIR")]
    pub definitions_to: Option<PathBuf>,
    /// Replace files of that directory that differ from the bundle's
    #[arg(long, requires = "definitions_to")]
    pub overwrite: bool,
}

#[derive(Debug, Args)]
pub struct BundleInspectArgs {
    /// The bundle
    pub file: PathBuf,
    /// Read all of it, as an import does before it pushes anything
    #[arg(long)]
    pub verify: bool,
}

/// Images and kernels that are meant, with what they need.
#[derive(Debug, Args)]
pub struct CarryArgs {
    /// Kernel release, exactly as `uname -r` prints it (repeatable)
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Vec<String>,
    #[command(flatten)]
    pub platform: PlatformArgs,
    /// The driver image's name (repeatable), with those it needs [default: all]
    #[arg(long, value_name = "IMAGE")]
    pub image: Vec<String>,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("kernels").args(["kernel"]).required(true)))]
pub struct MirrorArgs {
    #[command(flatten)]
    pub carry: CarryArgs,
    #[command(flatten)]
    pub registry: RegistryArg,
}
