//! Pure: what a driver image is made from: sources and patches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ImageReference;
use crate::{
    definition::{
        AptSuites, NonEmpty, RpmArchive,
        checked::{
            Component, Download, ImageName, ImagePattern, InnerPattern, LocalPath, Mirror, PackageVersion,
            PathInside, RpmAlternatives, Sha256, SourcePackage, Suite,
        },
    },
    kernel::{Architecture, HeaderText, KernelRange, KernelTarget, Pattern, image_for, text_for},
};

/// One input that is compiled, or has compiled modules.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceSpec {
    /// Its directory under `sources/` in the build context.
    pub name: ImageName,
    /// Where it comes from: exactly one of `path`, `url`, `apt`, `rpm`, `image`.
    pub from: SourceOrigin,
    /// An archive inside the fetched tree that is unpacked in its place, as a path relative to the tree in which the
    /// last component may hold one `*` (`MLNX_OFED_SRC-24.10/SOURCES/mlnx-ofed-kernel_*.orig.tar.gz`); it must match
    /// exactly once.
    pub unpack: Option<InnerPattern>,
    /// The part of the (unpacked) tree that is used, as a relative path in which the last component
    /// may hold one `*`; it must match exactly once. Default: the whole tree.
    pub subdir: Option<InnerPattern>,
}

impl SourceSpec {
    /// All of it, where a part is compiled.
    #[must_use]
    pub fn without_part(&self) -> Self {
        Self { subdir: None, ..self.clone() }
    }

    /// Is it another one for each kernel?
    pub fn is_of_kernel(&self) -> bool {
        match &self.from {
            SourceOrigin::Image(_) | SourceOrigin::Rpm(_) => true,
            SourceOrigin::Apt(source) => source.package.contains("{{"),
            SourceOrigin::Path { .. } | SourceOrigin::Url { .. } => false,
        }
    }

    /// The one for a kernel: of packages, those for its architecture, which may have the release in their names.
    pub fn for_kernel(&self, target: &KernelTarget) -> Result<Self, String> {
        let mut found = self.for_architecture(target.arch);
        match &mut found.from {
            SourceOrigin::Apt(source) => {
                let named = target.fill(source.package.as_str());
                source.package = named.parse().map_err(|_| format!("no package can be named {named}"))?;
            }
            SourceOrigin::Rpm(source) => source.kernel = Some(target.clone()),
            _ => {}
        }
        Ok(found)
    }

    /// The one for an architecture: packages may have parts that are compiled already.
    #[must_use]
    pub fn for_architecture(&self, arch: Architecture) -> Self {
        let mut found = self.clone();
        if let SourceOrigin::Apt(source) = &mut found.from {
            source.arch = Some(arch);
        }
        found
    }
}

/// Where a source comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SourceOrigin {
    /// A file (archive) or directory, relative to the definitions directory.
    Path {
        /// The path.
        path: LocalPath,
        /// Expected sha256 of the file, hexadecimal. Not for directories.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<Sha256>,
    },
    /// A download. Archives are unpacked: tar (plain, gzip, xz, zstd), packages (`.deb`, `.rpm`), and self-extracting
    /// ones (`.run`), which are not run.
    Url {
        /// The address, `http` or `https`.
        url: Download,
        /// sha256 of the file, hexadecimal.
        sha256: Sha256,
    },
    /// A package of a Debian-like archive, unpacked (not installed).
    Apt(AptSource),
    /// A package of RPM repositories with a kernel's modules, unpacked (not installed).
    Rpm(RpmSource),
    /// Modules that others compiled, in an image: one that KMM loads, or a vendor's.
    Image(SourceImage),
}

