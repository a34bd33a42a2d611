//! Header sets that are not packages: files that the user provides, a part of an image, or an archive at an address.
//!
//! They are identified by their digests, which are known before anything large is fetched. The exception is an archive that only
//! a signature verifies.

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    image::{ImageReference, Version},
    kernel::{
        Architecture, DetachedSignature, DownloadedHeaders, FileProof, HeaderSource, ImageHeaders,
        KernelTarget, TarballHeaders, image_for, text_for,
    },
};
use farrier_local::{
    archive::links,
    blocking::stoppable,
    cache::{BLOBS, has_content},
    tree_removal::remove_tree,
};
use farrier_store::{StoreError, registry::Registry as _};
use fs_err as fs;
use oci::ImageManifest;
use url::Url;

use super::{FORMAT, KIND, layout, verify};
use crate::{
    FetchError, Fetcher, Lookup, Result, TREE,
    checksum::Checksum,
    digest,
    download::{DOWNLOADS, MAX_DOWNLOAD_SIZE, download_from_any, fetch_from, parse, plain_name},
    files::{copy_file, copy_tree, listing, make_directory, name_of, names_in, read_start},
    kernel_packages::TreeRecord,
    rpm::keys::Keys,
    unpack, with_release,
};

/// Kind of the records of files' checksums.
const RECORDS: &str = "published-headers";
/// Maximum size of a checksum list or a signature, in bytes.
const MAX_PROOF_SIZE: u64 = 1 << 20;
/// Name of the download in messages.
const WHAT: &str = "kernel headers";
/// Path that selects the kernel directories of an image instead of one path in it.
const ROOT: &str = "/";
/// Remedy if no headers are published for a kernel.
const HINT: &str = "define in the kernel family where the headers of this kernel are published";

/// Published headers of a kernel.
pub(super) struct Published {
    content: Content,
    /// Path of the headers in the content; `None` for its top.
    path: Option<String>,
    /// Hexadecimal digits.
    pub digest: String,
}

enum Content {
    /// A file or directory on this machine.
    Local(PathBuf),
    /// An image by digest.
    Image(ImageReference),
    /// A file at one of these addresses.
    File(Vec<Url>, Checksum),
}

/// Looks up the currently published headers of a kernel; returns `None` if the headers come from packages.
pub(super) async fn look_up(
    fetcher: &Fetcher,
    source: &HeaderSource,
    target: &KernelTarget,
) -> Result<Option<Lookup<Published>>> {
    Ok(match source {
        HeaderSource::Tarball(headers) => Some(on_disk(fetcher, headers, target).await?),
        HeaderSource::Oci(headers) => Some(in_image(fetcher, headers, target).await?),
        HeaderSource::Url(headers) => Some(Box::pin(at_address(fetcher, headers, target)).await?),
        HeaderSource::Apt(_) | HeaderSource::Rpm(_) => None,
    })
}

fn missing(looked_for: String) -> Lookup<Published> {
    Lookup::Missing { looked_for, hint: HINT.to_owned() }
}

async fn on_disk(
    fetcher: &Fetcher,
    headers: &TarballHeaders,
    target: &KernelTarget,
) -> Result<Lookup<Published>> {
    let path = fetcher.root.join(with_release(&headers.path, target));
    if !path.exists() {
        let hint = format!("put the headers of {} there, as a directory or a tarball", target.release);
        return Ok(Lookup::Missing { looked_for: path.display().to_string(), hint });
    }
    let digest = fetcher.digest_of(&path).await?.digest;
    Ok(Lookup::Found(Published { content: Content::Local(path), path: None, digest }))
}

async fn in_image(
    fetcher: &Fetcher,
    headers: &ImageHeaders,
    target: &KernelTarget,
) -> Result<Lookup<Published>> {
    let image = match image_for(&headers.image, target) {
        Ok(image) => image,
        Err(looked_for) => return Ok(missing(looked_for)),
    };
    let digest = match &image.version {
        Version::Digest(digest) => digest.clone(),
        version @ Version::Tag(_) => {
            let manifest = fetcher.registries().manifest(&image.repository, version).await;
            let Some(manifest) = manifest.map_err(StoreError::from)? else {
                return Ok(missing(format!("image {image}")));
            };
            manifest.digest
        }
    };
    let (hex, version) = (digest.hex().to_owned(), Version::Digest(digest));
    let content = Content::Image(ImageReference { repository: image.repository, version });
    let path = headers.path.as_ref().map_or_else(|| ROOT.to_owned(), |path| target.fill(path));
    Ok(Lookup::Found(Published { content, path: Some(path), digest: hex }))
}

