//! The needs stage fetches the trees that an image is compiled against: trees that published images expose, verified by
//! digest, and host trees that the user provides, such as the headers of a driver that the host ships.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use farrier_core::{
    facts::ImageFacts,
    image::{Digest, ImageName, ImageReference, Need, Version},
};
use farrier_engines::ContextEntry;
use farrier_inputs::{HostTree, HostTreeLookup};
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_payload::DecompressionBudget;
use kmod::{NeededTable, SymbolTable, proprietary_modules};
use oci::{ImageManifest, error_chain};

use super::{
    cell::plan_cell,
    cell_build::{CellBuild, NeedInputs, ensure_planned},
};
use crate::{
    images::StoredImage,
    services::{BuildError, BuildServices, ImageAccess, Result, Stage},
};

/// Kind of the cache entries with exposed trees, keyed by the tree's digest.
const EXPOSED: &str = "exposed";
/// Kind of the cache entries with modules of needed images, keyed by the image's digest.
const MODULES: &str = "needed-modules";

/// A published image whose exposed trees are needed.
struct NeededImage {
    name: ImageName,
    image: ImageReference,
    exposed: Digest,
    /// Whether the build compiles against the image. Otherwise only the loaded modules need the image.
    compiled_against: bool,
}

/// Error for a needed image that lacks the headers it claims to expose.
fn missing_headers_error(image: &str, why: &str) -> BuildError {
    unusable_error(format!("needed image {image} does not hold the headers that it claims to expose: {why}"))
}

/// Error for the content of a needed image. The failure is not permanent: the needed image may be republished while the
/// inputs of this build stay the same.
fn unusable_error(message: String) -> BuildError {
    BuildError::unmet(
        message,
        "delete the needed image's tag: farrier then rebuilds the needed image first, and this image afterwards",
    )
}

/// Error for a needed image that has disappeared since the build was planned.
fn need_not_found(image: &ImageReference) -> BuildError {
    BuildError::unmet(
        format!("needed image {image} is no longer in the registry"),
        "run again: farrier then builds and publishes it first",
    )
}

/// Returns the inputs from the cell's needs, fetching those that the cache lacks.
pub(super) async fn fetch(build: &CellBuild<'_>) -> Result<NeedInputs> {
    let mut needed = NeedInputs::default();
    if build.cell.needs.is_empty() {
        return Ok(needed);
    }
    build.stage(Stage::Needs);
    add_host_trees(build, &mut needed).await?;
    let (mut tables, mut modules) = (Vec::new(), Vec::new());
    let budget = DecompressionBudget::of_build(build.image.spec.build.deadline, Duration::ZERO);
    let budget = Arc::new(budget);
    for image in needed_images(build).await? {
        let ImageReference { repository, version } = &image.image;
        let Version::Digest(digest) = version else { return Err(need_not_found(&image.image)) };
        // The build compiles the image's headers and the check relies on its symbols, so the image must be trusted.
        StoredImage { services: build.services, repository, digest }.ensure_trusted("needed image").await?;
        let cache = &build.services.cache;
        let fetch = |dest| fetch_exposed(build.services, &image, dest);
        let tree = cache.get_or_make(EXPOSED, image.exposed.hex(), fetch).await?;
        let image_tables = read_tables(&image, &tree).await?;
        if image_tables.is_empty() {
            build.note(&format!("{} exposes no Module.symvers: nothing can use its symbols", image.name));
        }
        let boot_check = build.image.spec.check.boot;
        // The boot check loads the modules. The symbol check needs their licenses.
        if boot_check || !image_tables.is_empty() {
            let release = build.cell.target.release.as_str();
            let fetch = |dest| fetch_modules(build.services, &image.image, release, dest);
            let directory = cache.get_or_make(MODULES, digest.hex(), fetch).await?;
            if boot_check {
                needed.modules.push(directory.clone());
            }
            let budget = Arc::clone(&budget);
            modules.extend(blocking(move || payload::read_modules(&directory, &budget)).await?);
        }
        tables.extend(image_tables);
        if image.compiled_against {
            needed.context.push(ContextEntry { dest: format!("needs/{}", image.name), from: tree });
        }
    }
    // A module may inherit a taint from a module of another image, so each table gets the proprietary modules of all images.
    let proprietary = proprietary_modules(&modules);
    for table in tables {
        needed.tables.push(NeededTable { proprietary: Some(proprietary.clone()), ..table });
    }
    Ok(needed)
}

