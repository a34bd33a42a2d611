//! Pure: what an image was made of, before it is written down in any form.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::Value;

use crate::{
    image::{Digest, InputHash},
    kernel::{Architecture, KernelTarget},
};

use super::Package;

/// What a material was needed for. The order is that of the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Role {
    /// Compiled.
    Source,
    /// Applied to a source.
    Patch,
    /// The rendered Dockerfile: what the build did.
    Recipe,
    /// The kernel's headers that it was compiled against.
    #[strum(serialize = "kernel-headers")]
    Headers,
    /// What compiled it.
    Toolchain,
    /// Exposed headers of another driver that it was compiled against.
    #[strum(serialize = "exposed-headers")]
    Need,
    /// The certificate whose key signed the modules.
    ModuleCertificate,
    /// What the payload lies on.
    #[strum(serialize = "runtime-base")]
    Base,
    /// `driver-entrypoint`.
    Entrypoint,
    /// The image for another kernel whose payload this one has.
    ReusedImage,
    /// An image for one kernel that is part of this one.
    Member,
}

impl Role {
    /// The word in the documents.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Is it in the image, rather than only used to make it?
    pub fn is_in_image(self) -> bool {
        match self {
            Self::Source | Self::Patch | Self::Base | Self::Entrypoint | Self::ReusedImage | Self::Member => {
                true
            }
            Self::Recipe | Self::Headers | Self::Toolchain | Self::Need | Self::ModuleCertificate => false,
        }
    }
}

/// One thing that went into an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// What for.
    pub role: Role,
    /// Its name.
    pub name: String,
    /// Its version, where it has one.
    pub version: Option<String>,
    /// sha256 of its content, where there is one content to have a digest.
    pub digest: Option<Digest>,
    /// Where it is to be had: an address, or a package URL (`pkg:deb/...`).
    pub uri: Option<String>,
    /// What it holds, for root file systems.
    pub packages: Vec<Package>,
}

impl Material {
    /// With a name and nothing else.
    pub fn new(role: Role, name: impl Into<String>) -> Self {
        Self { role, name: name.into(), version: None, digest: None, uri: None, packages: Vec::new() }
    }

    /// Reads what farrier notes of the origin of files and packages: `name=version sha256:...`, `name sha256:...`,
    /// `sha256:...`, `tree sha256:...`; what it does not know is the name.
    pub fn of_origin(role: Role, origin: &str, fallback: &str) -> Self {
        let digest = origin.split_whitespace().find_map(|word| word.parse::<Digest>().ok());
        let first = origin.split_whitespace().next().unwrap_or_default();
        let (name, version) = match first.split_once('=') {
            Some((name, version)) => (name, Some(version.to_owned())),
            None if first.is_empty() || first == "tree" || first.starts_with("sha256:") => (fallback, None),
            None => (first, None),
        };
        let uri = version.as_ref().map(|version| match version.rsplit_once('.') {
            Some((version, arch)) if is_of_rpm(arch) => package_url(name, version, Some(arch)),
            _ => package_url(name, version, None),
        });
        Self { version, digest, uri, ..Self::new(role, name) }
    }

    /// The same of an image, by its digest: `repository sha256:...`.
    pub fn of_image(role: Role, origin: &str) -> Self {
        let material = Self::of_origin(role, origin, "image");
        let name = material.name.rsplit('/').next().unwrap_or_default();
        let url = |digest| format!("{}?repository_url={}", oci_url(name, digest), escape(&material.name));
        let uri = material.digest.as_ref().map(url);
        Self { uri, ..material }
    }
}

/// A package URL (purl specification, types `deb` and `rpm`).
pub(super) fn package_url(name: &str, version: &str, arch: Option<&str>) -> String {
    let is_rpm = arch.is_some_and(is_of_rpm);
    let arch = arch.map(|arch| format!("?arch={}", escape(arch))).unwrap_or_default();
    if !is_rpm {
        return format!("pkg:deb/debian/{}@{}{arch}", escape(name), escape(version));
    }
    let (epoch, version) = match version.split_once(':') {
        Some((epoch, version)) => (format!("&epoch={}", escape(epoch)), version),
        None => (String::new(), version),
    };
    format!("pkg:rpm/{}@{}{arch}{epoch}", escape(name), escape(version))
}

