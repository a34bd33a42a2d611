//! Images to check: from a layout directory, an engine or a registry.

use std::path::{Path, PathBuf};

use farrier_core::{
    facts::annotations,
    image::ImageReference,
    kernel::{Architecture, KernelRelease},
};
use farrier_engines::{self as engine, EngineChoice};
use farrier_local::cache::BLOBS;
use farrier_payload::{self as payload, DecompressionBudget, ImageLayers, ImageTree};
use farrier_store::registry::{LayoutRegistry, Registry, RegistryError, RemoteRegistry};
use kmod::PayloadModule;
use oci::{AnyManifest, Descriptor, ImageIndex, ImageManifest};
use tempfile::TempDir;

use super::Context;
use crate::{
    CliError, Result, env_vars,
    settings::{self, Settings},
};

/// The modules to check, with their files.
#[derive(Default)]
pub(super) struct Checked {
    pub modules: Vec<PayloadModule>,
    /// Path of each module, in the same order.
    pub files: Vec<PathBuf>,
    /// Temporary directories that hold some of the files.
    pub unpacked: Vec<TempDir>,
    /// Firmware files of the images (`lib/firmware/...`). `None` if a subject is not an image, because other
    /// firmware may then be present on a node.
    pub firmware: Option<Vec<String>>,
}

/// An image whose layers are local files.
pub(super) struct OpenImage {
    /// Name that the user gave.
    name: String,
    layers: ImageLayers,
    /// Kernel of the image: from farrier's annotation, or the only one that the image has modules for.
    pub kernel: Option<KernelRelease>,
    /// Holds files that were fetched for this check only.
    _scratch: Option<TempDir>,
}

impl OpenImage {
    /// Opens `oci:PATH[:TAG|@DIGEST]`, `docker:REF` or a registry's `host/repository:tag`.
    pub async fn open(context: &Context<'_>, argument: &str) -> Result<Self> {
        let arch = settings::architecture(&context.args.platform)?;
        let image = if let Some(location) = argument.strip_prefix("oci:") {
            layout(argument, location, arch)
        } else if let Some(name) = argument.strip_prefix("docker:") {
            in_engine(context, argument, name).await
        } else {
            let reference =
                argument.parse().ok().filter(|image: &ImageReference| image.repository.host().is_some());
            let reference = reference.ok_or_else(|| {
                CliError::usage(format!(
                    "{argument}: no such file or directory, and not an image: expected oci:PATH[:TAG|@DIGEST], docker:REF or \
                     host/repository:tag"
                ))
            })?;
            in_registry(context.settings()?, reference, arch).await
        };
        let image = image.map_err(|error| error.of_image(argument))?;
        if image.kernel.is_some() || context.args.kernel.is_some() || context.args.host {
            return Ok(image);
        }
        image.with_its_only_kernel()
    }

    fn with_its_only_kernel(mut self) -> Result<Self> {
        let (_, ImageTree { releases, .. }) = self.unpack(None)?;
        if let [only] = &releases[..] {
            self.kernel = only.parse().ok();
        }
        if releases.len() > 1 && all_are_kernels(&releases) {
            let releases = releases.join(", ");
            return Err(CliError::usage(format!(
                "image {} has modules for {releases}: choose one with --kernel",
                self.name
            )));
        }
        Ok(self)
    }

    /// Reads the image's modules for a kernel.
    pub fn read(&self, release: &KernelRelease, budget: &DecompressionBudget) -> Result<Checked> {
        let (dest, ImageTree { releases, firmware }) = self.unpack(Some(release))?;
        if !releases.iter().any(|found| found == release.as_str()) {
            let hint = match &releases[..] {
                [] => "it has none below any lib/modules/<release>/".to_owned(),
                some => format!("it has modules for {}", some.join(", ")),
            };
            let message = format!("image {} has no modules for {release}", self.name);
            return Err(CliError::absent(message, hint));
        }
        let modules = payload::read_modules(dest.path(), budget);
        let mut modules = modules.map_err(|error| CliError::from(error).of_image(&self.name))?;
        let of_release = format!("lib/modules/{release}/");
        modules.retain(|module| module.path.contains(&of_release));
        let firmware = firmware.iter().map(|file| format!("lib/firmware/{file}")).collect();
        let files = module_paths(dest.path(), &modules);
        Ok(Checked { modules, files, unpacked: vec![dest], firmware: Some(firmware) })
    }

    fn unpack(&self, release: Option<&KernelRelease>) -> Result<(TempDir, ImageTree)> {
        let of_image = |error: CliError| error.of_image(&self.name);
        let dest = tempfile::tempdir().map_err(|error| of_image(error.into()))?;
        let tree = payload::unpack_image(&self.layers, dest.path(), release);
        Ok((dest, tree.map_err(|error| of_image(error.into()))?))
    }
}

/// Returns the paths of modules below a directory.
pub(super) fn module_paths(base: &Path, modules: &[PayloadModule]) -> Vec<PathBuf> {
    modules.iter().map(|module| base.join(&module.path)).collect()
}

/// Whether every name is a kernel release. Directories such as `lib/modules/extra/` have other names.
fn all_are_kernels(releases: &[String]) -> bool {
    releases.iter().all(|release| release.parse::<KernelRelease>().is_ok())
}

/// Returns the kernel that farrier's annotation names.
fn annotated_kernel(manifest: &ImageManifest) -> Option<KernelRelease> {
    manifest.annotations.get(annotations::KERNEL_RELEASE)?.parse().ok()
}