/// Adds the cell's host trees to the build context, and their symbols to the check.
async fn add_host_trees(build: &CellBuild<'_>, needed: &mut NeedInputs) -> Result<()> {
    let CellBuild { services, cell, .. } = build;
    for need in &build.image.spec.needs {
        let Need::Tree { name, tree } = need else { continue };
        let found = services.fetcher.host_tree(tree, &cell.target).await?;
        let HostTree { root, digest, symvers, origin } = match found {
            HostTreeLookup::Found(host_tree) => host_tree,
            HostTreeLookup::Missing { looked_for, hint } => {
                return Err(BuildError::headers_missing(&looked_for, hint));
            }
        };
        let planned = cell.needs.iter().find(|planned| planned.name == *name);
        let is_planned = planned.is_some_and(|planned| planned.exposed == digest);
        ensure_planned(is_planned, format!("the tree of need {name} (now {origin})"))?;
        let mut texts = Vec::new();
        for path in symvers {
            let bytes = fs_err::tokio::read(root.join(&path)).await?;
            texts.push((path, String::from_utf8_lossy(&bytes).into_owned()));
        }
        needed.tables.extend(parse_tables(name.as_str(), &origin, texts)?);
        needed.context.push(ContextEntry { dest: format!("needs/{name}"), from: root });
    }
    Ok(())
}

/// Returns the images that the cell is compiled against, then their own needs, nearest first.
async fn needed_images(build: &CellBuild<'_>) -> Result<Vec<NeededImage>> {
    let needs = &build.cell.needs;
    let mut images: Vec<NeededImage> = needs
        .iter()
        .filter_map(|need| {
            let (name, exposed) = (need.name.clone(), need.exposed.clone());
            Some(NeededImage { name, image: need.image.clone()?, exposed, compiled_against: true })
        })
        .collect();
    let mut seen: BTreeSet<ImageName> = needs.iter().map(|need| need.name.clone()).collect();
    let mut next = 0;
    while let Some(image) = images.get(next) {
        next += 1;
        let definition = build.services.definitions.images.get(&image.name);
        let needs = definition.into_iter().flat_map(|image| &image.spec.needs);
        for name in needs.filter_map(|need| need.image()) {
            if seen.insert(name.clone()) {
                images.push(published_need(build, name).await?);
            }
        }
    }
    Ok(images)
}

/// Looks up an indirect need, which was published before the direct need could be built.
async fn published_need(build: &CellBuild<'_>, name: &ImageName) -> Result<NeededImage> {
    let needed = plan_cell(build.services, name, &build.cell.target).await?;
    let mut image = needed.reference.clone();
    let found = build.services.look_up_for(&image, needed.target.arch).await?;
    let published = found.filter(|found| found.is_of(&needed)).ok_or_else(|| need_not_found(&image))?;
    let exposed =
        published.exposed.ok_or_else(|| missing_headers_error(&image.to_string(), "it exposes nothing"))?;
    image.version = Version::Digest(published.digest);
    Ok(NeededImage { name: name.clone(), image, exposed, compiled_against: false })
}

