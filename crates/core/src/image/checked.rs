//! Pure: rules for the strings of definitions, applied where they are read, so that the message can point at them.
//!
//! Everything here ends up in a path, an argument of a package tool, a Dockerfile or an object's name; the
//! rules admit what those can hold, and the JSON Schema shows the same patterns.

use std::{collections::BTreeMap, fmt, marker::PhantomData, path::PathBuf, sync::LazyLock};

use regex::Regex;
use serde::{Deserialize, Deserializer, de::Error as _};

/// What a string must look like.
pub trait Rule {
    /// A regular expression over the whole string, in the dialect that JSON Schema and Rust share.
    const PATTERN: &'static str;
    /// The same in words, as the end of "... is not".
    const WHAT: &'static str;

    /// Is the string one of these?
    fn accepts(text: &str) -> bool;
}

macro_rules! rules {
    ($($(#[$doc:meta])* $name:ident: $pattern:literal, $what:literal $(, $also:expr)?;)*) => {
        $(
            $(#[$doc])*
            #[derive(PartialEq, Eq, PartialOrd, Ord)]
            pub enum $name {}

            impl Rule for $name {
                const PATTERN: &'static str = $pattern;
                const WHAT: &'static str = $what;

                fn accepts(text: &str) -> bool {
                    static REGEX: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new($pattern).ok());
                    REGEX.as_ref().is_some_and(|r| r.is_match(text)) $(&& $also(text))?
                }
            }
        )*

        #[cfg(test)]
        const PATTERNS: &[&str] = &[$($pattern),*];
    };
}

rules! {
    /// A driver's version: safe in a shell word, a tag (after replacing) and a label.
    DriverVersion: "^[A-Za-z0-9][A-Za-z0-9._+~:-]{0,127}$",
        "a driver version: up to 128 letters, digits and `._+~:-`, starting with a letter or digit";
    /// A template's name, the file name's first part.
    TemplateName: "^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$",
        "a template name: up to 63 letters, digits, `_` and `-`, starting with a letter or digit";
    /// A template variable.
    VariableName: "^[A-Za-z_][A-Za-z0-9_]*$", "a variable name: letters, digits and `_`";
    /// A value that cannot begin another Dockerfile instruction.
    OneLine: r"^[^\x00-\x1f\x7f]*$", "one line of text without control characters";
    /// A kernel module's name, without `.ko`.
    ModuleName: "^[A-Za-z0-9_-]{1,55}$",
        "a module name: up to 55 letters, digits, `_` and `-`, without `.ko`";
    /// A name in the environment.
    EnvName: "^[A-Za-z_][A-Za-z0-9_]*$", "an environment variable's name: letters, digits and `_`";
    /// A value in the environment, or an argument.
    Argument: r"^[^\x00]*$", "an argument: it holds a NUL character";
    /// A Kubernetes namespace or container.
    DnsLabel: "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        "a DNS label: up to 63 of `a-z`, `0-9` and `-`, a letter or digit at both ends";
    /// A Kubernetes object's name.
    DnsName: r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$",
        "a DNS name: up to 253 of `a-z`, `0-9`, `-` and `.`, a letter or digit at both ends of each part",
        |text: &str| text.len() <= 253;
    /// A Kubernetes label's key.
    LabelKey: r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        "a label key: an optional DNS name and `/`, then up to 63 letters, digits and `_.-`";
    /// A Kubernetes label's value.
    LabelValue: "^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$",
        "a label value: up to 63 letters, digits and `_.-`, a letter or digit at both ends";
    /// A Debian package.
    PackageName: "^[a-z0-9][a-z0-9+.-]+$",
        "a package name: `a-z`, `0-9` and `+.-`, starting with a letter or digit";
    /// A package of a header set.
    PackagePattern: r"^([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+$",
        "a package name, in which `{{release}}` may stand for the kernel release";
    /// Packages of which the first that exists is taken.
    PackageAlternatives: r"^([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+( \| ([a-z0-9]|\{\{ *release *\}\})([A-Za-z0-9+._-]|\{\{ *release *\}\})+)*$",
        "a package name, or several with ` | ` between them, in which `{{release}}` may stand for the kernel release";
    /// What mmdebstrap and apt-get take as a package to install.
    PackageToInstall: r"^[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?(/[A-Za-z0-9.+~:-]+|=([A-Za-z0-9.+~:-]|\{\{ *version *\}\})+\*?)?$",
        "a package to install: `name`, `name:arch`, `name=version` or `name/suite`; a version may end in `*`, and in a runtime base `{{version}}` in it stands for the driver's";
    /// A Debian package's version.
    PackageVersion: "^[0-9A-Za-z][A-Za-z0-9.+~:-]*$", "a package version: letters, digits and `.+~:-`";
    /// A suite of a Debian-like archive.
    Suite: r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$",
        "a suite: letters, digits and `._-`, as in `bookworm-security`";
    /// A kernel's flavour.
    Flavour: "^[A-Za-z][A-Za-z0-9_]*(-[A-Za-z0-9_]+)*$",
        "a kernel's flavour: letters, digits, `_` and `-`, as in `cloud-amd64`";
    /// A component of a Debian-like archive.
    Component: r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", "a component: letters, digits and `._/-`, as in `main`";
    /// The address of a Debian-like archive. Blanks and brackets would say something else in an apt source.
    Mirror: r"^(https?|file)://?[^\s\x00-\x1f\[\]]+$", "an archive's address: `http://`, `https://` or `file:///`";
    /// A download.
    Download: r"^https?://[^\s\x00-\x1f]+$", "a download's address: `http://` or `https://`";
    /// A sha256 as sha256sum prints it.
    Sha256: "^[0-9A-Fa-f]{64}$", "a sha256: 64 hexadecimal digits";
    /// A file on this machine, absolute or relative to the definitions directory.
    LocalPath: r"^[^\x00-\x1f\x7f]+$", "a path";
    /// A path inside a tree that farrier unpacked; the last component may hold one `*`.
    InnerPattern: r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        "a relative path that stays inside (no `/` at its start, no `.`, `..` or empty component), with at most one `*`, in its last component",
        |text: &str| stays_inside(text) && one_star_at_the_end(text);
    /// Absolute, in a payload; the last component may hold one `*`.
    ExposedPath: r"^/[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*$",
        "an absolute path with no `.`, `..` or empty component, with at most one `*`, in its last component",
        |text: &str| {
            text.strip_prefix('/').is_some_and(|inner| stays_inside(inner) && one_star_at_the_end(inner))
        };
    /// An image that exists.
    Reference: r"^[^\s\x00-\x1f]+$",
        "an image reference with a tag or a digest, as in `registry.example/base:1.0`",
        |text: &str| text.parse::<super::ImageReference>().is_ok();
    /// A file or directory of headers.
    HeadersPath: r"^[^\x00-\x1f\x7f]+$",
        "a path in which `{{release}}` is the only placeholder",
        |text: &str| !text.replace("{{release}}", "").contains(['{', '}']);
}

fn stays_inside(path: &str) -> bool {
    path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

fn one_star_at_the_end(path: &str) -> bool {
    let (directory, last) = path.rsplit_once('/').unwrap_or(("", path));
    !directory.contains('*') && last.matches('*').count() <= 1
}

/// Does a name fit the last component of an [`InnerPattern`] or [`ExposedPath`]: a text with at most one `*`, which stands
/// for any text?
pub fn fits(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, end)) => {
            name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        }
    }
}