/// An image of others that has compiled modules. Nothing of it is run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceImage {
    /// Its reference with a tag or a digest, in which `{{release}}`, `{{kernel_label}}` (the release as tags can have it),
    /// `{{os_id}}`, `{{os_version}}`, `{{releasever}}`, `{{arch}}` (`amd64`) and `{{basearch}}` (`x86_64`) may stand for the
    /// kernel's. The image counts by its digest; where there is none, the plan says so.
    pub reference: ImagePattern,
    /// The directory in the image that is the source, such as `/opt/lib/modules`; all of it when absent. The same placeholders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
    /// Public keys in PEM form, relative to the definitions directory: one of them must have signed the image, as `cosign` does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<LocalPath>,
    /// A site that signs modules or images signs none of others unless a key of `signedBy` signed them before. With this word it does:
    /// right for as long as whoever may write to that registry is trusted like the site's own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopt_unsigned: bool,
}

impl SourceImage {
    /// The image for a kernel and the directory in it, or what there would have to be.
    pub fn for_kernel(&self, target: &KernelTarget) -> Result<(ImageReference, Option<String>), String> {
        let path = self.path.as_ref().map(|path| text_for(path, target)).transpose()?;
        Ok((image_for(&self.reference, target)?, path))
    }

    /// Does neither a key nor the definition's explicit word vouch for it?
    pub fn is_unvouched(&self) -> bool {
        self.signed_by.is_empty() && !self.adopt_unsigned
    }
}

/// A package whose files are a source.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AptSource {
    /// The package's name; `{{release}}` stands for the kernel release.
    pub package: SourcePackage,
    /// Its exact version; the suite's newest when absent.
    pub version: Option<PackageVersion>,
    /// Suites, such as `bookworm`, `sid`.
    pub suites: NonEmpty<Suite>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The archive's address; the host's own entry for the suite when absent.
    pub mirror: Option<Mirror>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    pub signed_by: Option<LocalPath>,
    /// The architecture that it is for; this machine's when absent.
    #[serde(skip)]
    pub arch: Option<Architecture>,
}

/// An RPM package that has modules of one kernel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmSource {
    /// Its name. Those with ` | ` between them are alternatives: the first that is of the kernel's release is taken. `{{flavour}}`
    /// stands for what follows the last `-` of the release, `{{release}}` for the release in whatever form names have it: what a
    /// package provides, or its files, say which kernel it is for.
    pub package: RpmAlternatives,
    /// Where it is.
    pub from: RpmArchive,
    /// The kernel.
    #[serde(skip)]
    pub kernel: Option<KernelTarget>,
}

impl AptSource {
    /// Where the package is looked for.
    pub fn apt_suites(&self) -> AptSuites {
        let Self { package: _, version: _, suites, components, mirror, signed_by, arch: _ } = self.clone();
        AptSuites { suites: suites.to_vec(), components, mirror, signed_by }
    }
}

