//! Detects problems of a build before anything is fetched: compilers that a toolchain lacks, missing headers, and distributions
//! that no family supports.

use std::collections::BTreeSet;

use super::{
    AptHeaders, Compiler, CompilerKind, HeaderSource, KernelFamily, KernelTarget, Toolchain, match_family,
};
use crate::definition::{
    BootstrapSpec, RpmPackages, RpmRepository,
    checked::{RpmName, to_strings},
};

/// Returns the family of a kernel whose headers name the compiler that built the kernel (`built_with`).
///
/// This is the regular family, or, if its toolchain lacks that compiler, the first fallback for that compiler. The two families
/// must differ only in the toolchain.
pub fn family_for<'a>(
    families: &'a [KernelFamily],
    target: &KernelTarget,
    built_with: Option<Compiler>,
) -> Option<&'a KernelFamily> {
    let family = match_family(families, target)?;
    let Some(compiler) = built_with.filter(|_| missing_compiler(family, built_with).is_some()) else {
        return Some(family);
    };
    let without_toolchain = |family: &KernelFamily| {
        let spec = family.spec.clone();
        (spec.headers, spec.digests, spec.image_stream, spec.kernel_image, spec.btf)
    };
    let has_compiler = |other: &&KernelFamily| {
        let matches = &other.spec.matches;
        without_toolchain(other) == without_toolchain(family)
            && matches.fallback_for_compilers.iter().any(|name| Compiler::from_name(name) == Some(compiler))
            && matches.is_match(target)
    };
    families.iter().find(has_compiler).or(Some(family))
}

/// Returns a message if the family's toolchain lacks the compiler that the kernel's headers name (`built_with`). If `built_with`
/// is `None`, one of the compilers that the family names suffices. Returns `None` if the definition does not show which compilers
/// the toolchain has.
pub fn missing_compiler(family: &KernelFamily, built_with: Option<Compiler>) -> Option<String> {
    let required: BTreeSet<Compiler> = match built_with {
        Some(compiler) => [compiler].into(),
        None => family.spec.built_with.iter().filter_map(|name| Compiler::from_name(name)).collect(),
    };
    let offered = match &family.spec.toolchain {
        Toolchain::Bootstrap(toolchain) => compilers_of(toolchain)?,
        Toolchain::Rpm(toolchain) => compilers_of_rpms(&toolchain.packages)?,
        Toolchain::Image(_) => return None,
    };
    if required.is_empty() || !required.is_disjoint(&offered) {
        return None;
    }
    let join = |compilers: &BTreeSet<Compiler>, separator: &str| {
        compilers.iter().map(ToString::to_string).collect::<Vec<_>>().join(separator)
    };
    let (required, name) = (join(&required, " or "), &family.metadata.name);
    let offered = if offered.is_empty() { "no compiler".to_owned() } else { join(&offered, ", ") };
    Some(format!(
        "the kernel was built with {required}, which the toolchain of family {name} lacks; the toolchain offers {offered} (add the package of {required} to \
         that toolchain, or name an image that has it)"
    ))
}

/// Describes the origin of a kernel's headers and toolchain. Placeholders that depend on the nodes' system stay unchanged.
pub fn describe_sources(family: &KernelFamily, target: &KernelTarget) -> String {
    let spec = &family.spec;
    let headers = match &spec.headers {
        HeaderSource::Apt(AptHeaders { packages, suites, .. }) => {
            format!("{} in {}", target.fill(&to_strings(packages).join(", ")), to_strings(suites).join(", "))
        }
        HeaderSource::Rpm(RpmPackages { packages, from }) => {
            let address = |repository: &RpmRepository| {
                repository.address().expand(&target.repository_version(), target.arch.gnu_name())
            };
            let addresses: Vec<String> = from.repositories.iter().map(address).collect();
            let flavor = target.release.as_str().rsplit('-').next().unwrap_or_default();
            let packages = packages.join(", ").replace("{{flavor}}", flavor);
            format!("{packages} in {}", addresses.join(", "))
        }
        HeaderSource::Tarball(file) => target.fill(&file.path),
        HeaderSource::Oci(headers) => target.fill(&headers.image),
        HeaderSource::Url(headers) => target.fill(&headers.url),
    };
    let toolchain = match &spec.toolchain {
        Toolchain::Bootstrap(toolchain) => format!("packages of {}", toolchain.suite),
        Toolchain::Rpm(toolchain) => format!("RPM packages ({})", toolchain.packages.join(" ")),
        Toolchain::Image(image) => target.fill(image),
    };
    let built_with = to_strings(&spec.built_with).join(" or ");
    let compilers = if built_with.is_empty() { built_with } else { format!(", for {built_with}") };
    format!("{}: headers from {headers}; toolchain from {toolchain}{compilers}", family.metadata.name)
}

