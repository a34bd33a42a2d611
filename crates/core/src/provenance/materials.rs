//! The inputs and content of an image, independent of any document format.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::Value;

use crate::{
    image::{Digest, InputHash},
    kernel::{Architecture, KernelTarget},
};

use super::Package;

/// Role of a material. The documents list materials in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Role {
    /// Source that was compiled.
    Source,
    /// Patch that was applied to a source.
    Patch,
    /// The rendered Dockerfile, which describes the build steps.
    Recipe,
    /// Kernel headers that the modules were compiled against.
    #[strum(serialize = "kernel-headers")]
    Headers,
    /// Toolchain that compiled the modules.
    Toolchain,
    /// Exposed headers of another driver that the modules were compiled against.
    #[strum(serialize = "exposed-headers")]
    Need,
    /// Certificate of the key that signed the modules.
    ModuleCertificate,
    /// Base image below the payload.
    #[strum(serialize = "runtime-base")]
    Base,
    /// The program `driver-entrypoint`.
    Entrypoint,
    /// The image for another kernel that the payload was reused from.
    ReusedImage,
    /// An image for one kernel that is part of a union image.
    Member,
}

impl Role {
    /// Returns the name of the role in the documents.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the material is part of the image, rather than only a build input.
    pub fn is_in_image(self) -> bool {
        match self {
            Self::Source | Self::Patch | Self::Base | Self::Entrypoint | Self::ReusedImage | Self::Member => {
                true
            }
            Self::Recipe | Self::Headers | Self::Toolchain | Self::Need | Self::ModuleCertificate => false,
        }
    }
}

/// One material of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Material {
    /// Role of the material.
    pub role: Role,
    /// Name of the material.
    pub name: String,
    /// Version of the material, if it has one.
    pub version: Option<String>,
    /// SHA-256 of the content, if the material has a single content.
    pub digest: Option<Digest>,
    /// Location of the material: a URL, or a package URL (`pkg:deb/...`).
    pub uri: Option<String>,
    /// Packages of a root file system.
    pub packages: Vec<Package>,
}

impl Material {
    /// Creates a material with only a name.
    pub fn new(role: Role, name: impl Into<String>) -> Self {
        Self { role, name: name.into(), version: None, digest: None, uri: None, packages: Vec::new() }
    }

    /// Parses farrier's notation for the origin of files and packages: `name=version sha256:...`, `name sha256:...`,
    /// `sha256:...`, `tree sha256:...`. If the origin has no name, `fallback` is the name.
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

    /// Parses the origin of an image: `repository sha256:...`. The URI contains the digest.
    pub fn of_image(role: Role, origin: &str) -> Self {
        let material = Self::of_origin(role, origin, "image");
        let name = material.name.rsplit('/').next().unwrap_or_default();
        let url = |digest| format!("{}?repository_url={}", oci_url(name, digest), escape(&material.name));
        let uri = material.digest.as_ref().map(url);
        Self { uri, ..material }
    }
}

/// Returns a package URL (purl specification, types `deb` and `rpm`).
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

/// RPM and Debian use different names for each architecture.
fn is_of_rpm(arch: &str) -> bool {
    ["aarch64", "noarch", "x86_64"].contains(&arch)
}

/// Returns a package URL of an image (purl specification, type `oci`). It contains the last part of the name and the digest, so
/// that copies of the image in other registries have the same package URL.
pub(super) fn oci_url(name: &str, digest: &Digest) -> String {
    format!("pkg:oci/{}@{}", escape(&name.to_lowercase()), escape(digest.as_str()))
}

/// Removes the fields of an object that are null.
pub(super) fn without_nulls(mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.retain(|_, value| !value.is_null());
    }
    object
}

/// Percent-encodes all characters that a package URL does not allow unencoded.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

/// A module of the payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    /// Path of the module in the payload.
    pub path: String,
    /// Name, as `lsmod` shows it.
    pub name: String,
    /// Version that the module states (`MODULE_VERSION`).
    pub version: Option<String>,
    /// `MODULE_LICENSE`.
    pub license: Option<String>,
    /// `srcversion`.
    pub srcversion: Option<String>,
    /// SHA-256 of the file.
    pub digest: Digest,
}

/// The image that the documents describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The driver image's name.
    pub name: String,
    /// The driver's version.
    pub version: String,
    /// Digest of the image.
    pub digest: Digest,
    /// The kernel target; `None` for an image for several kernels.
    pub target: Option<KernelTarget>,
    /// Architecture of the image.
    pub architecture: Architecture,
    /// The input hash.
    pub input_hash: InputHash,
}

/// All content of the documents. Equal inputs give the same bytes: except for the confinement of the build, a provenance contains
/// no time, machine, registry or engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The image.
    pub subject: Subject,
    /// farrier's version.
    pub farrier: String,
    /// The build format ([`crate::plan::BUILD_FORMAT`]).
    pub build_format: String,
    /// Materials of the image.
    pub materials: Vec<Material>,
    /// Modules of the image.
    pub modules: Vec<ModuleFile>,
    /// Confinement of the build.
    pub confinement: Confinement,
}

/// Confinement of a build, as the engine measured it before the first step. Empty if the engine does not measure it, or if
/// nothing was compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// Actions of a hostile step that were tried and denied.
    pub refused: Vec<String>,
    /// Landlock ABI in force; 0 means none.
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