/// RPM and Debian share no name of an architecture.
fn is_of_rpm(arch: &str) -> bool {
    ["aarch64", "noarch", "x86_64"].contains(&arch)
}

/// A package URL of an image (purl specification, type `oci`): by its last name and digest, so that it is the same
/// wherever the image is copied.
pub(super) fn oci_url(name: &str, digest: &Digest) -> String {
    format!("pkg:oci/{}@{}", escape(&name.to_lowercase()), escape(digest.as_str()))
}

/// An object without the fields that have no value.
pub(super) fn without_nulls(mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.retain(|_, value| !value.is_null());
    }
    object
}

/// Percent-encoding of all that a package URL does not have plain.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // A string takes everything that is written to it.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A module of the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    /// Its file, relative to the payload.
    pub path: String,
    /// The name as `lsmod` shows it.
    pub name: String,
    /// The version that it says itself.
    pub version: Option<String>,
    /// `MODULE_LICENSE`.
    pub licence: Option<String>,
    /// `srcversion`.
    pub srcversion: Option<String>,
    /// sha256 of the file.
    pub digest: Digest,
}

/// What the documents are about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The driver image's name.
    pub name: String,
    /// The driver's version.
    pub version: String,
    /// The image.
    pub digest: Digest,
    /// The kernel; `None` for an image for several.
    pub target: Option<KernelTarget>,
    /// What it runs on.
    pub architecture: Architecture,
    /// The input hash.
    pub input_hash: InputHash,
}

/// Everything that the documents say. The same provenance gives the same bytes: it has no time, no machine, no
/// registry and no engine in it, but for what confined the build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The image.
    pub subject: Subject,
    /// farrier's version.
    pub farrier: String,
    /// The build format ([`crate::plan::BUILD_FORMAT`]).
    pub build_format: String,
    /// What it was made of.
    pub materials: Vec<Material>,
    /// Its modules.
    pub modules: Vec<ModuleFile>,
    /// What confined the build.
    pub confinement: Confinement,
}

/// What confined a build, as its engine found it before the first step. Empty where the engine does not look, and where nothing
/// was compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// What was tried, as a hostile step would, and refused.
    pub refused: Vec<String>,
    /// Landlock ABI in force; 0: none.
    pub landlock: u32,
    /// Each limit, and what enforces it.
    pub limits: BTreeMap<&'static str, &'static str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_read() {
        let digest = Digest::of(b"x");
        let read = |text: &str| {
            let Material { name, version, digest, uri, .. } = Material::of_origin(Role::Source, text, "src");
            (name, version, digest, uri)
        };
        let url = Some("pkg:deb/debian/mft@4.1%2B2-1".to_owned());
        assert_eq!(
            read(&format!("mft=4.1+2-1 {digest}")),
            ("mft".to_owned(), Some("4.1+2-1".to_owned()), Some(digest.clone()), url)
        );
        assert_eq!(
            read(&format!("headers.tar {digest}")),
            ("headers.tar".to_owned(), None, Some(digest.clone()), None)
        );
        for text in [format!("tree {digest}"), format!("{digest} subdir=a")] {
            assert_eq!(read(&text), ("src".to_owned(), None, Some(digest.clone()), None), "{text}");
        }
        assert_eq!(read(""), ("src".to_owned(), None, None, None));
        let image = Material::of_image(Role::Source, &format!("r.test:5000/kmm/acme {digest} path=/opt"));
        let url = format!("pkg:oci/acme@sha256%3A{}?repository_url=r.test%3A5000%2Fkmm%2Facme", digest.hex());
        assert_eq!((image.digest, image.uri), (Some(digest.clone()), Some(url)));
        let (.., url) = read("kernel-devel=5.14.0-503.el9.x86_64 sha512:00");
        assert_eq!(url.unwrap(), "pkg:rpm/kernel-devel@5.14.0-503.el9?arch=x86_64");
        let url = package_url("gcc", "1:11.5.0-2.el9", Some("aarch64"));
        assert_eq!(url, "pkg:rpm/gcc@11.5.0-2.el9?arch=aarch64&epoch=1");
    }
}
