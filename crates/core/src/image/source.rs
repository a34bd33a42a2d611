//! Inputs of a driver image: sources and patches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{GitSource, ImageReference};
use crate::{
    definition::{
        AptSuites, NonEmpty, RpmArchive,
        checked::{
            Component, Download, FirmwarePath, ImageName, ImagePattern, InnerPattern, LicenseExpression,
            LocalPath, Mirror, PackageVersion, PathInside, RpmAlternatives, Sha256, SourcePackage, Suite,
        },
    },
    kernel::{Architecture, HeaderText, KernelRange, KernelTarget, Pattern, image_for, text_for},
};

/// One input: source code to compile, or compiled modules.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceSpec {
    /// Name of the directory under `sources/` in the build context.
    pub name: ImageName,
    /// Origin of the source. Set exactly one of `path`, `url`, `git`, `apt`, `rpm`, `image`.
    pub from: SourceOrigin,
    /// An archive inside the fetched tree, which replaces the tree after unpacking. The path is relative to the tree; its last
    /// component may contain one `*` (`MLNX_OFED_SRC-24.10/SOURCES/mlnx-ofed-kernel_*.orig.tar.gz`). It must match exactly once.
    pub unpack: Option<InnerPattern>,
    /// The part of the (unpacked) tree to use, as a relative path. Its last component may contain one `*`, and it must match
    /// exactly once. Default: the whole tree.
    pub subdir: Option<InnerPattern>,
    /// License of the source, as an SPDX expression. Changes only the bill of materials.
    pub license: Option<LicenseExpression>,
    /// Whether the source's license allows redistribution of modules built from it. Changes only the bill of materials and what
    /// `farrier bundle export` permits.
    pub redistribute: Option<Redistribute>,
}

/// Whether a license allows redistribution.
#[derive(Serialize, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Redistribute {
    /// Anyone may redistribute the content.
    Allowed,
    /// The content must not leave the site.
    Forbidden,
    /// The content may be redistributed under conditions, as with proprietary parts of NVIDIA's driver.
    Terms,
}

impl SourceSpec {
    /// Returns the whole source, ignoring `subdir`.
    #[must_use]
    pub fn without_subdir(&self) -> Self {
        Self { subdir: None, ..self.clone() }
    }

    /// Whether the source depends on the kernel, so that each kernel has its own.
    pub fn differs_by_kernel(&self) -> bool {
        match &self.from {
            SourceOrigin::Image(_) | SourceOrigin::Rpm(_) => true,
            SourceOrigin::Apt(source) => source.package.contains("{{"),
            SourceOrigin::Path { .. } | SourceOrigin::Url { .. } | SourceOrigin::Git(_) => false,
        }
    }

    /// Returns the source for a kernel: packages get the kernel's architecture, and the release in their names.
    pub fn for_kernel(&self, target: &KernelTarget) -> Result<Self, String> {
        let mut spec = self.for_architecture(target.arch);
        match &mut spec.from {
            SourceOrigin::Apt(source) => {
                let name = target.fill(source.package.as_str());
                source.package = name.parse().map_err(|_| format!("no package can be named {name}"))?;
            }
            SourceOrigin::Rpm(source) => source.kernel = Some(target.clone()),
            _ => {}
        }
        Ok(spec)
    }

    /// Returns the source for an architecture, because packages may contain compiled parts.
    #[must_use]
    pub fn for_architecture(&self, arch: Architecture) -> Self {
        let mut spec = self.clone();
        if let SourceOrigin::Apt(source) = &mut spec.from {
            source.arch = Some(arch);
        }
        spec
    }
}

/// Origin of a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SourceOrigin {
    /// A file (archive) or directory, relative to the definitions directory.
    Path {
        /// The path.
        path: LocalPath,
        /// Expected SHA-256 of the file, hexadecimal. Not allowed for directories.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<Sha256>,
    },
    /// A download. farrier unpacks archives: tar (plain, gzip, xz, zstd), packages (`.deb`, `.rpm`) and self-extracting archives
    /// (`.run`), which are not executed.
    Url {
        /// The address, `http` or `https`.
        url: Download,
        /// SHA-256 of the file, hexadecimal.
        sha256: Sha256,
    },
    /// The tree of a Git commit. Nothing in the repository is executed.
    Git(GitSource),
    /// A package of a Debian-like archive. It is unpacked, not installed.
    Apt(AptSource),
    /// A package with a kernel's modules, from RPM repositories. It is unpacked, not installed.
    Rpm(RpmSource),
    /// Precompiled third-party modules in an image, such as one for KMM or a vendor's.
    Image(SourceImage),
}

