//! Ranges of kernels, such as `>=4.18, <6.18` or `>=6.1.0-56, <6.2`.

use std::{borrow::Cow, cmp::Ordering, fmt, str::FromStr};

use schemars::json_schema;
use semver::{Comparator, VersionReq};
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::{KernelTarget, OsId, debian_version, rpm_version, runs::leading_digits};
use crate::definition::{ParseError, text_schema};

/// Range of kernels: a list of bounds, all of which a kernel must satisfy.
///
/// A bound of up to three numbers is compared with the release's `x.y.z`, as in semver. A bound with more text after three
/// numbers is compared in the version order of the target's distribution: `>=6.1.0-56` includes Debian's `6.1.0-56-amd64`, but
/// not its `6.1.0-47-amd64`.
#[derive(Clone, Debug, PartialEq, Eq, DeserializeFromStr, SerializeDisplay)]
pub struct KernelRange(Vec<Bound>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Bound {
    /// Semver bound on `x.y.z`.
    Semver(Comparator),
    /// Inclusive lower bound in the distribution's version order.
    AtLeast(String),
    /// Exclusive upper bound in the distribution's version order.
    Below(String),
}

impl KernelRange {
    /// Whether the range contains the kernel.
    pub fn contains(&self, target: &KernelTarget) -> bool {
        let KernelTarget { os, os_version: _, release, arch: _ } = target;
        let compare = version_order(os, release.as_str());
        let version = sortable_version(release.as_str());
        self.0.iter().all(|bound| match bound {
            Bound::Semver(comparator) => comparator.matches(&release.version()),
            Bound::AtLeast(lower) => compare(&version, lower).is_ge(),
            Bound::Below(upper) => compare(&version, upper).is_lt(),
        })
    }
}

/// Returns the version order of a kernel's distribution: RPM's order for distributions with RPM packages, else Debian's.
pub fn version_order(os: &OsId, release: &str) -> fn(&str, &str) -> Ordering {
    // `ID` of RPM distributions in os-release, except SUSE's, whose prefixes are matched below. Most kernels of RPM
    // distributions need no entry: their release contains RPM's name of the architecture. Releases of SUSE, Azure Linux, Photon
    // and some custom kernels do not contain it.
    let is_rpm = match os.as_str() {
        "rhel" | "rhcos" | "scos" | "centos" | "rocky" | "almalinux" | "ol" | "fedora" | "amzn"
        | "azurelinux" | "mariner" | "openEuler" | "photon" | "sl-micro" => true,
        os => ["sle", "suse", "opensuse"].iter().any(|prefix| os.starts_with(prefix)),
    };
    if is_rpm || architecture_index(release).is_some() {
        rpm_version::compare
    } else {
        debian_version::compare
    }
}

/// Index of the dot before RPM's name of the architecture in a release.
fn architecture_index(release: &str) -> Option<usize> {
    [".x86_64", ".aarch64"].iter().filter_map(|arch| release.find(arch)).min()
}

/// Version of a release in a form that sorts correctly in both version orders: `6.12.0-rc1` becomes `6.12.0~rc1`, which sorts
/// before `6.12.0`.
fn sortable_version(release: &str) -> Cow<'_, str> {
    let version = version_part(release);
    let candidate = release.get(version.len()..).and_then(|suffix| suffix.strip_prefix("-rc"));
    match candidate.map(|candidate| leading_digits(candidate).0) {
        Some(number) if !number.is_empty() => format!("{version}~rc{number}").into(),
        _ => version.into(),
    }
}

/// Version part of a release. Excludes the flavor, which starts with a letter after a `-` (`6.8.0-45-generic`), and RPM's
/// architecture with everything after it (`5.14.0-503.11.1.el9_5.x86_64`).
fn version_part(release: &str) -> &str {
    let end = flavor_index(release).into_iter().chain(architecture_index(release)).min();
    release.get(..end.unwrap_or(release.len())).unwrap_or(release)
}

/// Index of the `-` before the flavor in a release.
fn flavor_index(release: &str) -> Option<usize> {
    let has_flavor = |index: &usize| release.as_bytes().get(index + 1).is_some_and(u8::is_ascii_alphabetic);
    release.match_indices('-').map(|(index, _)| index).find(has_flavor)
}

impl FromStr for KernelRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error_for = |why: &dyn fmt::Display| {
            format!(
                "{}: {why}",
                ParseError::new(text, "a range of kernels such as `>=4.18, <6.18` or `>=6.1.0-56, <6.2`")
            )
        };
        // Bounds of numbers alone have semver's meaning and error messages.
        if !text.contains(['-', '+', '_']) {
            match text.parse::<VersionReq>() {
                Ok(requirement) => {
                    return Ok(Self(requirement.comparators.into_iter().map(Bound::Semver).collect()));
                }
                Err(error) if !text.split(',').any(has_suffix) => return Err(error_for(&error)),
                Err(_) => {}
            }
        }
        text.split(',')
            .map(|bound| Bound::parse(bound.trim()))
            .collect::<Result<_, _>>()
            .map(Self)
            .map_err(|why| error_for(&why))
    }
}

