//! `farrier pull`: fetches an output of a published image, and verifies it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use farrier_builder::{images, services::BuildServices};
use farrier_core::image::{HostOutput, ImageReference, Repository, Version};
use farrier_engines::EngineChoice;
use farrier_host_artifacts::{self as host, Pulled};
use indicatif::HumanBytes;

use super::{
    CliError, Exit, Result, env_vars as vars,
    session::Session,
    settings::{host_os, parse},
    verify,
};

#[derive(Debug, Args)]
pub struct PullArgs {
    /// What to fetch
    #[arg(value_name = "OUTPUT")]
    pub what: OutputArg,
    /// Image: NAME with --kernel and --registry for the newest driver version, NAME:TAG with --registry,
    /// host/repository:tag or @sha256:..., or oci:PATH:NAME:TAG of a layout directory
    #[arg(value_name = "IMAGE")]
    pub image: String,
    /// Kernel release, as `uname -r` prints it [default: the image's]
    #[arg(long, value_name = "RELEASE")]
    pub kernel: Option<String>,
    /// Operating system id of the image, as in os-release [default: this machine's; if it has no image, any]
    #[arg(long, value_name = "ID", requires = "os_version")]
    pub os: Option<String>,
    /// Operating system version of the image, as VERSION_ID in os-release [default: see --os]
    #[arg(long, value_name = "VERSION", requires = "os")]
    pub os_version: Option<String>,
    /// Architecture, amd64 or arm64 [default: this machine's]
    #[arg(long, value_name = "ARCH")]
    pub arch: Option<String>,
    /// File to write [default: the output's name, in the working directory]
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// Layout directory that also gets the published output with its signatures. `--registry oci:DIR` then reads it without a
    /// network
    #[arg(long, value_name = "DIR")]
    pub store: Option<PathBuf>,
    /// Trusted public key, PEM; one of the keys must have signed (repeatable) [default: what
    /// policy.requireSigned in site.yaml asks for, else the key of imageSigning]
    #[arg(long, value_name = "PEM")]
    pub key: Vec<PathBuf>,
    /// Skip signatures; the file may then come from anyone
    #[arg(long, conflicts_with = "key")]
    pub insecure_no_signature: bool,
    /// Registry of the image: host[:port]/path, or oci:PATH for a layout directory
    #[arg(long, env = vars::FARRIER_REGISTRY, value_name = "LOCATION", hide_env_values = true)]
    pub registry: Option<String>,
}

/// An output, on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OutputArg {
    /// A Debian package
    Deb,
    /// A Debian package that follows the kernel's meta package
    DebMeta,
    /// An archive to append to an initramfs
    Initramfs,
    /// A system extension for systemd-sysext
    Sysext,
}

/// Writes the file, and prints its name.
pub async fn pull(session: &Session, args: PullArgs) -> Result<Exit> {
    let output = match args.what {
        OutputArg::Deb => HostOutput::Deb,
        OutputArg::DebMeta => HostOutput::DebMeta,
        OutputArg::Initramfs => HostOutput::Initramfs,
        OutputArg::Sysext => HostOutput::Sysext,
    };
    let release = args.kernel.as_deref().map(|kernel| parse("--kernel", kernel)).transpose()?;
    let arch = parse("--arch", args.arch.as_deref().unwrap_or(std::env::consts::ARCH))?;
    let (services, repository, version) = open(session, &args)?;
    let signers = if args.insecure_no_signature {
        None
    } else {
        Some(images::verification_keys(&services, &args.key, 1).await?)
    };
    let is_os_required = args.os.is_some();
    let (os, os_version) =
        if is_os_required { (args.os.clone(), args.os_version.clone()) } else { host_os() };
    let os = os.zip(os_version).map(|(os, version)| format!("{os} {version}"));
    let target = host::ImageTarget { release: release.as_ref(), arch, os: os.as_deref(), is_os_required };
    let digest = host::find_image(&services, &repository, version.as_ref(), target).await?;
    let image = images::StoredImage { services: &services, repository: &repository, digest: &digest };
    // A repository's last component is the name of a definition. An image that is named by its tag may be a copy under another name.
    let name = args.image.rsplit('/').next().filter(|_| version.is_none());
    let requested =
        host::Requested { output, name, release: release.as_ref(), published_only: args.store.is_some() };
    let pulled = host::pull(image, requested, signers.as_ref(), args.to.as_deref()).await?;
    if let Some(store) = &args.store {
        let to = session.services(Some(&format!("oci:{}", store.display())), EngineChoice::Auto)?;
        host::store(image, &pulled.artifact, &to).await?;
    }
    session.show(&pulled, text)?;
    Ok(Exit::Done)
}

/// Returns the registry and the image. A name without a tag needs `--registry`, and the kernel then selects the image.
fn open(session: &Session, args: &PullArgs) -> Result<(BuildServices, Repository, Option<Version>)> {
    let registry = args.registry.as_deref();
    if args.image.starts_with("oci:") || args.image.parse::<ImageReference>().is_ok() {
        let (services, ImageReference { repository, version }) =
            verify::open(session, &args.image, registry)?;
        return Ok((services, repository, Some(version)));
    }
    if registry.is_none() || args.kernel.is_none() {
        let message = format!("image: {:?} has no tag", args.image);
        return Err(CliError::hinted(message, "give NAME:TAG, or --registry and --kernel to find the image"));
    }
    let services = session.services(registry, EngineChoice::Auto)?;
    let repository = services.images.location.repository(&args.image);
    let repository = repository.map_err(|error| CliError::usage(format!("image: {error}")))?;
    Ok((services, repository, None))
}

fn text(pulled: &Pulled) -> String {
    let Pulled { output: _, image, file, digest, size, artifact: _, published, verified } = pulled;
    let from = if *published { "published with" } else { "built locally from" };
    let signature = if *verified { "signature verified" } else { "signature NOT verified" };
    format!("{}\n{digest}, {}\n{from} {image}, {signature}", file.display(), HumanBytes(*size))
}