/// Compilers among the packages; `None` if the version of an unnumbered compiler package is unknown.
fn compilers_of(toolchain: &BootstrapSpec) -> Option<BTreeSet<Compiler>> {
    let names = toolchain.include.iter().map(|package| package.split(['=', ':']).next().unwrap_or_default());
    let mut offered = BTreeSet::new();
    for name in names {
        match name {
            "gcc" | "g++" | "build-essential" => drop(offered.insert(default_gcc(&toolchain.suite)?)),
            "clang" => return None,
            _ => offered.extend(Compiler::from_name(name)),
        }
    }
    Some(offered)
}

/// Compilers among RPM packages: `gcc13` as SUSE and Amazon name them, `gcc-toolset-13-gcc` as RHEL does. The version of plain
/// `gcc` in a distribution is unknown.
fn compilers_of_rpms(packages: &[RpmName]) -> Option<BTreeSet<Compiler>> {
    let mut offered = BTreeSet::new();
    for name in packages {
        if ["gcc", "gcc-c++", "clang"].contains(&name.as_str()) {
            return None;
        }
        let major = match name.strip_prefix("gcc-toolset-") {
            Some(package) => package.split_once("-gcc").map_or(package, |(major, _)| major),
            None => name.trim_start_matches(|c: char| c.is_ascii_lowercase()),
        };
        let kind = if name.starts_with("clang") { "clang" } else { "gcc" };
        if name.starts_with(kind) {
            offered.extend(Compiler::from_name(&format!("{kind}-{major}")));
        }
    }
    Some(offered)
}

/// The compiler that a suite's package `gcc` depends on (`gcc-defaults` of each suite).
fn default_gcc(suite: &str) -> Option<Compiler> {
    let major = match suite {
        "focal" => 9,
        "bullseye" => 10,
        "jammy" => 11,
        "bookworm" => 12,
        "noble" => 13,
        "trixie" => 14,
        "resolute" => 15,
        _ => return None,
    };
    Some(Compiler { kind: CompilerKind::Gcc, major })
}

/// Message that a kernel has no headers, with a hint. If no family supports the distribution, the message says so and names the
/// file to start from.
pub fn missing_headers_message(families: &[KernelFamily], target: &KernelTarget, looked_for: &str) -> String {
    let KernelTarget { os, os_version, release, arch } = target;
    let names_os = |family: &&KernelFamily| family.spec.matches.os.contains(os);
    let may_match = |family: &KernelFamily| family.spec.matches.may_match(os, os_version, *arch);
    let message = format!(
        "no headers for {release}: there is no {looked_for}{}; import or collect them (`farrier headers import`, `farrier headers collect`), \
         or name a mirror that has them",
        suggested_release(families, target)
            .map(|near| format!(" (did you mean {near}?)"))
            .unwrap_or_default()
    );
    if families.iter().filter(names_os).any(may_match) {
        return message;
    }
    let is_regular = |family: &&KernelFamily| family.spec.matches.fallback_for_compilers.is_empty();
    let example = families.iter().rev().find(names_os);
    let example = example.or_else(|| families.iter().rev().find(is_regular));
    let file = example.map_or("kernels/90-custom.yaml", |family| family.file.as_str());
    format!(
        "{message}; no kernel family matches {os} {os_version} ({arch}): copy {file} into your definitions' \
         kernels/ under another name, and set the sources of its headers and its compiler there"
    )
}

