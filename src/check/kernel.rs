//! The kernel to check against: its header set and further sources of facts.

use std::{collections::BTreeSet, fs, path::Path};

use farrier_core::kernel::{Architecture, KernelFamily, KernelRelease, KernelTarget, match_family};
use farrier_inputs::{HeaderLookup, KernelImage, KernelImageLookup, read_header_set, read_host};
use kmod::{ExtraKernelFacts, KernelFacts};

use super::Context;
use crate::{CliError, Result, headers, settings};

/// The kernel to check against.
pub(super) struct Kernel {
    /// Facts about the kernel.
    pub facts: KernelFacts,
    /// Hint for settling an unknown verdict, if any.
    pub hint: Option<String>,
    /// Target for finding the kernel image. `None` after the image is read.
    target: Option<KernelTarget>,
    /// Kernel image, if it was read.
    image: Option<KernelImage>,
}

impl Kernel {
    /// Finds the kernel of the arguments. `suggested` is the kernel that the checked images are for.
    pub async fn find(context: &Context<'_>, suggested: Option<&KernelRelease>) -> Result<Self> {
        let args = context.args;
        let arch = settings::architecture(&args.platform)?;
        if args.host {
            let facts = read_host(Path::new("/"), arch)?;
            let hint = "install the headers of the running kernel (linux-headers of its release), or check against it with --kernel";
            let hint = facts.symbols.is_none().then(|| hint.to_owned());
            return Ok(Self { facts, hint, target: None, image: None });
        }
        let image = match &args.kernel_image {
            Some(path) => Some(given_image(context, path, arch).await?),
            None => None,
        };
        let release = release(context, image.as_ref(), suggested)?;
        let (facts, target) = if let Some(root) = &args.headers {
            let (facts, _) = read_header_set(root, &settings::parse("--kernel", &release)?, arch)?;
            // The platform may be unknown here, and is not required.
            (facts, settings::target(&release, &args.platform).ok())
        } else {
            let target = settings::target(&release, &args.platform)?;
            // Missing headers prevent the check and refuse no module, so the exit code differs from a
            // build's.
            match headers::find(context.settings()?, &target).await? {
                HeaderLookup::Found(headers) => (headers.facts, Some(target)),
                HeaderLookup::Missing { looked_for, hint } => {
                    return Err(missing("headers", &looked_for, hint));
                }
            }
        };
        let mut kernel = Self { facts, hint: None, target, image: None };
        match image {
            Some(image) => kernel.use_image(context, image).await?,
            None => kernel.use_cached_image(context).await?,
        }
        Ok(kernel)
    }

    /// Fetches the kernel image if the arguments allow it, and returns the facts that it adds.
    pub async fn extra_facts(&mut self, context: &Context<'_>) -> Result<Option<ExtraKernelFacts>> {
        let Some(target) = self.target.clone().filter(|_| context.args.fetch_kernel_image) else {
            return Ok(None);
        };
        self.fetch_image(context, &target).await?;
        Ok(Some(self.facts.beyond_headers.clone()))
    }

    /// Returns the image to boot: the one that was read, else this machine's with `--host`, else the
    /// family's.
    #[cfg(feature = "bootcheck")]
    pub async fn bootable(&mut self, context: &Context<'_>) -> Result<KernelImage> {
        if let Some(image) = &self.image {
            return Ok(image.clone());
        }
        if context.args.host {
            return Ok(KernelImage::of_host(Path::new("/"), &self.facts.release, self.facts.arch)?);
        }
        if let Some(target) = self.target.clone() {
            self.fetch_image(context, &target).await?;
        }
        self.image.clone().ok_or_else(|| CliError::usage(format!("--boot: {NO_IMAGE_TO_BOOT}")))
    }

    async fn fetch_image(&mut self, context: &Context<'_>, target: &KernelTarget) -> Result<()> {
        let settings = context.settings()?;
        let family = headers::family(settings, target)?;
        match settings.fetcher.kernel_images().find(family, target).await? {
            KernelImageLookup::Found(image) => self.use_image(context, *image).await,
            KernelImageLookup::Missing { looked_for, hint } => Err(missing("image", &looked_for, hint)),
        }
    }

