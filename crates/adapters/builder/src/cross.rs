//! Cross toolchains, which run on this machine and compile for a kernel of another architecture.

use std::path::PathBuf;

use farrier_core::{
    kernel::{
        Architecture, BUILD_ELSEWHERE_HINT, FOREIGN_TOOLS, HeaderSource, NO_CROSS_COMPILERS, Toolchain,
        cross_toolchain, not_compiled_here,
    },
    template::steps::Base,
};
use farrier_inputs::{HeaderSet, PackageRoot};
use farrier_local::machine::native;

use super::{cell_build::CellBuild, verified_tree::verified_tree};
use crate::{
    images::DEFAULT_PATH,
    services::{BuildError, ProblemKind, Result},
};

/// Whether the cell's kernel has another architecture than this machine.
pub(super) fn is_foreign(build: &CellBuild<'_>) -> bool {
    build.cell.target.arch != native()
}

/// Returns the toolchain as a tree, with the environment of the build's steps. The toolchain is bootstrapped on this machine
/// from packages that apt has verified. It is neither published nor part of the input hash: the same compiler version
/// produces the same modules on any machine.
pub(super) async fn toolchain(build: &CellBuild<'_>, headers: &HeaderSet) -> Result<(PathBuf, Base)> {
    let (services, target) = (build.services, build.cell.target.arch);
    let Toolchain::Bootstrap(native_spec) = &build.toolchain else {
        return Err(not_compilable_here(build, NO_CROSS_COMPILERS));
    };
    let suites = match &*build.family.spec.headers_for(&build.cell.target, &build.cell.system) {
        HeaderSource::Apt(apt) => apt.suites.to_vec(),
        _ => Vec::new(),
    };
    let Some(spec) = cross_toolchain(native_spec, target, &headers.origin, &suites) else {
        return Err(not_compilable_here(build, FOREIGN_TOOLS));
    };
    let root = PackageRoot::Toolchain(spec);
    let bootstrap = || services.fetcher.root_fs().bootstrap(&root, native());
    let made = services.process.retry("make a cross toolchain", bootstrap).await?;
    let layers = vec![(made.layer.digest, made.file)];
    let what = format!("cross toolchain for {target}");
    let get = async || Ok(services.fetcher.root_fs().tree(layers.clone(), what.clone()).await?);
    let tree = verified_tree(services, get, |tree| Some(tree)).await?;
    let env = [("PATH", DEFAULT_PATH), ("ARCH", kbuild_name(target))];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    Ok((tree, Base { name: build.cell.base_name.clone(), env, ..Base::default() }))
}

/// kbuild's `ARCH` for the kernel's architecture, which drivers' makefiles also use. Unset, it defaults to `uname -m`.
fn kbuild_name(arch: Architecture) -> &'static str {
    match arch {
        Architecture::Amd64 => "x86_64",
        Architecture::Arm64 => "arm64",
    }
}

fn not_compilable_here(build: &CellBuild<'_>, why: &str) -> BuildError {
    let message = not_compiled_here(build.cell.target.arch, native(), why);
    BuildError::problem(ProblemKind::Compile, message, Some(BUILD_ELSEWHERE_HINT.to_owned()))
}