/// Returns the release with a flavor or architecture appended, if a family of the distribution matches only this form.
fn suggested_release(families: &[KernelFamily], target: &KernelTarget) -> Option<String> {
    let family_of = |target: &KernelTarget| {
        match_family(families, target).filter(|family| family.spec.matches.os.contains(&target.os))
    };
    if family_of(target).is_some() {
        return None;
    }
    let (debian, rhel) = (format!("-{}", target.arch), format!(".{}", target.arch.gnu_name()));
    // Flavors of Ubuntu, Debian and SUSE, and the architecture in releases of RHEL; each with whether headers are RPM packages.
    [("-generic", false), (&debian, false), (&rhel, true), ("-default", true)].into_iter().find_map(
        |(ending, is_rpm)| {
            let release = format!("{}{ending}", target.release);
            let family = family_of(&KernelTarget { release: release.parse().ok()?, ..target.clone() })?;
            (family.spec.headers.rpm_archive().is_some() == is_rpm).then_some(release)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Architecture;

    fn family(file: &str, matches: &str, built_with: &[&str], suite: &str, include: &[&str]) -> KernelFamily {
        let matches: serde_json::Value = serde_json::from_str(matches).unwrap();
        let family: KernelFamily = serde_json::from_value(serde_json::json!({
            "apiVersion": "farrier.dev/v1alpha1", "kind": "KernelFamily", "metadata": {"name": "acme"},
            "spec": {
                "match": matches, "builtWith": built_with, "headers": {"tarball": {"path": "headers/{{release}}.tar.xz"}},
                "toolchain": {"bootstrap": {"suite": suite, "include": include}},
            },
        }))
        .unwrap();
        KernelFamily { file: file.to_owned(), ..family }
    }

    #[test]
    fn an_offer_without_the_kernel_s_compiler_is_told() {
        let gcc = |major| Some(Compiler { kind: CompilerKind::Gcc, major });
        let lacks = |built_with: &[&str], suite: &str, include: &[&str], found| {
            missing_compiler(&family("", "{}", built_with, suite, include), found).is_some()
        };
        assert!(!lacks(&[], "bookworm", &["gcc", "make"], None), "the kernel's compiler is unknown");
        assert!(lacks(&[], "bookworm", &["gcc-11", "gcc"], gcc(14)));
        assert!(!lacks(&[], "bookworm", &["gcc-11", "gcc"], gcc(12)), "the default compiler of the suite");
        assert!(lacks(&["gcc-14"], "bookworm", &["gcc-12=12.2.0-14+deb12u1"], None));
        assert!(!lacks(&["gcc-14", "gcc-12"], "bookworm", &["gcc-12:amd64"], None), "one of them suffices");
        assert!(!lacks(&["gcc-14"], "bookworm", &["gcc-12"], gcc(12)), "headers take precedence");
        assert!(lacks(&["clang-18"], "bookworm", &["gcc-12"], None));
        assert!(lacks(&["gcc-12"], "bookworm", &["make"], None));
        assert!(!lacks(&["gcc-15"], "sid", &["gcc"], None), "the compiler of sid is unknown");
        let rpm = |packages: &[&str]| {
            let mut family = family("", "{}", &["gcc-11"], "x", &[]);
            let toolchain = serde_json::json!({"rpm": {"packages": packages}});
            family.spec.toolchain = serde_json::from_value(toolchain).unwrap();
            missing_compiler(&family, None).is_some()
        };
        for packages in [&["gcc"][..], &["gcc11", "make"], &["gcc-toolset-11-gcc"], &["gcc-toolset-11"]] {
            assert!(!rpm(packages), "{packages:?}");
        }
        for packages in [&["make"][..], &["gcc12"], &["gcc-toolset-12-gcc"], &["gcc-toolset-11-binutils"]] {
            assert!(rpm(packages), "{packages:?}");
        }
        insta::assert_snapshot!(
            missing_compiler(&family("", "{}", &[], "bookworm", &["gcc", "gcc-11"]), gcc(14)).unwrap(),
            @"the kernel was built with gcc 14, which the toolchain of family acme lacks; the toolchain offers gcc 11, gcc 12 (add the package of gcc 14 to that toolchain, or name an image that has it)"
        );
    }

    #[test]
    fn headers_choose_a_toolchain_that_has_their_compiler() {
        let families = [
            family("", r#"{"os": "debian"}"#, &[], "bookworm", &["gcc-12"]),
            family("90", "{}", &[], "bookworm", &["gcc-11", "gcc-12"]),
            family("91", r#"{"builtWith": ["gcc-13", "gcc-14"]}"#, &[], "trixie", &["gcc-13", "gcc-14"]),
            family("92", r#"{"builtWith": ["gcc-14", "gcc-15"]}"#, &[], "sid", &["gcc-15"]),
        ];
        let chosen = |os: &str, built_with: Option<&str>| {
            let target = KernelTarget {
                os: os.parse().unwrap(),
                os_version: "1".parse().unwrap(),
                release: "6.12.1-acme".parse().unwrap(),
                arch: Architecture::Amd64,
            };
            family_for(&families, &target, built_with.and_then(Compiler::from_name)).unwrap().file.as_str()
        };
        for (os, built_with, wanted) in [
            ("acme", None, "90"),
            ("acme", Some("gcc-12"), "90"),
            ("acme", Some("gcc-14"), "91"),
            ("acme", Some("gcc-15"), "92"),
            ("debian", Some("gcc-15"), "92"),
            // No family has the compiler, so the matching family is returned.
            ("acme", Some("clang-18"), "90"),
        ] {
            assert_eq!(chosen(os, built_with), wanted, "{os} {built_with:?}");
        }
    }

    #[test]
    fn a_release_without_its_flavor_is_answered_with_the_whole_one() {
        let debian = r#"{"os": "debian", "release": "6.1.\\d+-\\d+-(amd64|arm64)"}"#;
        let families = [family("10", debian, &[], "bookworm", &[]), family("90", "{}", &[], "bookworm", &[])];
        let told = |os: &str, release: &str| {
            let target = KernelTarget {
                os: os.parse().unwrap(),
                os_version: "12".parse().unwrap(),
                release: release.parse().unwrap(),
                arch: Architecture::Arm64,
            };
            missing_headers_message(&families, &target, "package x")
        };
        let whole = told("debian", "6.1.0-57");
        assert!(whole.contains("there is no package x (did you mean 6.1.0-57-arm64?); import"), "{whole}");
        for (os, release) in [("debian", "6.1.0-57-amd64"), ("debian", "6.12.1-acme"), ("acme", "6.1.0-57")] {
            assert!(!told(os, release).contains("did you mean"), "{os} {release}");
        }
    }

    #[test]
    fn a_distribution_that_no_family_knows_is_told_with_the_file_to_copy() {
        let families = [
            family(
                "kernels/10-debian-12.yaml",
                r#"{"os": "debian", "osVersion": "12"}"#,
                &[],
                "bookworm",
                &[],
            ),
            family("kernels/90-custom.yaml", "{}", &[], "bookworm", &[]),
        ];
        let told = |os: &str, version: &str| {
            let target = KernelTarget {
                os: os.parse().unwrap(),
                os_version: version.parse().unwrap(),
                release: "6.12.1-acme".parse().unwrap(),
                arch: Architecture::Amd64,
            };
            missing_headers_message(&families, &target, "headers/6.12.1-acme.tar.xz")
        };
        insta::assert_snapshot!(
            [told("debian", "12"), told("debian", "14"), told("flatcar", "3815.2")].join("\n")
        );
    }
}