/// A string that keeps its rule. It exists only while a definition is read: the message about it is
/// then about that very list element or key.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Checked<R>(String, PhantomData<R>);

impl<'de, R: Rule> Deserialize<'de> for Checked<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if R::accepts(&text) {
            Ok(Self(text, PhantomData))
        } else {
            Err(D::Error::custom(not(&text, R::WHAT)))
        }
    }
}

fn not(text: &str, what: impl fmt::Display) -> String {
    let shown: String = text.chars().take(80).collect();
    format!("{shown:?} is not {what}")
}

/// What is wrong with a string, for rules that are applied after reading.
pub fn fault<R: Rule>(text: &str) -> Option<String> {
    (!R::accepts(text)).then(|| not(text, R::WHAT))
}

/// Reads one string.
pub fn one<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Checked::<R>::deserialize(deserializer).map(|checked| checked.0)
}

/// Reads one path.
pub fn path<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    one::<R, D>(deserializer).map(PathBuf::from)
}

/// Reads a string that may be absent.
pub fn optional<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(Option::<Checked<R>>::deserialize(deserializer)?.map(|checked| checked.0))
}

/// Reads a path that may be absent.
pub fn optional_path<'de, R: Rule, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PathBuf>, D::Error> {
    Ok(optional::<R, D>(deserializer)?.map(PathBuf::from))
}

