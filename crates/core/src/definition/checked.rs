//! String types of the definitions, each with its own syntax, so that an error message can point at the faulty value.
//!
//! Every value ends up in a path, a package tool's argument, a Dockerfile or an object's name. The types accept only what
//! is valid there, and the JSON Schema shows the same patterns.

use std::{
    borrow::Borrow,
    path::{Path, PathBuf},
    str::FromStr,
    sync::LazyLock,
};

use derive_more::{AsRef, Debug, Deref, Display, Into};
use oci::ImageReference;
use regex::Regex;
use schemars::json_schema;
use serde::Serialize;
use serde_with::DeserializeFromStr;

use super::form::{ParseError, text_schema};

/// Defines string types, each validated by a pattern. `(named)` gives the type its own definition in the JSON Schema;
/// `(no_pattern)` omits the pattern from the schema.
macro_rules! texts {
    ($($(#[doc = $doc:literal])* $name:ident $(($schema:ident))?: $pattern:literal, $expected:literal $(, $validate:expr)?;)*) => {
        $(
            $(#[doc = $doc])*
            #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, DeserializeFromStr, AsRef, Debug, Deref, Display, Into)]
            #[as_ref(str)]
            #[debug("{_0:?}")]
            pub struct $name(#[deref(forward)] String);

            impl $name {
                /// Regular expression that matches the whole text, in the dialect that JSON Schema and Rust share.
                pub const PATTERN: &'static str = $pattern;

                /// Returns the text.
                pub fn as_str(&self) -> &str {
                    &self.0
                }
            }

            impl FromStr for $name {
                type Err = ParseError;

                fn from_str(text: &str) -> Result<Self, ParseError> {
                    static REGEX: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new($pattern).ok());
                    if REGEX.as_ref().is_some_and(|r| r.is_match(text)) $(&& $validate(text))? {
                        Ok(Self(text.to_owned()))
                    } else {
                        Err(ParseError::new(text, $expected))
                    }
                }
            }

            text_schema!($name, texts!(@inline $($schema)?), texts!(@schema $pattern, concat!($($doc),*).trim(), $($schema)?));

            impl Borrow<str> for $name {
                fn borrow(&self) -> &str {
                    &self.0
                }
            }

            impl PartialEq<&str> for $name {
                fn eq(&self, other: &&str) -> bool {
                    self.0 == *other
                }
            }
        )*

        #[cfg(test)]
        const PATTERNS: &[&str] = &[$($pattern),*];
    };
    (@inline named) => { false };
    (@inline $($no_pattern:ident)?) => { true };
    (@schema $pattern:literal, $doc:expr, ) => { json_schema!({"type": "string", "pattern": $pattern}) };
    (@schema $pattern:literal, $doc:expr, no_pattern) => { json_schema!({"type": "string"}) };
    (@schema $pattern:literal, $doc:expr, named) => {
        json_schema!({"type": "string", "pattern": $pattern, "description": $doc})
    };
}

texts! {
    // Sources and other definitions have names of this type, too. The schema publishes the type's name, so it stays.
    /// A DNS name of 1 to 63 characters. It is also the last part of a repository's name.
    ImageName(named): r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$",
        "a name: 1 to 63 of `a-z`, `0-9`, `-` and `.`, a letter or digit at both ends of each part",
        |text: &str| text.len() <= 63;
    /// `ID` of `/etc/os-release`: 1 to 63 characters of `[A-Za-z0-9._-]`, not starting with `.` or `-`.
    OsId(named): "^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$",
        "an operating system id: 1 to 63 letters, digits and `._-`";
    /// `VERSION_ID` of `/etc/os-release`: 1 to 63 characters of `[A-Za-z0-9._-]`, not starting with `.` or `-`.
    OsVersion(named): "^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$",
        "an operating system version: 1 to 63 letters, digits and `._-`";
    /// The value of the node label `feature.node.kubernetes.io/kernel-version.full`. All its characters are valid in a tag.
    KernelLabel: "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        "a kernel label: 1 to 63 letters, digits and `._-`, a letter or digit at both ends";
    /// A driver's version: safe in a shell word, in a label, and, after replacement of some characters, in a tag.
    DriverVersion: "^[A-Za-z0-9][A-Za-z0-9._+~:-]{0,127}$",
        "a driver version: up to 128 letters, digits and `._+~:-`, starting with a letter or digit";
    /// A template's name: the first part of its file name.
    TemplateName: "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        "a template name: up to 63 letters, digits, `_` and `-`, starting with a letter or digit";
    /// Name of a template variable.
    VariableName(no_pattern): "^[A-Za-z_][A-Za-z0-9_]*$", "a variable name: letters, digits and `_`";
    /// A single line, which cannot start another Dockerfile instruction.
    OneLine(no_pattern): r"^[^\x00-\x1f\x7f]*$", "one line of text without control characters";
    /// A kernel module's name, without `.ko`.
    ModuleName: "^[A-Za-z0-9_-]{1,55}$",
        "a module name: up to 55 letters, digits, `_` and `-`, without `.ko`";
    /// Name of an environment variable.
    EnvName(no_pattern): "^[A-Za-z_][A-Za-z0-9_]*$", "an environment variable's name: letters, digits and `_`";
    /// Value of an environment variable, or a command-line argument.
    Argument: r"^[^\x00]*$", "an argument: it contains a NUL character";
    /// Name of a Kubernetes namespace or container.
    DnsLabel: "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "a DNS label: up to 63 of `a-z`, `0-9` and `-`, a letter or digit at both ends";
    /// Name of a Kubernetes object.
    DnsName: r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$",
        "a DNS name: up to 253 of `a-z`, `0-9`, `-` and `.`, a letter or digit at both ends of each part",
        |text: &str| text.len() <= 253;
    /// Key of a Kubernetes label.
    LabelKey(no_pattern): r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        "a label key: an optional DNS name and `/`, then up to 63 letters, digits and `_.-`";
    /// Value of a Kubernetes label.
    LabelValue(no_pattern): "^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
        "a label value: up to 63 letters, digits and `_.-`, a letter or digit at both ends";
    /// A percentage of nodes.
    Share: "^([1-9][0-9]?|100)%$", "a share of the nodes from `1%` to `100%`";
    /// A schedule: cron's five fields, then a time zone of the IANA database.
    CronSchedule: r"^([A-Za-z0-9*,/#?-]+ +){5}[A-Za-z][A-Za-z0-9_+/-]*$",
        "a cron schedule with a time zone, as in `0 22 * * 1-5 Europe/Berlin`",
        |text: &str| cronexpr::parse_crontab(text).is_ok();
    /// Extended resources, as in pod requests. The name may end in `*`.
    ResourcePattern: r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/([A-Za-z0-9]([A-Za-z0-9_.-]*\*?)|\*)$",
        "an extended resource as pods request it, as in `nvidia.com/gpu` or `rdma/*`";
    /// Name of a Debian package.
    PackageName: "^[a-z0-9][a-z0-9+.-]+$",
        "a package name: `a-z`, `0-9` and `+.-`, starting with a letter or digit";
    /// Name of a Debian package whose files are a source.
    SourcePackage: r"^([a-z0-9]|\{\{release\}\})([a-z0-9+.-]|\{\{release\}\})+$",
        "a package name: `a-z`, `0-9` and `+.-`, starting with a letter or digit, where `{{release}}` is replaced by the kernel release";
    /// Name of a package of a header set.
    PackagePattern: r"^([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+$",
        "a package name, where `{{release}}` is replaced by the kernel release";
    /// Alternative package names; the first package that exists is used.
    PackageAlternatives: r"^([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+( \| ([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+)*$",
        "a package name, or several with ` | ` between them, where `{{release}}` is replaced by the kernel release";
    /// Name of an RPM package.
    RpmName: r"^[A-Za-z0-9_][A-Za-z0-9+._-]*$",
        "an RPM package's name: letters, digits and `+._-`, starting with a letter, a digit or `_`";
    /// Name of a DNF module (of RPM repositories), or of one of its streams.
    StreamName: r"^[A-Za-z0-9][A-Za-z0-9+._-]*$",
        "the name of a module or of a stream: letters, digits and `+._-`, starting with a letter or digit";
    /// Alternative RPM package names; the first package for the kernel's release is used.
    RpmAlternatives: r"^[A-Za-z0-9_][A-Za-z0-9+._-]*(\{\{(flavor|release)\}\}[A-Za-z0-9+._-]*)?( \| [A-Za-z0-9_][A-Za-z0-9+._-]*(\{\{(flavor|release)\}\}[A-Za-z0-9+._-]*)?)*$",
        "an RPM package's name, or several with ` | ` between them, where `{{flavor}}` is replaced by the part of the kernel release after its last `-`, and `{{release}}` by the release in any form";
    /// URL of an RPM repository, or of a list of its mirrors.
    RepositoryAddress: r"^https?://[^\s\x00-\x1f/?#@{}]+(/([^\s\x00-\x1f{}#]|\{\{(releasever|releasever_major|releasever_minor|basearch)\}\})*)?$",
        "an RPM repository's address: `http://` or `https://`, without a password (reference it in site.yaml: `login` under `hosts`), in which `{{releasever}}`, `{{releasever_major}}`, `{{releasever_minor}}` and `{{basearch}}` are replaced by the values of the node's system";
    /// A package argument that both apt-get and mmdebstrap accept.
    PackageToInstall: r"^[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(/[A-Za-z0-9.+~:-]+|=([A-Za-z0-9.+~:-]|\{\{ *version *\}\})+\*?)?$",
        "a package to install: `name`, `name:arch`, `name=version` or `name/suite`; a version may end in `*`, and in a runtime base `{{version}}` in it is replaced by the driver's";
    /// An SPDX license expression.
    LicenseExpression: r"^\(*[A-Za-z0-9][A-Za-z0-9.:-]*\+?\)*( (AND|OR|WITH) \(*[A-Za-z0-9][A-Za-z0-9.:-]*\+?\)*)*$",
        "an SPDX license expression, as in `GPL-2.0-only OR MIT`; a license without an SPDX identifier is `LicenseRef-NAME`";
    /// Version of a Debian package.
    PackageVersion: "^[0-9A-Za-z][A-Za-z0-9.+~:-]*$", "a package version: letters, digits and `.+~:-`";
    /// A suite of a Debian-like archive; a directory of a flat archive ends in `/`.
    Suite: r"^([A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*/?|\./)$",
        "a suite: letters, digits and `._-`, as in `bookworm-security`, or a directory of a flat archive, as in `./`";
    /// A kernel's flavor.
    Flavor: "^[A-Za-z][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*$",
        "a kernel's flavor: letters, digits, `_` and `-`, as in `cloud-amd64`";
    /// A component of a Debian-like archive.
    Component: r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", "a component: letters, digits and `._/-`, as in `main`";
    /// URL of a Debian-like archive. Blanks and brackets would change the meaning of a line in an apt source list.
    Mirror: r"^(https?://[^\s\x00-\x1f\[\]/?#@]+([/?#][^\s\x00-\x1f\[\]]*)?|file://?[^\s\x00-\x1f\[\]]+)$",
        "an archive's address: `http://`, `https://` or `file:///`, without a password (apt reads those from /etc/apt/auth.conf)";
    /// URL of a download. Definitions are shared, so passwords belong where secrets are kept.
    Download: r"^https?://[^\s\x00-\x1f/?#@]+([/?#][^\s\x00-\x1f]*)?$",
        "a download's address: `http://` or `https://`, without a password (reference it in site.yaml: `login` under `hosts`)";
    /// URL of a Git repository.
    GitAddress: r"^(https?://[^\s\x00-\x1f/?#@]+|ssh://([A-Za-z0-9._][A-Za-z0-9._-]*@)?[A-Za-z0-9\[][^\s\x00-\x1f/?#@]*|file://)/[^\s\x00-\x1f?#]+$",
        "a Git repository's address: `https://host/path`, `ssh://user@host/path` or `file:///path`, without a password (reference it in site.yaml: `login` or `sshKey` under `hosts`)";
    /// A Git branch, or the prefix of branch names.
    GitBranch: r"^[A-Za-z0-9_]([A-Za-z0-9._/-]{0,198}[A-Za-z0-9_/-])?$",
        "a branch: up to 200 letters, digits and `._/-`, starting with a letter or digit",
        |text: &str| !text.contains("..") && !text.contains("//") && !text.contains("/.") && !text.contains(".lock");
    /// Full name of a Git branch or tag.
    GitRef: r"^refs/(heads|tags)/[A-Za-z0-9_]([A-Za-z0-9._/+@%=,-]{0,198}[A-Za-z0-9_+-])?$",
        "the full name of a branch (`refs/heads/main`) or of a tag (`refs/tags/v1.0`)",
        |text: &str| !["..", "//", "/.", "./", ".lock"].iter().any(|part| text.contains(part));
    /// A Git commit.
    GitCommitId: "^([0-9a-f]{40}|[0-9a-f]{64})$", "a commit: all 40 or 64 digits of `0-9a-f`";
    /// Path of a file or directory in a Git repository.
    RepositoryPath: r"^[^/:*?\[\\\x00-\x1f\x7f][^:*?\[\\\x00-\x1f\x7f]*$",
        "a path inside the repository (no `/` at its start, no `.`, `..` or empty component, none of `:*?[\\`)",
        |text: &str| stays_inside(text);
    /// A SHA-256 checksum as sha256sum prints it.
    Sha256: "^[0-9A-Fa-f]{64}$", "a sha256: 64 hexadecimal digits";
    /// A path inside a tree that farrier unpacked. The last component may contain one `*`.
    InnerPattern: r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        "a relative path that stays inside (no `/` at its start, no `.`, `..` or empty component), with at most one `*`, in its last component",
        |text: &str| stays_inside(text) && star_only_in_last_component(text);
    /// Path of firmware in a source, or below `/lib/firmware`. It is a word of a Dockerfile's `COPY`.
    FirmwarePath: r"^[A-Za-z0-9_][A-Za-z0-9._+,@/-]*$",
        "a relative path of letters, digits and `._+,@/-` (no `.`, `..` or empty component)",
        |text: &str| stays_inside(text);
    /// A compiler with its major version.
    CompilerName: "^(gcc|clang)-[1-9][0-9]{0,2}$", "a compiler with its major version, as in `gcc-12` or `clang-18`";
    /// Path of a file inside a kernel's build tree.
    HeaderFile: r"^[^/*\x00-\x1f\x7f][^*\x00-\x1f\x7f]*$",
        "a file of the kernel's build tree, as in `include/linux/pci.h` (no `/` at its start, no `.`, `..` or empty component)",
        |text: &str| stays_inside(text);
    /// An absolute path in a payload. The last component may contain one `*`.
    ExposedPath: r"^/[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        "an absolute path with no `.`, `..` or empty component, with at most one `*`, in its last component",
        |text: &str| {
            text.strip_prefix('/').is_some_and(|inner| stays_inside(inner) && star_only_in_last_component(inner))
        };
    /// Reference of an existing image.
    Reference: r"^[^\s\x00-\x1f]+$",
        "an image reference with a tag or a digest, as in `registry.example/base:1.0`",
        |text: &str| text.parse::<ImageReference>().is_ok();
    /// An image reference with placeholders for the kernel.
    ImagePattern(no_pattern): r"^[^\s\x00-\x1f]+$",
        "an image reference with a tag or a digest, as in `registry.example/base:1.0`; docs/definitions.md lists the placeholders for the kernel's values (`{{release}}`, after an `@` `{{digest}}`, ...)",
        |text: &str| with_samples(&text.replace("@{{digest}}", ":1")).parse::<ImageReference>().is_ok();
    /// URL of a file that belongs to a kernel, with placeholders for the kernel.
    FileAddress(no_pattern): r"^https?://[^\s\x00-\x1f/?#@{}]+/[^\s\x00-\x1f#]+$",
        "an address: `http://` or `https://`, without a password (reference it in site.yaml: `login` under `hosts`); docs/definitions.md lists the placeholders for the kernel's values in its path (`{{release}}`, ...)",
        |text: &str| !with_samples(text).contains(['{', '}']);
    /// Path of a file or directory inside an image or archive, with placeholders for the kernel.
    PathInside(no_pattern): r"^/[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        "an absolute path with no `.`, `..` or empty component; docs/definitions.md lists the placeholders for the kernel's values (`{{release}}`, ...)",
        |text: &str| {
            let filled = with_samples(text);
            !filled.contains(['{', '}']) && filled.strip_prefix('/').is_some_and(stays_inside)
        };
    /// An image digest.
    ImageDigest: "^sha256:[0-9a-f]{64}$", "a digest: `sha256:` and 64 digits of `0-9a-f`";
    /// An OpenShift ImageStream: its namespace and name.
    ImageStream: "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        "an ImageStream: its namespace, `/` and its name";
    /// Path of a file or directory with headers.
    HeadersPath(no_pattern): r"^[^\x00-\x1f\x7f]+$",
        "a path in which `{{release}}` is the only placeholder",
        |text: &str| !text.replace("{{release}}", "").contains(['{', '}']);
}

/// Placeholders for the kernel in an [`ImagePattern`], a [`FileAddress`] and a [`PathInside`].
pub(crate) const KERNEL_PLACEHOLDERS: [&str; 7] = [
    "{{release}}",
    "{{kernel_label}}",
    "{{os_id}}",
    "{{os_version}}",
    "{{releasever}}",
    "{{arch}}",
    "{{basearch}}",
];

/// Placeholders in the same types whose values come from the system of the kernel's nodes.
pub(crate) const SYSTEM_PLACEHOLDERS: [&str; 3] = ["{{ostree_version}}", "{{rhel_version}}", "{{digest}}"];

/// Replaces each placeholder except `{{digest}}` with `1`, to validate the syntax of the result.
fn with_samples(text: &str) -> String {
    let [ostree_version, rhel_version, _] = SYSTEM_PLACEHOLDERS;
    let placeholders = KERNEL_PLACEHOLDERS.into_iter().chain([ostree_version, rhel_version]);
    placeholders.fold(text.to_owned(), |text, placeholder| text.replace(placeholder, "1"))
}

/// Implements `filled` for types with placeholders. The values come from validated types, so they contain no separators.
macro_rules! filled {
    ($($name:ident)*) => {
        $(impl $name {
            /// Replaces placeholders with `fill`. Placeholders without a known value may remain.
            #[must_use]
            pub(crate) fn filled(&self, fill: impl Fn(&str) -> String) -> Self {
                Self(fill(&self.0))
            }
        })*
    };
}

filled! { ImagePattern FileAddress PathInside }

impl From<PackageName> for SourcePackage {
    fn from(name: PackageName) -> Self {
        Self(name.0)
    }
}

impl Suite {
    /// The suite of Debian 12.
    pub(crate) fn bookworm() -> Self {
        Self("bookworm".to_owned())
    }
}

impl PackageName {
    /// Debian's package of the statically linked busybox.
    pub(crate) fn busybox() -> Self {
        Self("busybox-static".to_owned())
    }
}

impl PackageToInstall {
    /// The package that contains `modprobe` and `lsmod`.
    pub(crate) fn kmod() -> Self {
        Self("kmod".to_owned())
    }

    /// Replaces each `{{version}}`, with or without blanks inside the braces, with the driver's version. A driver version may
    /// contain characters that a package version may not. The installation rejects such a result.
    pub(crate) fn for_version(&self, version: &str) -> Self {
        let mut parts = self.split("{{");
        let mut filled = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            filled.push_str(version);
            filled.push_str(part.split_once("}}").map_or("", |(_, suffix)| suffix));
        }
        Self(filled)
    }
}

fn stays_inside(path: &str) -> bool {
    path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

fn star_only_in_last_component(path: &str) -> bool {
    let (directory, component) = path.rsplit_once('/').unwrap_or(("", path));
    !directory.contains('*') && component.matches('*').count() <= 1
}

/// Whether a name matches the last component of an [`InnerPattern`] or [`ExposedPath`], in which one `*` matches any text.
pub fn matches_glob(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => {
            name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
    }
}

/// Path of a file on this machine, absolute or relative to the definitions directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, DeserializeFromStr, AsRef, Debug, Deref)]
#[as_ref(Path)]
#[debug("{_0:?}")]
pub struct LocalPath(#[deref(forward)] PathBuf);

text_schema!(LocalPath, true, json_schema!({"type": "string"}));

impl FromStr for LocalPath {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        if text.is_empty() || text.contains(|c: char| c.is_ascii_control()) {
            return Err(ParseError::new(text, "a path"));
        }
        Ok(Self(text.into()))
    }
}

/// Converts a list of text types to strings.
pub fn to_strings<T: AsRef<str>>(list: &[T]) -> Vec<String> {
    list.iter().map(|text| text.as_ref().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepts<T: FromStr>(text: &str) -> bool {
        text.parse::<T>().is_ok()
    }

    #[test]
    fn every_pattern_compiles() {
        for pattern in PATTERNS {
            assert!(Regex::new(pattern).is_ok(), "{pattern}");
        }
    }

    #[test]
    fn values_that_would_escape_are_refused() {
        assert!(!accepts::<OneLine>("a\nRUN id"));
        assert!(!accepts::<OneLine>("a\n"));
        assert!(!accepts::<PackageName>("-oAPT::Update"));
        assert!(!accepts::<PackageName>("../x"));
        assert!(!accepts::<PackagePattern>("linux-{{version}}"));
        assert!(accepts::<PackagePattern>("linux-headers-{{release}}"));
        assert!(accepts::<SourcePackage>("linux-modules-nvidia-535-{{release}}"));
        assert!(!accepts::<SourcePackage>("linux-modules-{{version}}"));
        assert!(!accepts::<SourcePackage>("Linux"));
        assert!(!accepts::<PackageToInstall>("gcc; id"));
        assert!(accepts::<PackageToInstall>("gcc-12=12.2.0-14+deb12u1"));
        assert!(accepts::<PackageToInstall>("nvidia-smi={{version}}-*"));
        assert!(!accepts::<PackageToInstall>("nvidia-smi={{release}}"));
        assert!(!accepts::<PackageToInstall>("nvidia-*"));
        assert!(!accepts::<Mirror>("http://x/ [trusted=yes]"));
        for (scheme, rest) in
            [("https:", "x.test/a@1.tgz"), ("http:", "x.test:8080"), ("http:", "x.test?a@b")]
        {
            for (login, is_good) in
                [("", true), ("me:secret@", false), ("token@", false), ("/me:secret@", false)]
            {
                let address = format!("{scheme}//{login}{rest}");
                assert_eq!(accepts::<Download>(&address), is_good, "{address}");
                assert_eq!(accepts::<Mirror>(&address), is_good, "{address}");
            }
        }
        assert!(accepts::<Mirror>("file:///srv/debian"));
        for (address, is_good) in [
            ("https://g.example/x", true),
            ("https://me:secret@g.example/x", false),
            ("https://token@g.example/x", false),
            ("ssh://git@g.example/x", true),
            ("ssh://git:secret@g.example/x", false),
        ] {
            assert_eq!(accepts::<GitAddress>(address), is_good, "{address}");
        }
        assert!(!accepts::<DnsName>("a..b"));
        assert!(!accepts::<ModuleName>("nvidia.ko"));
        assert!(!accepts::<LabelValue>("a b"));
        assert!(accepts::<LabelKey>("feature.node.kubernetes.io/pci-15b3.present"));
        assert!(!accepts::<DriverVersion>("1.0$(id)"));
    }

    #[test]
    fn inner_paths_stay_inside() {
        for path in ["", "/etc", "..", "a/../..", "./a", "a//b", "a/", "a\nb"] {
            assert!(!accepts::<InnerPattern>(path), "{path:?} was accepted");
        }
        assert!(accepts::<InnerPattern>("usr/src/nvidia-open-kernel.tar.xz"));
        assert!(accepts::<InnerPattern>("usr/src/mstflint-*"));
        assert!(!accepts::<InnerPattern>("usr/*/mstflint"));
        assert!(!accepts::<InnerPattern>("usr/src/*-*"));
        assert!(!accepts::<InnerPattern>("../*"));
    }

    #[test]
    fn placeholders_stand_for_the_kernel_and_nothing_else() {
        for (text, is_good) in [
            ("ghcr.io/acme/kernel:{{os_version}}", true),
            ("r.test/{{os_id}}/{{arch}}:{{kernel_label}}-{{release}}", true),
            ("r.test/toolkit:{{rhel_version}}-{{ostree_version}}", true),
            ("r.test/toolkit@{{digest}}", true),
            ("r.test/toolkit:1", true),
            ("r.test/toolkit:{{digest}}", false),
            ("r.test/toolkit:{{version}}", false),
            ("r.test/toolkit", false),
            ("r.test/x:{{release}}\nRUN id", false),
        ] {
            assert_eq!(accepts::<ImagePattern>(text), is_good, "{text}");
        }
        for (text, is_good) in [
            ("https://h.test/{{os_version}}/{{basearch}}/headers-{{release}}.tgz?x=1", true),
            ("https://{{os_id}}.test/x", false),
            ("https://h.test/{{digest}}", false),
            ("https://me:secret@h.test/x", false),
            ("https://h.test", false),
            ("file:///etc/passwd", false),
        ] {
            assert_eq!(accepts::<FileAddress>(text), is_good, "{text}");
        }
        for (text, is_good) in [
            ("/usr/src/kernels/{{release}}", true),
            ("/kernel-devel.tar.xz", true),
            ("/", false),
            ("usr/src", false),
            ("/usr/../etc", false),
            ("/usr/{{version}}", false),
        ] {
            assert_eq!(accepts::<PathInside>(text), is_good, "{text}");
        }
    }

    #[test]
    fn one_star_fits_any_text() {
        for (pattern, name, wanted) in [
            ("a*", "abc", true),
            ("a*c", "ac", true),
            ("ab*bc", "abc", false),
            ("*", "", true),
            ("abc", "abc", true),
            ("abc", "ab", false),
            ("nvidia-*", "nvidia-535.1", true),
            ("nvidia-*", "nvidia", false),
            ("*", "x", true),
            ("a*a", "a", false),
            ("a*b", "a-b", true),
            ("x", "xx", false),
        ] {
            assert_eq!(matches_glob(pattern, name), wanted, "{pattern} {name}");
        }
    }
}
