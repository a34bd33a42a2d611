//! Reads the files for a host from a published image: modules, firmware, and the certificate of the modules' signatures.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use farrier_builder::{
    images::StoredImage,
    services::{BuildError, Result},
};
use farrier_core::{
    facts::{ImageFacts, ModuleSignerFact, annotations},
    image::{DEBIAN, Digest, ImageName, InputHash, Version},
    kernel::{Architecture, KernelRelease, OsId, OsVersion},
};
use farrier_local::{blocking::blocking, cache::Scratch};
use farrier_payload as payload;
use farrier_payload::DecompressionBudget;
use kmod::{Certificate, Module, Signature};
use oci::ImageManifest;
use walkdir::WalkDir;

/// Modules and firmware of an image, by their paths on a host.
pub(super) struct HostPayload {
    pub(super) name: ImageName,
    pub(super) version: String,
    pub(super) release: KernelRelease,
    /// ID and version of the operating system, as in `os-release`.
    pub(super) os: (OsId, OsVersion),
    pub(super) arch: Architecture,
    pub(super) image: Digest,
    pub(super) input_hash: InputHash,
    /// Version of the kernel's package, if Debian publishes the kernel.
    pub(super) debian_version: Option<String>,
    /// Certificate of the key that signed modules of the payload.
    pub(super) certificate: Option<Certificate>,
    /// Unpacked file or symbolic link for each path on the host, which is relative to `/`.
    pub(super) files: Files,
    /// Other unpacked files and symbolic links for `/usr`, by their paths relative to `/`.
    pub(super) user_space: Files,
    _work: Scratch,
}

impl HostPayload {
    /// Reads the modules. Returns each with its path on a host and its unpacked file. Blocks.
    pub(super) fn modules(&self) -> payload::Result<Vec<(&Path, &Path, Module)>> {
        let (budget, mut modules) = (DecompressionBudget::without_build(), Vec::new());
        for (path, file) in &self.files {
            let read = payload::read_module(file, &budget)?;
            // The check has refused payloads with damaged modules.
            if let Some(Ok(module)) = read.map(|read| read.module) {
                modules.push((path.as_path(), file.as_path(), module));
            }
        }
        Ok(modules)
    }
}

/// Makes the error for an image that does not meet a requirement.
pub(super) fn unmet(image: StoredImage<'_>, why: &str, hint: &str) -> BuildError {
    let message = format!("{}@{} {why}", image.repository, image.digest);
    BuildError::unmet(message, hint)
}

/// Fetches and unpacks the payload. Returns the payload, and the bytes of the image's manifest.
pub(super) async fn host_payload(image: StoredImage<'_>) -> Result<(Vec<u8>, HostPayload)> {
    let StoredImage { services, repository, digest } = image;
    let stored = services.images.registry.manifest(repository, &Version::Digest(digest.clone())).await?;
    let stored = stored.ok_or_else(|| unmet(image, "is not in the registry", "give a published image"))?;
    let manifest = ImageManifest::parse(&stored.bytes)?;
    let config = services.images.configuration(repository, &manifest.config).await?;
    let arch = oci::architecture_of(&config).and_then(|arch| arch.parse().ok());
    let name = manifest.annotations.get(annotations::TITLE).and_then(|name| name.parse().ok());
    let facts = ImageFacts::from_annotations(&manifest.annotations).ok();
    let image_facts = facts.and_then(|facts| {
        facts.payload_digest?;
        let (id, version) = facts.os.as_deref()?.split_once(' ')?;
        let os: (OsId, OsVersion) = (id.parse().ok()?, version.parse().ok()?);
        Some((facts.kernel_release?, facts.driver_version?, facts.module_signer, os, facts.input_hash?))
    });
    let (Some((release, version, signer, os, input_hash)), Some(name), Some(arch), Some(layer)) =
        (image_facts, name, arch, manifest.payload_layer())
    else {
        let hint =
            "give an image that farrier assembled for one kernel; an image of `output: image` has no payload";
        return Err(unmet(image, "has no payload for one kernel", hint));
    };
    let headers = manifest.annotations.get(annotations::HEADERS).filter(|_| os.0.as_str() == DEBIAN);
    let debian_version = headers.and_then(|headers| headers_version(headers, &release));
    let work = services.cache.scratch()?;
    let (blob, tree) = (work.path().join("layer"), work.path().join("payload"));
    services.images.registry.fetch_blob(repository, &layer.digest, layer.size, &blob).await?;
    fs_err::create_dir(&tree)?;
    let (dest, expected_signer) = (tree.clone(), signer.clone());
    let is_signed = blocking(move || {
        payload::unpack_layer(&blob, &dest)?;
        expected_signer.map_or(Ok(false), |signer| is_signed_by(&dest, &signer))
    })
    .await?;
    let certificate = signer.filter(|_| is_signed).map(|signer| certificate(image, &signer)).transpose()?;
    let (files, user_space) = host_files(&tree, &name, &release)?;
    let image = stored.digest;
    let payload = HostPayload {
        name,
        version,
        release,
        os,
        arch,
        image,
        input_hash,
        debian_version,
        certificate,
        files,
        user_space,
        _work: work,
    };
    Ok((stored.bytes, payload))
}

/// Returns the version of the kernel's header package, which is the version of its other packages, too.
fn headers_version(origins: &str, release: &KernelRelease) -> Option<String> {
    let package = format!("linux-headers-{release}=");
    let version = origins.split(", ").find_map(|origin| origin.strip_prefix(&package)?.split(' ').next())?;
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".+~:-".contains(c);
    (!version.is_empty() && version.chars().all(is_allowed)).then(|| version.to_owned())
}