/// Reads a list.
pub fn many<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(Vec::<Checked<R>>::deserialize(deserializer)?.into_iter().map(|checked| checked.0).collect())
}

/// Reads a list of paths.
pub fn paths<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<PathBuf>, D::Error> {
    Ok(many::<R, D>(deserializer)?.into_iter().map(PathBuf::from).collect())
}

/// Reads a list that must not be empty.
pub fn some<'de, R: Rule, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let list = many::<R, D>(deserializer)?;
    if list.is_empty() {
        Err(D::Error::custom("the list is empty, at least one is needed"))
    } else {
        Ok(list)
    }
}

/// Reads a range of versions that may be absent; semver's own message does not name the text.
pub fn version_range<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<semver::VersionReq>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    let range = text.parse().map_err(|error| {
        D::Error::custom(format!("{}: {error}", not(&text, "a range of versions such as `>=4.18, <6.18`")))
    })?;
    Ok(Some(range))
}

/// Reads a mapping.
pub fn map<'de, K, V, D>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error>
where
    K: Rule + Ord,
    V: Rule,
    D: Deserializer<'de>,
{
    let map = BTreeMap::<Checked<K>, Checked<V>>::deserialize(deserializer)?;
    Ok(map.into_iter().map(|(key, value)| (key.0, value.0)).collect())
}

/// Reads a mapping to lists that must not be empty.
pub fn map_of_some<'de, K, V, D>(deserializer: D) -> Result<BTreeMap<String, Vec<String>>, D::Error>
where
    K: Rule + Ord,
    V: Rule,
    D: Deserializer<'de>,
{
    let map = BTreeMap::<Checked<K>, Vec<Checked<V>>>::deserialize(deserializer)?;
    let lists = map.into_iter().map(|(key, values)| {
        if values.is_empty() {
            return Err(D::Error::custom(format!("{}: the list is empty, at least one is needed", key.0)));
        }
        Ok((key.0, values.into_iter().map(|value| value.0).collect()))
    });
    lists.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_compiles() {
        for pattern in PATTERNS {
            assert!(Regex::new(pattern).is_ok(), "{pattern}");
        }
    }

    #[test]
    fn values_that_would_escape_are_refused() {
        assert!(!OneLine::accepts("a\nRUN id"));
        assert!(!OneLine::accepts("a\n"));
        assert!(!PackageName::accepts("-oAPT::Update"));
        assert!(!PackageName::accepts("../x"));
        assert!(!PackagePattern::accepts("linux-{{version}}"));
        assert!(PackagePattern::accepts("linux-headers-{{release}}"));
        assert!(!PackageToInstall::accepts("gcc; id"));
        assert!(PackageToInstall::accepts("gcc-12=12.2.0-14+deb12u1"));
        assert!(PackageToInstall::accepts("nvidia-smi={{version}}-*"));
        assert!(!PackageToInstall::accepts("nvidia-smi={{release}}"));
        assert!(!PackageToInstall::accepts("nvidia-*"));
        assert!(!Mirror::accepts("http://x/ [trusted=yes]"));
        assert!(!DnsName::accepts("a..b"));
        assert!(!ModuleName::accepts("nvidia.ko"));
        assert!(!LabelValue::accepts("a b"));
        assert!(LabelKey::accepts("feature.node.kubernetes.io/pci-15b3.present"));
        assert!(!DriverVersion::accepts("1.0$(id)"));
    }

    #[test]
    fn inner_paths_stay_inside() {
        for path in ["", "/etc", "..", "a/../..", "./a", "a//b", "a/", "a\nb"] {
            assert!(!InnerPattern::accepts(path), "{path:?} was accepted");
        }
        assert!(InnerPattern::accepts("usr/src/nvidia-open-kernel.tar.xz"));
        assert!(InnerPattern::accepts("usr/src/mstflint-*"));
        assert!(!InnerPattern::accepts("usr/*/mstflint"));
        assert!(!InnerPattern::accepts("usr/src/*-*"));
        assert!(!InnerPattern::accepts("../*"));
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
            assert_eq!(fits(pattern, name), wanted, "{pattern} {name}");
        }
    }
}