/// Whether a bound has text after its first three numbers.
fn has_suffix(bound: &str) -> bool {
    let (_, version) = split_operator(bound.trim());
    let numbers = leading_numbers(version);
    numbers.len() < version.len() && numbers.split('.').count() == 3
}

fn split_operator(bound: &str) -> (&str, &str) {
    let (operator, version) =
        bound.split_at(bound.find(|c: char| !"<>=^~ ".contains(c)).unwrap_or(bound.len()));
    (operator.trim_end(), version)
}

/// Up to three numbers at the start of a version, with the dots between them.
fn leading_numbers(version: &str) -> &str {
    let mut dots = 0;
    let end = version.char_indices().find(|(index, c)| {
        let digit_follows = version.as_bytes().get(index + 1).is_some_and(u8::is_ascii_digit);
        dots += usize::from(*c == '.');
        !(c.is_ascii_digit() || *c == '.' && dots < 3 && digit_follows)
    });
    &version[..end.map_or(version.len(), |(index, _)| index)]
}

impl Bound {
    fn parse(bound: &str) -> Result<Self, String> {
        let (operator, version) = split_operator(bound);
        let numbers = leading_numbers(version);
        let suffix = &version[numbers.len()..];
        if suffix.is_empty() {
            return bound.parse().map(Self::Semver).map_err(|error: semver::Error| error.to_string());
        }
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._+~-".contains(c);
        let is_suffix_valid = suffix.starts_with(['-', '.', '+', '~']) && suffix.chars().all(is_allowed);
        if !is_suffix_valid || !suffix.ends_with(|c: char| c.is_ascii_alphanumeric()) {
            return Err(format!("{version:?} is not the beginning of a kernel release"));
        }
        if numbers.split('.').count() < 3 {
            return Err(format!(
                "the part of {version:?} after its numbers is compared by the distribution's rules: write all three numbers before it"
            ));
        }
        let suggestion = sortable_version(version);
        if suggestion.contains('~') && !version.contains('~') {
            return Err(format!(
                "{version:?} names a pre-release, which sorts before its version: write {suggestion:?}"
            ));
        }
        if let Some(index) = flavor_index(version) {
            return Err(format!(
                "{version:?} contains a flavor, {:?}, which is not part of a version: remove it, \
                 and select flavors with `release`, a regular expression",
                &version[index..]
            ));
        }
        if version_part(version) != version {
            return Err(format!(
                "{version:?} contains an architecture, which is not part of a version: remove it"
            ));
        }
        match operator {
            ">=" => Ok(Self::AtLeast(version.to_owned())),
            "<" => Ok(Self::Below(version.to_owned())),
            other => Err(format!(
                "`{other}{version}` is ambiguous, because releases that begin with {version} follow it in the distribution's order: \
                 write `>=` or `<`, or name releases with `release`, a regular expression"
            )),
        }
    }
}

impl fmt::Display for KernelRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("*");
        }
        for (index, bound) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match bound {
                Bound::Semver(comparator) => write!(f, "{comma}{comparator}")?,
                Bound::AtLeast(lower) => write!(f, "{comma}>={lower}")?,
                Bound::Below(upper) => write!(f, "{comma}<{upper}")?,
            }
        }
        Ok(())
    }
}