    /// Uses the family's kernel image if it is available locally. Otherwise sets a hint how to get it.
    async fn use_cached_image(&mut self, context: &Context<'_>) -> Result<()> {
        let Some(target) = self.target.clone() else { return Ok(()) };
        // A check with --headers needs no definitions, so broken definitions must not fail it.
        let settings = match context.settings() {
            Ok(settings) => settings,
            Err(_) if context.args.headers.is_some() && !context.args.fetch_kernel_image => return Ok(()),
            Err(error) => return Err(error),
        };
        let Some(family) = match_family(&settings.definitions.families, &target) else {
            self.hint = Some(NO_IMAGE.to_owned());
            return Ok(());
        };
        let image = settings.fetcher.kernel_images().find_local(family, &target).await?;
        match image {
            Some(image) => self.use_image(context, image).await?,
            None => self.hint = Some(hint(family)),
        }
        Ok(())
    }

    async fn use_image(&mut self, context: &Context<'_>, image: KernelImage) -> Result<()> {
        self.facts.beyond_headers = context.settings()?.fetcher.kernel_images().facts(&image).await?;
        self.hint = None;
        self.target = None;
        self.image = Some(image);
        Ok(())
    }
}

#[cfg(feature = "bootcheck")]
const NO_IMAGE_TO_BOOT: &str = "the kernel family is not known; name the image with --kernel-image FILE";
const NO_IMAGE: &str = "--kernel-image FILE (the kernel's vmlinuz or vmlinux) provides what its headers lack";

fn hint(family: &KernelFamily) -> String {
    if family.spec.kernel_image.is_some() {
        "--fetch-kernel-image fetches the kernel image, which provides what its headers lack".to_owned()
    } else {
        NO_IMAGE.to_owned()
    }
}

fn missing(artifact: &str, looked_for: &str, hint: String) -> CliError {
    CliError::absent(format!("find the {artifact} of the kernel: there is no {looked_for}"), hint)
}

async fn given_image(context: &Context<'_>, path: &Path, arch: Architecture) -> Result<KernelImage> {
    if !path.is_file() {
        return Err(CliError::usage(format!("--kernel-image {}: there is no such file", path.display())));
    }
    let release = context.args.kernel.as_deref();
    let release = release.map(|release| settings::parse("--kernel", release)).transpose()?;
    Ok(context.settings()?.fetcher.kernel_images().file(path, release.as_ref(), arch).await?)
}

/// Returns the release of `--kernel`, else of the kernel image, the checked images or the header directory.
fn release(
    context: &Context<'_>,
    image: Option<&KernelImage>,
    suggested: Option<&KernelRelease>,
) -> Result<String> {
    let args = context.args;
    if let Some(release) = &args.kernel {
        return Ok(release.clone());
    }
    if let Some(release) = image.map(|image| &image.release).or(suggested) {
        return Ok(release.to_string());
    }
    let releases = args.headers.as_deref().map(releases_below).unwrap_or_default();
    match (&args.headers, &releases[..]) {
        (Some(_), [only]) => Ok(only.clone()),
        (Some(root), [_, ..]) => Err(CliError::usage(format!(
            "{} has headers of {}: choose one with --kernel",
            root.display(),
            releases.join(", ")
        ))),
        _ => Err(CliError::usage(
            "no kernel given: pass --kernel RELEASE (as `uname -r` prints it there), or --host for this machine's kernel",
        )),
    }
}

/// Returns the releases that have a build directory below a root.
fn releases_below(root: &Path) -> Vec<String> {
    let releases: BTreeSet<String> = ["lib/modules", "usr/lib/modules"]
        .iter()
        .filter_map(|dir| fs::read_dir(root.join(dir)).ok())
        .flatten()
        .flatten()
        .filter(|entry| fs::symlink_metadata(entry.path().join("build")).is_ok())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    releases.into_iter().collect()
}