/// Opens an image in a layout directory that any tool may have written.
fn layout(argument: &str, location: &str, arch: Architecture) -> Result<OpenImage> {
    let (root, selector) = split_location(location);
    if !root.join("index.json").is_file() {
        let message = format!("{} is not an image layout: it has no index.json", root.display());
        return Err(CliError::hinted(message, "give oci:PATH, oci:PATH:TAG or oci:PATH@sha256:..."));
    }
    let layout = LayoutRegistry::new(root);
    let mut stored = layout.read(choose(&layout.index()?, selector)?).map_err(damaged)?;
    // An entry can itself be an index: an image for several platforms.
    if let Some(image) = AnyManifest::image_for_arch(&stored.bytes, arch.as_str())? {
        stored = layout.read(&image).map_err(damaged)?;
    }
    let manifest = ImageManifest::parse(&stored.bytes)?;
    let layers = manifest.layers.iter().map(|layer| layout.verified_blob(&layer.digest));
    let files = layers.collect::<Result<_, _>>().map_err(damaged)?;
    Ok(OpenImage {
        name: argument.to_owned(),
        layers: ImageLayers::Files(files),
        kernel: annotated_kernel(&manifest),
        _scratch: None,
    })
}

/// Reports a digest mismatch as damage: in a layout directory, a retry does not help.
fn damaged(error: RegistryError) -> CliError {
    match error {
        RegistryError::Digest { .. } => CliError::hinted(error.to_string(), "recreate the layout"),
        other => other.into(),
    }
}

/// Splits a location into the directory and the name or digest after it. A path may also contain colons.
fn split_location(location: &str) -> (PathBuf, Option<&str>) {
    if let Some((path, _)) = location.split_once("@sha256:") {
        return (PathBuf::from(path), location.get(path.len() + 1..));
    }
    if Path::new(location).is_dir() {
        return (PathBuf::from(location), None);
    }
    // Take the shortest prefix that is a directory. The rest is a name, which may also contain a colon.
    let colons = location.match_indices(':').map(|(index, _)| index);
    for index in colons {
        if let (Some(path), Some(name)) = (location.get(..index), location.get(index + 1..))
            && Path::new(path).is_dir()
        {
            return (PathBuf::from(path), Some(name));
        }
    }
    (PathBuf::from(location), None)
}

/// Chooses a manifest by digest, by name or by the tag at the end of the name. Without any of these, chooses
/// the only image.
fn choose<'i>(index: &'i ImageIndex, selector: Option<&str>) -> Result<&'i Descriptor> {
    let name = |descriptor: &'i Descriptor| {
        descriptor.annotations.get(annotations::REF_NAME).map_or("", String::as_str)
    };
    let is_wanted = |descriptor: &&Descriptor| match selector {
        // The index also lists reports and signatures.
        None => descriptor.artifact_type.is_none(),
        Some(text) if text.starts_with("sha256:") => descriptor.digest.as_str() == text,
        Some(text) => {
            let name = descriptor.annotations.get(annotations::REF_NAME).map_or("", String::as_str);
            name == text || name.rsplit_once(':').is_some_and(|(_, tag)| tag == text)
        }
    };
    let matching: Vec<&Descriptor> = index.manifests.iter().filter(is_wanted).collect();
    if let [only] = matching[..] {
        return Ok(only);
    }
    let mut names: Vec<&str> = index.manifests.iter().map(name).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.dedup();
    let list = if names.is_empty() { "images without names".to_owned() } else { names.join(", ") };
    let message = match selector {
        Some(selector) if matching.is_empty() => format!("the layout has no {selector:?}; it has {list}"),
        _ => format!("{} images in the layout match: {list}", matching.len()),
    };
    Err(CliError::hinted(message, "name one of them: oci:PATH:NAME or oci:PATH@sha256:..."))
}

/// Exports an image from the local engine, as `docker save` does.
async fn in_engine(context: &Context<'_>, argument: &str, name: &str) -> Result<OpenImage> {
    let env = env_vars::engine_env();
    // Podman's socket offers the same API.
    let engine = match engine::connect_docker(EngineChoice::Docker, &env).await {
        Ok(engine) => engine,
        Err(no_docker) => engine::connect_docker(EngineChoice::Podman, &env).await.map_err(|_| no_docker)?,
    };
    let scratch = tempfile::tempdir()?;
    let archive = scratch.path().join("image.tar");
    if !engine.export_image(name, &archive, &context.session.stop.cancel).await? {
        let message = format!("{} has no image {name}", engine.describe());
        return Err(CliError::hinted(
            message,
            "pull it first, or name it with its registry, without `docker:`",
        ));
    }
    Ok(OpenImage {
        name: argument.to_owned(),
        layers: ImageLayers::Archive(archive),
        kernel: None,
        _scratch: Some(scratch),
    })
}

/// Fetches an image from a registry and keeps its layers in the cache.
async fn in_registry(
    settings: &Settings,
    reference: ImageReference,
    arch: Architecture,
) -> Result<OpenImage> {
    let remote = RemoteRegistry::new("registries".to_owned(), &settings.registry);
    let (ImageReference { repository, version }, remote) = (&reference, &remote);
    let missing = || CliError::hinted("the registry does not have it", "check the name and the tag");
    let stored = remote.image(repository, version, arch.as_str()).await?.ok_or_else(missing)?;
    let manifest = ImageManifest::parse(&stored.bytes)?;
    let mut files = Vec::new();
    for layer in &manifest.layers {
        let fetch = |to: PathBuf| async move {
            Ok::<_, CliError>(remote.fetch_blob(repository, &layer.digest, layer.size, &to).await?)
        };
        files.push(settings.cache.get_or_make_file(BLOBS, layer.digest.hex(), fetch).await?);
    }
    Ok(OpenImage {
        name: reference.to_string(),
        layers: ImageLayers::Files(files),
        kernel: annotated_kernel(&manifest),
        _scratch: None,
    })
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