async fn at_address(
    fetcher: &Fetcher,
    headers: &DownloadedHeaders,
    target: &KernelTarget,
) -> Result<Lookup<Published>> {
    let DownloadedHeaders { url, verify, path } = headers;
    let url = match text_for(url, target) {
        Ok(url) => parse(&url)?,
        Err(looked_for) => return Ok(missing(looked_for)),
    };
    let (proof_url, keys) = match verify {
        FileProof::Checksums(list) => (list, None),
        FileProof::Signature(DetachedSignature { url, signed_by }) => {
            let file = fetcher.root.join(signed_by);
            let Some(keys) = Keys::read(&file)? else {
                let file = file.display();
                return Ok(missing(format!("file {file} with the keys of the distribution")));
            };
            (url, Some(keys))
        }
    };
    let proof_url = target.fill(proof_url);
    // A change of keys invalidates the recorded checksum.
    let keys_digest = keys.as_ref().map(Keys::digest).unwrap_or_default();
    let key = digest::of_parts([url.as_str(), &proof_url, &keys_digest]);
    let cache = &fetcher.cache;
    // Reuse the recorded checksum while the file is in the cache: the published headers of a kernel release do not change.
    let recorded = match cache.read_record::<Checksum>(RECORDS, &key)? {
        Some(recorded) => cache.get(DOWNLOADS, recorded.hex())?.map(|_| recorded),
        None => None,
    };
    let urls = fetcher.net.url_candidates(&url);
    let checksum = match recorded {
        Some(recorded) => recorded,
        None => match verified_checksum(fetcher, keys, &url, &urls, &proof_url).await? {
            Ok(checksum) => {
                cache.write_record(RECORDS, &key, &checksum)?;
                checksum
            }
            Err(looked_for) => return Ok(missing(looked_for)),
        },
    };
    let path = path.as_ref().map(|path| target.fill(path));
    let digest = checksum.hex().to_owned();
    Ok(Lookup::Found(Published { content: Content::File(urls, checksum), path, digest }))
}

/// Returns the checksum of the file at an address, verified by a checksum list or by a signature of one of the keys. The inner
/// `Err` names what is missing.
async fn verified_checksum(
    fetcher: &Fetcher,
    keys: Option<Keys>,
    url: &Url,
    urls: &[Url],
    proof_url: &str,
) -> Result<Result<Checksum, String>> {
    let scratch = fetcher.scratch()?;
    let (proof, file) = (scratch.path().join("proof"), scratch.path().join("file"));
    let proof_urls = fetcher.net.url_candidates(&parse(proof_url)?);
    if download(fetcher, &proof_urls, MAX_PROOF_SIZE, &proof).await?.is_none() {
        return Ok(Err(format!("file {proof_url}")));
    }
    let Some(keys) = keys else {
        let list = read_start(&proof, MAX_PROOF_SIZE)?.unwrap_or_default();
        let found = Checksum::in_list(&String::from_utf8_lossy(&list), &plain_name(url));
        return Ok(found.ok_or_else(|| format!("checksum of {} in {proof_url}", plain_name(url))));
    };
    let Some(checksum) = download(fetcher, urls, MAX_DOWNLOAD_SIZE, &file).await? else {
        return Ok(Err(format!("file {url}")));
    };
    keys.verify_file(&scratch, &file, &proof, url.as_str()).await?;
    let copy = |dir: PathBuf| stoppable(move |_| copy_file(&file, &dir.join("headers")));
    fetcher.cache.get_or_make_intact(DOWNLOADS, checksum.hex(), has_content, copy).await?;
    Ok(Ok(checksum))
}

/// Downloads a file from one of these addresses; returns `None` if it does not exist.
async fn download(fetcher: &Fetcher, urls: &[Url], max_size: u64, path: &Path) -> Result<Option<Checksum>> {
    match download_from_any(&fetcher.net, WHAT, urls, None, max_size, path).await {
        Err(FetchError::Status(_, 404 | 410)) => Ok(None),
        outcome => outcome.map(Some),
    }
}

/// Fetches the header set into the cache.
pub(super) async fn fetch(fetcher: &Fetcher, from: Published, target: &KernelTarget) -> Result<TreeRecord> {
    let Published { content, path, digest } = from;
    let origin = match &content {
        Content::Local(path_on_disk) => format!("{} sha256:{digest}", name_of(path_on_disk)),
        Content::Image(image) => format!("{} sha256:{digest}", image.repository),
        Content::File(urls, checksum) => {
            let name = urls.first().map_or_else(|| WHAT.to_owned(), plain_name);
            format!("{name} {checksum}")
        }
    };
    let local = match &content {
        Content::Local(path_on_disk) => Some((path_on_disk.clone(), digest.clone())),
        Content::Image(_) | Content::File(..) => None,
    };
    let parts: Vec<String> = std::iter::once(digest).chain(path.clone()).collect();
    let record = TreeRecord::new(FORMAT, target, &parts, vec![origin]);
    let make = |dir: PathBuf| async move {
        let (what, whole) = match content {
            Content::Local(path_on_disk) => (path_on_disk.display().to_string(), path_on_disk),
            Content::Image(image) => (format!("image {image}"), tree(fetcher, &image, target.arch).await?),
            Content::File(urls, checksum) => {
                let file = fetch_from(fetcher, WHAT, &urls, &checksum).await?;
                (file.display().to_string(), file)
            }
        };
        let target = target.clone();
        stoppable(move |stop| lay_out(stop, &whole, path.as_deref(), &dir, &target, &what)).await?;
        match local {
            Some((path_on_disk, digest)) => fetcher.ensure_unchanged(&path_on_disk, &digest).await,
            None => Ok(()),
        }
    };
    fetcher.cache.get_or_make(KIND, &record.key, make).await?;
    fetcher.cache.write_record(KIND, &record.key, &record)?;
    Ok(record)
}