/// Returns the certificate that the image's annotations name, from the site's definition.
fn certificate(image: StoredImage<'_>, signer: &ModuleSignerFact) -> Result<Certificate> {
    let site = image.services.tools.module_signer.as_ref();
    let known = site.filter(|site| site.fingerprint() == signer.certificate);
    known.map(|site| site.certificate().clone()).ok_or_else(|| {
        let why = format!("has modules signed with unknown certificate {}", signer.certificate);
        unmet(image, &why, "name it as moduleSigning.certificate in site.yaml, or pull where it is named")
    })
}

/// Whether a module below a directory has a signature by the key. Blocks.
fn is_signed_by(tree: &Path, signer: &ModuleSignerFact) -> payload::Result<bool> {
    let modules = payload::read_modules(tree, &DecompressionBudget::without_build())?;
    let by_key = |signature: &Signature| matches!(signature, Signature::By(by) if by.key_id == signer.key_id);
    Ok(modules.iter().any(|file| file.module.as_ref().is_ok_and(|module| by_key(&module.signature))))
}

type Files = BTreeMap<PathBuf, PathBuf>;

/// Returns the modules and firmware of an unpacked payload, and its user space.
fn host_files(tree: &Path, name: &ImageName, release: &KernelRelease) -> Result<(Files, Files)> {
    let (mut files, mut user_space) = (Files::new(), Files::new());
    for entry in WalkDir::new(tree).sort_by_file_name() {
        let entry = entry.map_err(payload::PayloadError::from)?;
        let inner = entry.path().strip_prefix(tree).unwrap_or(entry.path());
        if entry.file_type().is_dir() {
            continue;
        }
        if let Some(path_on_host) = host_path(inner, name, release) {
            files.insert(path_on_host, entry.path().to_owned());
        } else if is_user_space(inner) {
            user_space.insert(inner.to_owned(), entry.path().to_owned());
        }
    }
    Ok((files, user_space))
}

/// Whether a file of the payload belongs to user space, and not to the modules or the exposed headers.
fn is_user_space(path: &Path) -> bool {
    path.starts_with("usr") && !["usr/src", "usr/lib/modules"].iter().any(|other| path.starts_with(other))
}

/// Directory of an image's modules on a host, below the kernel's module directory. depmod prefers modules below `updates`.
pub(super) fn module_dir(name: &ImageName) -> PathBuf {
    Path::new("updates").join(format!("farrier-{name}"))
}

/// Returns the path on the host of a file of the payload; `None` for files that a host does not need.
///
/// Paths contain the release, because packages for several kernels are installed at once. The kernel looks for firmware in
/// `/lib/firmware/updates/<release>` first (`drivers/base/firmware_loader/main.c`, `fw_path`).
fn host_path(path: &Path, name: &ImageName, release: &KernelRelease) -> Option<PathBuf> {
    let path = path.strip_prefix("usr").unwrap_or(path);
    let modules = Path::new("lib/modules").join(release.as_str());
    if let Ok(inner) = path.strip_prefix(&modules) {
        let is_module = payload::is_module_file(&path.file_name()?.to_string_lossy());
        return is_module.then(|| modules.join(module_dir(name)).join(inner));
    }
    let inner = path.strip_prefix("lib/firmware").ok()?;
    let inner = inner.strip_prefix("updates").unwrap_or(inner);
    let inner = inner.strip_prefix(release.as_str()).unwrap_or(inner);
    Some(Path::new("lib/firmware/updates").join(release.as_str()).join(inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_kernel_is_in_the_origin_of_its_headers() {
        let release = "6.1.0-56-amd64".parse().unwrap();
        let of = |origins| headers_version(origins, &release);
        let origins = "linux-headers-6.1.0-56-common=6.1.169-1 sha256:a, linux-headers-6.1.0-56-amd64=6.1.170-1 sha256:b";
        assert_eq!(of(origins).as_deref(), Some("6.1.170-1"));
        for other in
            ["tree sha256:a", "linux-headers-6.1.0-56-amd64=1\nDepends: x", "linux-headers-6.1.0-56-amd64="]
        {
            assert_eq!(of(other), None);
        }
    }

    #[test]
    fn where_files_go() {
        let (name, release) = ("x".parse().unwrap(), "6.1.0-9-amd64".parse().unwrap());
        let place =
            |path: &str| host_path(Path::new(path), &name, &release).map(|place| place.display().to_string());
        let module = "lib/modules/6.1.0-9-amd64/updates/farrier-x/extra/m.ko.xz";
        assert_eq!(place("lib/modules/6.1.0-9-amd64/extra/m.ko.xz").as_deref(), Some(module));
        assert_eq!(place("usr/lib/modules/6.1.0-9-amd64/extra/m.ko.xz").as_deref(), Some(module));
        let firmware = "lib/firmware/updates/6.1.0-9-amd64/acme/a.bin";
        for path in ["acme/a.bin", "updates/acme/a.bin", "6.1.0-9-amd64/acme/a.bin"] {
            assert_eq!(place(&format!("lib/firmware/{path}")).as_deref(), Some(firmware));
        }
        for path in [
            "lib/modules/6.1.0-9-amd64/modules.dep",
            "lib/modules/6.1.0-10-amd64/extra/m.ko",
            "usr/src/x/Module.symvers",
            "usr/bin/tool",
        ] {
            assert_eq!(place(path), None, "{path}");
        }
    }
}
