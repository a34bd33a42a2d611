//! The inputs and content of an image, independent of any document format.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    image::{Digest, GitSource, HostOutput, InputHash, Redistribute},
    kernel::{Architecture, KernelTarget},
    kmod::Certificate,
    plan::NamedInputs,
};

use super::{Distribution, purl};

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
    /// Content of the kernel headers, where they came from the registry's store.
    #[strum(serialize = "kernel-headers")]
    StoredHeaders,
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
    /// The driver image that an output was made from.
    DriverImage,
}

impl Role {
    /// Returns the name of the role in the documents.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Whether the material is part of the image or of its output, rather than only a build input.
    pub(crate) fn is_part_of(self, output: Option<HostOutput>) -> bool {
        match self {
            Self::Source | Self::Patch | Self::Base | Self::Entrypoint | Self::ReusedImage | Self::Member => {
                true
            }
            Self::Recipe
            | Self::Headers
            | Self::StoredHeaders
            | Self::Toolchain
            | Self::Need
            | Self::DriverImage => false,
            Self::ModuleCertificate => output.is_some_and(HostOutput::contains_certificate),
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
    /// Git commit of the content, for a source from Git.
    pub commit: Option<String>,
    /// Location of the material: a URL, or a package URL (`pkg:deb/...`).
    pub uri: Option<String>,
    /// Packages of a root file system.
    pub packages: Vec<Package>,
    /// Distribution of a root file system or of a package.
    pub distribution: Option<Distribution>,
    /// Terms that the definition states for the material.
    pub terms: Terms,
}

/// A package of a root file system.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Package {
    /// Name of the package.
    pub name: String,
    /// Version of the package.
    pub version: String,
    /// Architecture of the package.
    pub architecture: String,
    /// Licenses in the package's copyright file, if the file is in the machine-readable format (DEP 5).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub licenses: Vec<String>,
}

/// Packages of a root file system, by name, and its distribution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackageList {
    /// Empty if the root file system has no package list.
    pub packages: Vec<Package>,
    /// `None` if the root file system has no `os-release`.
    pub distribution: Option<Distribution>,
}

/// Statements of a definition about software.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Organization that supplies the software.
    pub supplier: Option<String>,
    /// License, as an SPDX expression.
    pub license: Option<String>,
    /// Whether the license allows redistribution.
    pub redistribute: Option<Redistribute>,
}

impl Material {
    /// Creates a material with only a name.
    pub fn new(role: Role, name: impl Into<String>) -> Self {
        let (version, digest, commit, uri, distribution) = (None, None, None, None, None);
        let (packages, terms) = (Vec::new(), Terms::default());
        Self { role, name: name.into(), version, digest, commit, uri, packages, distribution, terms }
    }

    /// Adds the content of a root file system. Its `os-release` takes precedence over the material's distribution.
    #[must_use]
    pub fn with(self, PackageList { packages, distribution }: PackageList) -> Self {
        Self { packages, distribution: distribution.or(self.distribution), ..self }
    }

    /// Parses farrier's notation for the origin of files and packages: `name=version sha256:...`, `name sha256:...`,
    /// `sha256:...`, `tree sha256:...`. If the origin has no name, `fallback` is the name. `distribution` published the package.
    pub fn of_origin(role: Role, origin: &str, fallback: &str, distribution: Option<Distribution>) -> Self {
        let digest = origin.split_whitespace().find_map(|word| word.parse::<Digest>().ok());
        let first = origin.split_whitespace().next().unwrap_or_default();
        let (name, version) = match first.split_once('=') {
            Some((name, version)) => (name, Some(version.to_owned())),
            None if first.is_empty() || first == "tree" || first.starts_with("sha256:") => (fallback, None),
            None => (first, None),
        };
        let uri = version.as_ref().map(|version| match version.rsplit_once('.') {
            Some((version, arch)) if purl::is_rpm_architecture(arch) => {
                purl::of_package(name, version, Some(arch), distribution.as_ref())
            }
            _ => purl::of_package(name, version, None, distribution.as_ref()),
        });
        Self { version, digest, uri, distribution, ..Self::new(role, name) }
    }

    /// Creates a source from Git.
    pub fn of_git(name: &str, source: &GitSource, commit: &str) -> Self {
        let (commit, uri) = (Some(commit.to_owned()), Some(source.uri(commit)));
        Self { commit, uri, ..Self::new(Role::Source, name) }
    }

    /// Creates the certificate of a module signing key.
    pub fn of_module_certificate(certificate: &Certificate) -> Self {
        let name = certificate.issuer_name.as_deref().unwrap_or("module signing");
        let (version, digest) = (Some(certificate.key_id.clone()), Some(Digest::of(&certificate.der)));
        Self { version, digest, ..Self::new(Role::ModuleCertificate, name) }
    }

    /// Parses the origin of an image: `repository sha256:...`. The URI contains the digest.
    pub fn of_image(role: Role, origin: &str) -> Self {
        let material = Self::of_origin(role, origin, "image", None);
        let name = material.name.rsplit('/').next().unwrap_or_default();
        let url = |digest| purl::of_image(name, digest, Some(&material.name));
        let uri = material.digest.as_ref().map(url);
        Self { uri, ..material }
    }
}

/// Removes the fields of an object that are null.
pub(super) fn without_nulls(mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.retain(|_, value| !value.is_null());
    }
    object
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

/// The image, or the output of an image, that the documents describe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The driver image's name.
    pub name: String,
    /// The driver's version.
    pub version: String,
    /// The kind of the output; `None` for an image.
    pub output: Option<HostOutput>,
    /// Digest of the manifest.
    pub digest: Digest,
    /// The kernel target; `None` for an image for several kernels.
    pub target: Option<KernelTarget>,
    /// Architecture of the modules.
    pub architecture: Architecture,
    /// The image's input hash.
    pub input_hash: InputHash,
    /// Terms that the definition states for the image.
    pub terms: Terms,
}

/// All content of the documents. Equal inputs give the same bytes: except for the confinement of the build, a provenance contains
/// no time, machine, registry or engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provenance {
    /// The image or output.
    pub subject: Subject,
    /// farrier's version.
    pub farrier: String,
    /// The build format ([`crate::plan::BUILD_FORMAT`]).
    pub build_format: String,
    /// Inputs of the input hash by name.
    pub inputs: NamedInputs,
    /// Materials of the subject.
    pub materials: Vec<Material>,
    /// Modules of the subject.
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
            let debian = Distribution { id: "debian".to_owned(), version: "12".to_owned() };
            let Material { name, version, digest, uri, .. } =
                Material::of_origin(Role::Source, text, "src", Some(debian));
            (name, version, digest, uri)
        };
        let url = Some("pkg:deb/debian/mft@4.1%2B2-1?distro=debian-12".to_owned());
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
        let url = format!("pkg:oci/acme@sha256:{}?repository_url=r.test:5000/kmm/acme", digest.hex());
        assert_eq!((image.digest, image.uri), (Some(digest.clone()), Some(url)));
        let (.., url) = read("kernel-devel=5.14.0-503.el9.x86_64 sha512:00");
        let package = "pkg:rpm/debian/kernel-devel@5.14.0-503.el9?arch=x86_64&distro=debian-12";
        assert_eq!(url.as_deref(), Some(package));
    }
}