/// Makes `dir/tree` from a part of a tree or of an archive.
fn lay_out(
    stop: &AtomicBool,
    whole: &Path,
    path: Option<&str>,
    dir: &Path,
    target: &KernelTarget,
    what: &str,
) -> Result<()> {
    let (raw, unpacked) = (dir.join("raw"), dir.join("whole"));
    match path {
        None if whole.is_dir() => copy_tree(whole, &raw, stop)?,
        None => {
            fs::create_dir(&raw)?;
            unpack(stop, whole, &raw, what)?;
        }
        Some(ROOT) => headers_of_root(stop, whole, &raw)?,
        Some(path) if whole.is_dir() => part(stop, whole, path, &raw, what)?,
        Some(path) => {
            fs::create_dir(&unpacked)?;
            unpack(stop, whole, &unpacked, what)?;
            part(stop, &unpacked, path, &raw, what)?;
            remove_tree(&unpacked)?;
        }
    }
    let root = dir.join(TREE);
    layout::arrange(&raw, &root, &target.release, what)?;
    if raw.exists() {
        remove_tree(&raw)?;
    }
    // Remove the private key that signs this kernel's modules: builds and readers of the store must not get it.
    let key = format!("usr/lib/modules/{}/build/certs/signing_key.pem", target.release);
    if let Some(key) = links::resolve(&root, Path::new(&key))? {
        fs::remove_file(root.join(key))?;
    }
    verify(&root, target)
}

/// Copies only the kernel directories of a root file system: other files would replace files of the toolchain.
fn headers_of_root(stop: &AtomicBool, whole: &Path, raw: &Path) -> Result<()> {
    fs::create_dir(raw)?;
    for name in ["usr/src", "lib/modules"] {
        let Some(directory) = links::resolve(whole, Path::new(name))? else { continue };
        let (from, to) = (whole.join(&directory), raw.join(&directory));
        if from.is_dir() {
            make_directory(to.parent().unwrap_or(raw))?;
            copy_tree(&from, &to, stop)?;
        }
    }
    Ok(())
}

/// Copies the content at a path: a directory, or an archive of one.
fn part(stop: &AtomicBool, whole: &Path, path: &str, raw: &Path, what: &str) -> Result<()> {
    match links::resolve(whole, Path::new(path))?.map(|input| whole.join(input)) {
        Some(input) if input.is_dir() => copy_tree(&input, raw, stop),
        Some(input) => {
            fs::create_dir(raw)?;
            unpack(stop, &input, raw, &format!("{path} of {what}"))
        }
        None => Err(absent(whole, Path::new(path), what)?),
    }
}

/// Creates an error for a missing path that lists the existing names in the same directory. The names show if an image is for
/// another kernel.
fn absent(whole: &Path, path: &Path, what: &str) -> Result<FetchError> {
    let parent = path.parent().unwrap_or(path);
    let directory = links::resolve(whole, parent)?.map(|directory| whole.join(directory));
    let names = match directory.filter(|directory| directory.is_dir()) {
        Some(directory) => listing(&names_in(&directory)?),
        None => "nothing".to_owned(),
    };
    let (path, parent) = (path.display(), parent.display());
    Ok(FetchError::unusable(
        format!("cannot find {path} in {what}: {parent} has {names}"),
        "the image is for another kernel, as entire driver toolkit releases were, or has its headers in \
         another directory: name the image for this kernel, or import the headers (`farrier headers import`)",
    ))
}

/// Returns an image's unpacked tree.
async fn tree(fetcher: &Fetcher, image: &ImageReference, arch: Architecture) -> Result<PathBuf> {
    let ImageReference { repository, version } = image;
    let gone = || FetchError::unusable(format!("cannot fetch image {image}: it no longer exists"), HINT);
    let registry = fetcher.registries();
    let found = registry.image(repository, version, arch.as_str()).await.map_err(StoreError::from)?;
    let manifest = ImageManifest::parse(&found.ok_or_else(gone)?.bytes).map_err(StoreError::from)?;
    let mut layers = Vec::new();
    for layer in &manifest.layers {
        let registry = &registry;
        let fetch = |to: PathBuf| async move {
            let outcome = registry.fetch_blob(repository, &layer.digest, layer.size, &to).await;
            outcome.map_err(|error| FetchError::from(StoreError::from(error)))
        };
        let file = fetcher.cache.get_or_make_file(BLOBS, layer.digest.hex(), fetch).await?;
        layers.push((layer.digest.clone(), file));
    }
    fetcher.root_fs().tree(layers, format!("image {image}")).await
}