/// Fetches the exposed trees of a published image, at their original paths below one directory.
async fn fetch_exposed(services: &BuildServices, needed: &NeededImage, dest: PathBuf) -> Result<()> {
    let NeededImage { name, image, exposed, compiled_against: _ } = needed;
    let headers_error = |why: String| missing_headers_error(&image.to_string(), &why);
    let definition =
        services.definitions.images.get(name).ok_or_else(|| BuildError::definition_gone(name.as_str()))?;
    let patterns = definition.spec.exposes.clone();
    let manifest = needed_manifest(&services.images, image).await?;
    let recorded = ImageFacts::from_annotations(&manifest.annotations).unwrap_or_default().exposed_digest;
    if recorded.as_ref() != Some(exposed) {
        let recorded = recorded.map_or_else(|| "nothing".to_owned(), |digest| digest.to_string());
        return Err(headers_error(format!(
            "expected {exposed}, but its annotations say that it exposes {recorded}"
        )));
    }
    let work = services.cache.scratch()?;
    let (blob, tree) = (work.path().join("layer"), work.path().join("tree"));
    fetch_payload(&services.images, image, &manifest, &blob).await?;
    fs_err::create_dir(&tree)?;
    let unpacked = tree.clone();
    let content = blocking(move || {
        payload::unpack_exposed(&blob, &patterns, &unpacked).map_err(|error| error_chain(&error))?;
        payload::read_exposed(&unpacked, &patterns).map_err(|error| error_chain(&error))
    })
    .await;
    let digest = content.map_err(headers_error)?.digest;
    if digest != *exposed {
        return Err(headers_error(format!("its annotations say {exposed}, but its content is {digest}")));
    }
    Ok(fs_err::rename(&tree, &dest)?)
}

/// Fetches the modules of a needed image for one kernel.
async fn fetch_modules(
    services: &BuildServices,
    image: &ImageReference,
    release: &str,
    dest: PathBuf,
) -> Result<()> {
    let manifest = needed_manifest(&services.images, image).await?;
    let work = services.cache.scratch()?;
    let blob = work.path().join("layer");
    fetch_payload(&services.images, image, &manifest, &blob).await?;
    let release = release.to_owned();
    let unpacked = blocking(move || payload::unpack_modules(&blob, &release, &dest)).await;
    unpacked.map_err(|error| {
        unusable_error(format!("cannot read the modules of needed image {image}: {}", error_chain(&error)))
    })
}

async fn needed_manifest(access: &ImageAccess, image: &ImageReference) -> Result<ImageManifest> {
    let ImageReference { repository, version } = image;
    let stored = access.registry_of_needs(repository).manifest(repository, version).await?;
    Ok(ImageManifest::parse(&stored.ok_or_else(|| need_not_found(image))?.bytes)?)
}

async fn fetch_payload(
    access: &ImageAccess,
    image: &ImageReference,
    manifest: &ImageManifest,
    to: &Path,
) -> Result<()> {
    let repository = &image.repository;
    let layer = manifest
        .payload_layer()
        .ok_or_else(|| missing_headers_error(&image.to_string(), "it has no layers"))?;
    Ok(access.registry_of_needs(repository).fetch_blob(repository, &layer.digest, layer.size, to).await?)
}

/// Reads the symbol tables of an exposed tree.
async fn read_tables(needed: &NeededImage, tree: &Path) -> Result<Vec<NeededTable>> {
    let (name, image, tree) = (needed.name.to_string(), needed.image.to_string(), tree.to_owned());
    blocking(move || parse_tables(&name, &image, payload::read_symbol_tables(&tree)?)).await
}

/// Parses the symbol tables of one need. Errors name `from` as their origin.
fn parse_tables(need: &str, from: &str, texts: Vec<(PathBuf, String)>) -> Result<Vec<NeededTable>> {
    let read = |(path, text): (PathBuf, String)| match SymbolTable::parse(&text) {
        // `fetch` adds the proprietary modules of images. A host tree has no modules to read licenses from, so its symbols
        // are assumed not to be proprietary.
        Ok(symbols) => {
            Ok(NeededTable { image: need.to_owned(), symbols, proprietary: Some(BTreeSet::new()) })
        }
        Err(error) => Err(missing_headers_error(
            from,
            &format!("its /{} is not a symbol table: {error}", path.display()),
        )),
    };
    texts.into_iter().map(read).collect()
}

#[cfg(test)]
#[path = "host_trees_tests.rs"]
mod host_trees_tests;
#[cfg(test)]
#[path = "needs_tests.rs"]
mod tests;