text_schema!(KernelRange, true, json_schema!({"type": "string"}));

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernel::Architecture;

    fn target(os: &str, release: &str) -> KernelTarget {
        KernelTarget {
            os: os.parse().unwrap(),
            os_version: "1".parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Amd64,
        }
    }

    #[test]
    fn ranges_distinguish_releases_of_one_version() {
        for (os, range, included, excluded) in [
            (
                "debian",
                ">=6.1.0-56",
                "6.1.0-56-amd64 6.1.0-100-cloud-amd64 6.12.117+deb12-amd64 6.6.1",
                "6.1.0-47-amd64 6.1.0 5.10.0-99-amd64",
            ),
            (
                "debian",
                ">=6.1.0-53, <6.2",
                "6.1.0-53-rt-amd64 6.1.192-acme+",
                "6.1.0-50-amd64 6.12.1+deb12-amd64",
            ),
            (
                "debian",
                "<6.12.100+deb12",
                "6.12.99+deb12-amd64 6.12.1",
                "6.12.100+deb12-amd64 6.12.107+deb12-amd64",
            ),
            (
                "ubuntu",
                ">=6.8.0-45, <6.8.0-50",
                "6.8.0-45-generic 6.8.0-49.49-nvidia-64k",
                "6.8.0-44-generic 6.8.0-1012-aws 6.8.0-50-generic",
            ),
            (
                "rhel",
                ">=5.14.0-503, <5.14.0-600",
                "5.14.0-503.11.1.el9_5.x86_64 5.14.0-570.el9.aarch64+64k",
                "5.14.0-427.13.1.el9_4.x86_64 5.14.0-600.1.el9.x86_64",
            ),
            (
                "rhel",
                ">=5.14.0-503.11.1.el9_5",
                "5.14.0-503.11.1.el9_5.x86_64 5.14.0-503.15.1.el9_5.x86_64",
                "5.14.0-503.2.1.el9_5.x86_64",
            ),
            (
                "azurelinux",
                ">=6.6.57.1-2",
                "6.6.57.1-2.azl3 6.6.64.1-1.azl3",
                "6.6.57.1-1.azl3 6.6.51.1-5.azl3",
            ),
            (
                "opensuse-leap",
                ">=5.14.21-150400.24.100",
                "5.14.21-150400.24.111-default",
                "5.14.21-150400.24.9-default",
            ),
            // Numbers alone keep semver's meaning.
            ("debian", ">=4.18, <6.18", "4.18.0-553.el8_10.x86_64 6.17.9", "6.18.0-1-amd64 4.17.99"),
            ("debian", "=6.1", "6.1.0-47-amd64 6.1.192-acme+", "6.2.0"),
            ("debian", "~6.1.190", "6.1.191-acme", "6.1.189-acme 6.2.0"),
            ("debian", "*", "3.10.0-1160.el7.custom", ""),
            ("debian", "6.*", "6.1.0-47-amd64", "5.10.0-1-amd64"),
            // A pre-release sorts before its version in both orders.
            (
                "debian",
                ">=6.12.0~rc2, <6.12.0+a",
                "6.12.0-rc2-amd64 6.12.0-rc10-amd64 6.12.0-amd64",
                "6.12.0-rc1 6.12.0+deb13",
            ),
            (
                "fedora",
                ">=6.12.0~rc2, <6.12.0-1",
                "6.12.0-rc2+ 6.12.0-rc10 6.12.0",
                "6.12.0-rc1 6.12.0-1.fc42.x86_64",
            ),
            // A distribution missing from the list still gets RPM's order, in which `_` only separates. In Debian's, `_` sorts
            // after letters.
            ("eurolinux", ">=5.14.0-503.el9_5", "5.14.0-503.el9.5.x86_64", "5.14.0-503.el9_4.x86_64"),
            ("sled", ">=5.14.21-150400.24_9", "5.14.21-150400.24.9-default", "5.14.21-150400.24.8-default"),
        ] {
            let range: KernelRange = range.parse().unwrap();
            for release in included.split_whitespace() {
                assert!(range.contains(&target(os, release)), "{range} of {os} excludes {release}");
            }
            for release in excluded.split_whitespace() {
                assert!(!range.contains(&target(os, release)), "{range} of {os} contains {release}");
            }
        }
    }

    #[test]
    fn ambiguous_bounds_are_refused_with_the_reason() {
        let told = |text: &str| text.parse::<KernelRange>().unwrap_err();
        let mistakes = [
            ">6.1.0-56",
            "<=5.14.0-503",
            "=6.1.0-56",
            "6.1.0-56",
            "^6.1.0-56",
            ">=6.1-56",
            ">=6.1.0-56-amd64",
            "<6.11.0-rc1",
            ">=5.14.0-503.el9.x86_64",
            ">=6.1.0-",
            ">=6.1.0-5 6",
            ">=6.1.0-56;",
            ">=6.1.0-56,",
            ">=6.1,,<7",
            "",
            "six",
            ">=6.1.2.3.4-",
        ];
        insta::assert_snapshot!(mistakes.map(told).join("\n"));
    }

    proptest! {
        /// Debian's order applies, whatever the flavor.
        #[test]
        fn abi_numbers_compare_as_numbers(a in 1..2000_u32, b in 1..2000_u32, flavor in "(cloud-|rt-)?(amd64|arm64)") {
            let range: KernelRange = format!(">=6.1.0-{a}").parse().unwrap();
            prop_assert_eq!(range.contains(&target("debian", &format!("6.1.0-{b}-{flavor}"))), b >= a);
            let range: KernelRange = format!("<6.1.0-{a}").parse().unwrap();
            prop_assert_eq!(range.contains(&target("rhel", &format!("6.1.0-{b}.el9.x86_64"))), b < a);
        }

        #[test]
        fn what_is_written_is_read_again(text in "(>=|<|=|~)?[0-9]{1,2}(\\.[0-9]{1,3}){0,3}([-+.][0-9a-z.]{1,6})?(, ?<[0-9]\\.[0-9]+)?") {
            if let Ok(range) = text.parse::<KernelRange>() {
                prop_assert_eq!(range.to_string().parse(), Ok(range));
            }
        }

        #[test]
        fn nothing_panics(text in "\\PC{0,20}|[<>=~^*0-9a-z.,+ -]{0,24}") {
            if let Ok(range) = text.parse::<KernelRange>() {
                range.contains(&target("debian", "6.1.0-47-amd64"));
            }
        }
    }
}