/// A third-party image with compiled modules. Nothing in it is executed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceImage {
    /// Its reference, with a tag or a digest. These placeholders are replaced with the kernel's values: `{{release}}`,
    /// `{{kernel_label}}` (the release in the form of a tag), `{{os_id}}`, `{{os_version}}`, `{{releasever}}`, `{{arch}}`
    /// (`amd64`) and `{{basearch}}` (`x86_64`). farrier identifies the image by its digest. If the image does not exist, the plan
    /// says so.
    pub reference: ImagePattern,
    /// The directory in the image that is the source, such as `/opt/lib/modules`, with the same placeholders. Default: the whole
    /// image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
    /// Public keys in PEM form, relative to the definitions directory. One of them must have signed the image, as `cosign` does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<LocalPath>,
    /// Allow a site that signs modules or images to sign these modules without a signature by a key of `signedBy`. Set this only
    /// if everyone who may write to that registry is trusted like the site itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopt_unsigned: bool,
}

impl SourceImage {
    /// Returns the image for a kernel and the directory in it. An error names the missing value or invalid reference.
    pub fn for_kernel(&self, target: &KernelTarget) -> Result<(ImageReference, Option<String>), String> {
        let path = self.path.as_ref().map(|path| text_for(path, target)).transpose()?;
        Ok((image_for(&self.reference, target)?, path))
    }

    /// Whether the image is untrusted: neither `signedBy` nor `adoptUnsigned` is set.
    pub(crate) fn is_untrusted(&self) -> bool {
        self.signed_by.is_empty() && !self.adopt_unsigned
    }
}

/// A package of a Debian-like archive whose files are a source.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AptSource {
    /// The package's name. `{{release}}` is replaced with the kernel release.
    pub package: SourcePackage,
    /// Exact version. Default: the newest one in the suites.
    pub version: Option<PackageVersion>,
    /// Suites, such as `bookworm`, `sid`.
    pub suites: NonEmpty<Suite>,
    /// Components. Default: `main`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The archive's address. Default: the host's entry for the suite.
    pub mirror: Option<Mirror>,
    /// Keyring that verifies the archive, relative to the definitions directory or absolute. Default: the keyring of
    /// the host's entry.
    pub signed_by: Option<LocalPath>,
    /// Architecture of the package. Default: this machine's.
    #[serde(skip)]
    pub arch: Option<Architecture>,
}

/// An RPM package that contains one kernel's modules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmSource {
    /// The package's name. ` | ` separates alternatives: the first package for the kernel's release is used. `{{flavor}}` is
    /// replaced with the text after the last `-` of the release, `{{release}}` with the release in any form that package names
    /// use. A package belongs to the kernel that its provides or its files name.
    pub package: RpmAlternatives,
    /// Repositories that contain the package.
    pub from: RpmArchive,
    /// The kernel.
    #[serde(skip)]
    pub kernel: Option<KernelTarget>,
}

impl AptSource {
    /// Suites and components to search for the package.
    pub fn apt_suites(&self) -> AptSuites {
        let Self { package: _, version: _, suites, components, mirror, signed_by, arch: _ } = self.clone();
        AptSuites { suites: suites.to_vec(), components, mirror, signed_by }
    }
}

/// Firmware files that the image brings for its modules.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FirmwareSpec {
    /// Name of the source that has the files.
    pub source: ImageName,
    /// A file or directory of the source. Default: the whole source, which is then not among the sources to compile.
    pub path: Option<FirmwarePath>,
    /// The directory below `/lib/firmware` for the files. Default: `/lib/firmware` itself.
    pub to: Option<FirmwarePath>,
}

impl FirmwareSpec {
    /// Returns the words of the `COPY` instruction that adds the files to the payload.
    pub(crate) fn copy_words(&self) -> String {
        let Self { source, path, to } = self;
        let path = path.as_ref().map_or("", FirmwarePath::as_str);
        let to = to.as_ref().map_or_else(String::new, |to| format!("{to}/"));
        format!("sources/{source}/{path} /out/lib/firmware/{to}")
    }
}

/// A patch that the template applies.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PatchSpec {
    /// The file, relative to the definitions directory. If it does not exist there, farrier uses its built-in patch of that name.
    pub path: LocalPath,
    /// The range of kernels that the patch is for, as in the image's `kernels`. Default: every kernel.
    pub kernels: Option<KernelRange>,
    /// A regular expression that must match the whole kernel release.
    pub release: Option<Pattern>,
    /// Condition on the kernel's headers, for changes that distributions backported to older kernel versions.
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
        assert!(!plain.differs_by_kernel() && spec.differs_by_kernel());
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
        assert!(spec.differs_by_kernel());
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
        insta::assert_snapshot!(release.for_kernel(&target("6.1.0-acme+")).unwrap_err(), @r#"image for 6.1.0-acme+: "6.1.0-acme+" is not a tag (1 to 128 of A-Za-z0-9_.-, not starting with . or -) (in a tag, write {{kernel_label}} for the release)"#);
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
        for (more, is_untrusted) in
            [("", true), (r#", "signedBy": ["keys/acme.pub"]"#, false), (r#", "adoptUnsigned": true"#, false)]
        {
            let read = read(&format!(r#"{{"image": {{"reference": "r.test/acme:1"{more}}}}}"#)).unwrap();
            assert!(matches!(read.from, SourceOrigin::Image(image) if image.is_untrusted() == is_untrusted));
        }
    }
}
