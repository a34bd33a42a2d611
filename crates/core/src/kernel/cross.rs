//! Cross-compiler toolchains from Debian's and Ubuntu's packages, for kernels of another architecture than the machine's.

use super::{Architecture, HeaderSource, KernelFamily, KernelTarget, Toolchain};
use crate::definition::{
    BootstrapSpec,
    checked::{PackageToInstall, Suite},
};

/// Prefix of packages with the tools that kbuild runs on the build machine (`fixdep`, `modpost`, `genksyms`). Debian ships these
/// tools in a separate package; header packages depend on its variant for the kernel's architecture.
const BUILD_TOOLS: &str = "linux-kbuild-";

/// Hint: where to compile modules that this machine cannot compile.
pub const BUILD_ELSEWHERE_HINT: &str = "build on a machine of that architecture, or in a cluster that has one (--engine \
     kubernetes); Debian's kernels, with a toolchain of packages, can be cross-compiled";
/// Reason: a toolchain has no cross compilers.
pub const NO_CROSS_COMPILERS: &str = "its toolchain does not come from Debian's or Ubuntu's packages";
/// Reason: headers are unusable on another architecture.
pub const FOREIGN_TOOLS: &str = "the tools in its headers run on that architecture";

/// Message that a machine cannot compile modules for another architecture.
pub fn not_compiled_here(target: Architecture, machine: Architecture, why: &str) -> String {
    format!("modules for {target} cannot be compiled on this machine, which is {machine}: {why}")
}

/// Returns why a machine cannot compile for a family's kernel, with a hint. Inspects only the definitions. Headers that the user
/// provides contain tools for their own architecture only, and Ubuntu has no package of these tools.
pub fn cross_compile_blocker(
    family: &KernelFamily,
    target: &KernelTarget,
    machine: Architecture,
    has_user_headers: bool,
) -> Option<String> {
    let has_tools_package =
        matches!(family.spec.headers, HeaderSource::Apt(_)) && target.os.as_str() != "ubuntu";
    let why = match &family.spec.toolchain {
        _ if target.arch == machine => return None,
        Toolchain::Bootstrap(toolchain) if compiles_nothing(toolchain) => return None,
        Toolchain::Rpm(_) | Toolchain::Image(_) => NO_CROSS_COMPILERS,
        Toolchain::Bootstrap(_) if has_user_headers || !has_tools_package => FOREIGN_TOOLS,
        Toolchain::Bootstrap(_) => return None,
    };
    Some(format!("{} ({BUILD_ELSEWHERE_HINT})", not_compiled_here(target.arch, machine, why)))
}

/// Returns the toolchain that compiles kernels of `target` on a machine of another architecture. It replaces the compiler
/// packages of `toolchain` with cross compilers and adds kbuild's tools for this machine.
///
/// `headers` are the packages of the kernel's headers (`name=version ...`), among them the package of kbuild's tools. `suites`
/// contain these packages. Returns `None` without a package of the tools, because the tools in the headers then run only on the
/// kernel's architecture. A `toolchain` without a compiler needs no tools.
pub fn cross_toolchain(
    toolchain: &BootstrapSpec,
    target: Architecture,
    headers: &[String],
    suites: &[Suite],
) -> Option<BootstrapSpec> {
    let names = headers.iter().filter_map(|package| package.split(['=', ' ']).next());
    let tools = names.filter(|name| name.starts_with(BUILD_TOOLS)).map(str::parse);
    let tools: Vec<PackageToInstall> = tools.collect::<Result<_, _>>().ok()?;
    let compilers = toolchain.include.iter().map(|package| cross_package(package, target));
    let include = compilers.collect::<Option<Vec<_>>>()?.into_iter().chain(tools.iter().cloned()).collect();
    let mut extra_suites = toolchain.extra_suites.clone();
    extra_suites.extend(suites.iter().filter(|suite| **suite != toolchain.suite).cloned());
    extra_suites.sort();
    extra_suites.dedup();
    let is_usable = !tools.is_empty() || compiles_nothing(toolchain);
    is_usable.then(|| BootstrapSpec { extra_suites, include, ..toolchain.clone() })
}

/// Whether a toolchain has no packages, and so no compiler: steps that run in it only copy files.
fn compiles_nothing(toolchain: &BootstrapSpec) -> bool {
    toolchain.include.is_empty()
}

/// Replaces a compiler package with its cross compiler for `target` (`gcc-12-aarch64-linux-gnu`). Other packages work on any
/// machine and stay unchanged.
fn cross_package(package: &PackageToInstall, target: Architecture) -> Option<PackageToInstall> {
    let name = package.split(['=', ':', '/']).next().unwrap_or_default();
    let (program, major) = name.split_once('-').unwrap_or((name, ""));
    let is_compiler = matches!(program, "gcc" | "g++" | "cpp") && major.bytes().all(|b| b.is_ascii_digit());
    let cross_name = match name {
        "libc6-dev" => format!("libc6-dev-{target}-cross"),
        _ if is_compiler || name == "binutils" => {
            format!("{name}-{}-linux-gnu", target.gnu_name().replace('_', "-"))
        }
        _ => return Some(package.clone()),
    };
    cross_name.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(include: &[&str]) -> BootstrapSpec {
        serde_json::from_value(serde_json::json!({"suite": "bookworm", "include": include})).unwrap()
    }

    #[test]
    fn compilers_are_cross_compilers_and_the_rest_is_this_machine_s() {
        let own = spec(&[
            "gcc",
            "gcc-12",
            "g++-12=12.2.0-14",
            "libc6-dev",
            "binutils",
            "make",
            "gcc-12-doc",
            "libelf1",
        ]);
        let headers = [
            "linux-headers-6.1.0-50-arm64=6.1.170-3 sha256:00",
            "linux-headers-6.1.0-50-common=6.1.170-3 sha256:01",
            "linux-kbuild-6.1=6.1.170-3 sha256:02",
        ]
        .map(str::to_owned);
        let suites = ["bookworm", "bookworm-security"].map(|suite| suite.parse().unwrap());
        let made = |target| cross_toolchain(&own, target, &headers, &suites).unwrap();
        // Only the suite of security updates contains the tools of a security update.
        assert_eq!(made(Architecture::Arm64).extra_suites, suites[1..]);
        let names =
            |target| made(target).include.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(
            names(Architecture::Arm64),
            "gcc-aarch64-linux-gnu gcc-12-aarch64-linux-gnu g++-12-aarch64-linux-gnu libc6-dev-arm64-cross \
             binutils-aarch64-linux-gnu make gcc-12-doc libelf1 linux-kbuild-6.1"
        );
        assert!(names(Architecture::Amd64).starts_with("gcc-x86-64-linux-gnu gcc-12-x86-64-linux-gnu "));
    }

    #[test]
    fn headers_without_tools_for_this_machine_give_none() {
        let imported = ["headers.tar.xz sha256:00".to_owned()];
        assert_eq!(cross_toolchain(&spec(&["gcc-12"]), Architecture::Arm64, &imported, &[]), None);
        // A toolchain without a compiler needs no tools.
        assert_eq!(cross_toolchain(&spec(&[]), Architecture::Arm64, &imported, &[]), Some(spec(&[])));
    }
}