/// A patch, applied by the template.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PatchSpec {
    /// The file, relative to the definitions directory; where that has none, the one of this name that farrier brings.
    pub path: LocalPath,
    /// The range of kernels that it is for, as in the image's `kernels`; every kernel when absent.
    pub kernels: Option<KernelRange>,
    /// A regular expression over the kernel release, whole.
    pub release: Option<Pattern>,
    /// What the kernel's headers say, for changes that distributions took over into kernels of older numbers.
    pub when: Option<HeaderText>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(from: &str) -> Result<SourceSpec, String> {
        serde_json::from_str(&format!(r#"{{"name": "acme", "from": {from}}}"#)).map_err(|e| e.to_string())
    }

    fn target(release: &str) -> KernelTarget {
        KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Arm64,
        }
    }

    fn package(name: &str) -> Result<SourceSpec, String> {
        read(&format!(r#"{{"apt": {{"package": "{name}", "suites": ["sid"]}}}}"#))
    }

    #[test]
    fn a_package_is_named_for_a_kernel_and_its_architecture() {
        let plain = package("mft-dkms").unwrap();
        let spec = package("linux-modules-nvidia-535-{{release}}").unwrap();
        assert!(!plain.is_of_kernel() && spec.is_of_kernel());
        for (spec, name) in [(&plain, "mft-dkms"), (&spec, "linux-modules-nvidia-535-6.1.0-9-generic")] {
            let found = spec.for_kernel(&target("6.1.0-9-generic")).unwrap().from;
            let SourceOrigin::Apt(found) = found else { panic!("another origin") };
            assert_eq!((found.package.as_str(), found.arch), (name, Some(Architecture::Arm64)));
        }
        let why = spec.for_kernel(&target("6.1.0_ACME")).unwrap_err();
        assert_eq!(why, "no package can be named linux-modules-nvidia-535-6.1.0_ACME");
        for name in ["linux-{{kernel}}", "linux-{{version}}", "linux-{{ release", "-x"] {
            assert!(package(name).is_err(), "{name}");
        }
    }

    #[test]
    fn an_rpm_package_is_looked_for_by_its_kernel() {
        let from = r#"{"rpm": {"package": "kmod-acme-{{release}} | kmod-acme", "from": {"signedBy": "a.asc", "repositories": [{"url": "https://a.test/"}]}}}"#;
        let spec = read(from).unwrap();
        assert!(spec.is_of_kernel());
        let target = target("5.14.0-503.el9.x86_64");
        let SourceOrigin::Rpm(found) = spec.for_kernel(&target).unwrap().from else {
            panic!("another origin")
        };
        assert_eq!(found.kernel, Some(target));
        assert!(read(&from.replace("{{release}}", "{{version}}")).is_err());
    }

    #[test]
    fn an_image_and_a_directory_are_named_for_a_kernel() {
        let image = |json: &str| match read(&format!(r#"{{"image": {json}}}"#))?.from {
            SourceOrigin::Image(image) => Ok(image),
            _ => Err("another origin".to_owned()),
        };
        let kmm = r#"{"reference": "r.test/kmm/acme:{{os_id}}-{{kernel_label}}", "path": "/opt/lib/modules/{{release}}"}"#;
        let (named, path) = image(kmm).unwrap().for_kernel(&target("6.1.0-acme+")).unwrap();
        assert_eq!(named.to_string(), "r.test/kmm/acme:debian-6.1.0-acme");
        assert_eq!(path.as_deref(), Some("/opt/lib/modules/6.1.0-acme+"));
        let release = image(r#"{"reference": "r.test/acme:{{release}}"}"#).unwrap();
        insta::assert_snapshot!(release.for_kernel(&target("6.1.0-acme+")).unwrap_err(), @r#"image for 6.1.0-acme+: "6.1.0-acme+" is not a tag (1 to 128 of A-Za-z0-9_.-, not starting with . or -) (in a tag, {{kernel_label}} stands for a release)"#);
        let of_system = image(r#"{"reference": "r.test/acme:{{rhel_version}}"}"#).unwrap();
        insta::assert_snapshot!(of_system.for_kernel(&target("6.1.0")).unwrap_err(), @"value of {{rhel_version}} for 6.1.0");
        for wrong in [
            r#"{"reference": "r.test/acme:{{kernel}}"}"#,
            r#"{"reference": "r.test/acme"}"#,
            r#"{"reference": "r.test/acme:1", "path": "opt"}"#,
            r#"{"reference": "r.test/acme:1", "path": "/opt/../etc"}"#,
            r#"{"reference": "r.test/acme:1", "path": "/opt/{{version}}"}"#,
        ] {
            assert!(image(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn who_answers_for_an_image() {
        for (more, is_unvouched) in
            [("", true), (r#", "signedBy": ["keys/acme.pub"]"#, false), (r#", "adoptUnsigned": true"#, false)]
        {
            let read = read(&format!(r#"{{"image": {{"reference": "r.test/acme:1"{more}}}}}"#)).unwrap();
            assert!(matches!(read.from, SourceOrigin::Image(image) if image.is_unvouched() == is_unvouched));
        }
    }
}
