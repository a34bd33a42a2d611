//! The base stage prepares the toolchain and one kernel's headers for a compile. For an in-place build, the base is two
//! trees in the cache. For a daemon, the base is an image that is made once per content and kept in the engine.

use std::{fmt::Write as _, path::PathBuf, sync::Arc};

use farrier_core::{
    image::{BuildSpec, ImageReference, Output, Repository},
    kernel::{Architecture, Compiler, CompilerKind, Toolchain, install_uname},
    site::HostPort,
    template::steps::{self, Base, StepsError},
};
use farrier_engines::{
    BuildLog, BuildRequest, ContextEntry, Credentials, DockerEngine, Engine, EngineError, Kubernetes,
    LOCAL_PREFIX, Sandbox,
};
use farrier_inputs::{HeaderSet, PackageRoot, find_build};
use farrier_local::{blocking::blocking, cache::LockMode, machine::native};
use farrier_net::AccessPurpose;
use farrier_store::registry;
use oci::error_chain;
use parking_lot::Mutex;
use runner::plan::{Action, Limits, Plan, Run, Step};

use super::{cell_build::CellBuild, cross, engine_images, host_tools, verified_tree::verified_tree};
use crate::{
    images::{BaseImage, root_fs_layer, toolchain_tree},
    services::{BuildError, BuildServices, ProblemKind, Result, Stage},
};

/// Prefix of the line in which the toolchain probe lists the compilers that it found.
const PROBE_MARK: &str = "farrier: toolchain offers ";
/// Minimum memory limit of a build, in bytes.
pub(super) const MIN_MEMORY: u64 = 4 << 30;

/// Limit on concurrent processes of a build: several for each processor of the largest machines.
const MAX_PROCESSES: u64 = 8 << 10;
/// Limit in bytes on what a build writes, equal to the ephemeral-storage limit of a build's pod.
const MAX_DISK: u64 = 32 << 30;
/// Limit on files, links and directories of a build: ten times the number in a compiled kernel source tree.
const MAX_INODES: u64 = 2_000_000;

/// The base of a compile, in the form that the engine needs.
pub(super) enum PreparedBase {
    /// An image in the daemon, under the name in the cell's Dockerfile.
    Image(Arc<DockerEngine>),
    /// Trees in the cache, for a sandbox.
    InPlace(Arc<Sandbox>, InPlaceBase),
    /// Trees in the cache for a pod, with the toolchain's image.
    InCluster(Arc<Kubernetes>, InPlaceBase, BaseImage),
}

/// Cached trees of an in-place build, and the steps to run over them.
pub(super) struct InPlaceBase {
    /// Setup steps (compiler probe, removal of `vmlinux`, `uname`), followed by the steps of the `modules` stage.
    pub(super) steps: Vec<Step>,
    /// Lower directories of the overlay: headers and toolchain, the uppermost first. A cross toolchain is above the
    /// headers, because its kbuild tools run on this machine and the headers' tools do not.
    pub(super) lowers: [PathBuf; 2],
    /// Key of the headers' cache entry.
    pub(super) headers: String,
}

impl InPlaceBase {
    /// Returns the steps with their resource limits. The definition's `build.memory` only decides which builds may run
    /// concurrently. Because that value is an estimate, the limit is twice as high.
    pub(super) fn plan(&self, spec: BuildSpec) -> Plan {
        let memory = spec.memory.bytes().saturating_mul(2).max(MIN_MEMORY);
        let limits = Limits {
            memory: Some(memory),
            processes: Some(MAX_PROCESSES),
            disk: Some(MAX_DISK),
            inodes: Some(MAX_INODES),
        };
        Plan { steps: self.steps.clone(), limits }
    }
}

/// Prepares the cell's base: the toolchain plus the header set.
pub(super) async fn prepare(build: &CellBuild<'_>, headers: &HeaderSet) -> Result<PreparedBase> {
    let engines = &build.services.tools.engine;
    // Connect the chosen engine in any case: if it is a daemon, `docker` returns its connection.
    let engine = engines.get().await;
    if build.image.spec.output == Output::Image {
        return daemon_base(build, headers, engines.docker().await?).await;
    }
    match engine? {
        Engine::Docker(docker) => daemon_base(build, headers, docker).await,
        Engine::Kubernetes(cluster) => {
            let (tree, toolchain) = cell_toolchain(build, headers).await?;
            let base = Base::of(&build.cell.base_name, &toolchain.image.config);
            let base = in_place_base(build, headers, tree, &base, build.cell.target.arch)
                .map_err(|error| unsupported_template(build, &error))?;
            Ok(PreparedBase::InCluster(cluster, base, toolchain))
        }
        Engine::Sandbox(sandbox) => match sandbox_base(build, headers).await? {
            Ok(base) => {
                chown_trees(build, &sandbox, &base).await?;
                Ok(PreparedBase::InPlace(sandbox, base))
            }
            // Fall back to a daemon, if one is available, for templates that need one.
            Err(error @ StepsError::Unsupported { .. }) if engines.may_fall_back() => {
                let docker = engines.docker().await.map_err(|_| unsupported_template(build, &error))?;
                daemon_base(build, headers, docker).await
            }
            Err(error) => Err(unsupported_template(build, &error)),
        },
    }
}

/// Returns the base as an image in a daemon.
async fn daemon_base(
    build: &CellBuild<'_>,
    headers: &HeaderSet,
    docker: Arc<DockerEngine>,
) -> Result<PreparedBase> {
    reject_required_landlock(build.services.definitions.site.builds.landlock)?;
    build_base_image_if_absent(build, headers, &docker).await?;
    Ok(PreparedBase::Image(docker))
}

/// Gives the trees the owner that the sandbox needs.
async fn chown_trees(build: &CellBuild<'_>, sandbox: &Sandbox, base: &InPlaceBase) -> Result<()> {
    // Serialize the change of ownership, because concurrent builds would walk the same tree.
    let _lock = build.services.cache.lock("trees", "owner", LockMode::Exclusive).await?;
    let (owner, trees) = (sandbox.owner(), base.lowers.clone());
    Ok(blocking(move || trees.iter().try_for_each(|tree| owner.chown_tree(tree))).await?)
}

/// Fails if the site requires Landlock, which farrier does not apply to a daemon's containers.
fn reject_required_landlock(min_abi: u32) -> Result<()> {
    if min_abi == 0 {
        return Ok(());
    }
    let message =
        format!("the site requires Landlock ABI {min_abi}, which Docker does not provide for builds");
    let hint = "build with --engine sandbox or kubernetes, or lower builds.landlock in site.yaml";
    Err(BuildError::usage(message, hint))
}

/// Returns the cell's toolchain as a tree and as an image, after checking that the headers' tools run in it.
async fn cell_toolchain(build: &CellBuild<'_>, headers: &HeaderSet) -> Result<(PathBuf, BaseImage)> {
    build.stage(Stage::Toolchain);
    let get = || toolchain_tree(build.services, &build.toolchain, build.cell);
    let (tree, image) = verified_tree(build.services, get, |(tree, _)| Some(tree)).await?;
    host_tools::check(build, headers, &tree).await?;
    Ok((tree, image))
}

/// Returns the trees and steps of a build in a sandbox, with a cross toolchain if the kernel's architecture is foreign.
async fn sandbox_base(build: &CellBuild<'_>, headers: &HeaderSet) -> Result<Result<InPlaceBase, StepsError>> {
    if !cross::is_foreign(build) {
        let (tree, toolchain) = cell_toolchain(build, headers).await?;
        let base = Base::of(&build.cell.base_name, &toolchain.image.config);
        return Ok(in_place_base(build, headers, tree, &base, build.cell.target.arch));
    }
    build.stage(Stage::Toolchain);
    let (tree, base) = cross::toolchain(build, headers).await?;
    // The build's programs run on this machine, so `uname -m` must print this machine's architecture.
    Ok(in_place_base(build, headers, tree, &base, native()).map(|mut base| {
        base.lowers.reverse();
        base
    }))
}

/// Returns the trees and steps, or an error if the Dockerfile needs a feature that in-place builds do not support.
fn in_place_base(
    build: &CellBuild<'_>,
    headers: &HeaderSet,
    toolchain: PathBuf,
    base: &Base,
    machine: Architecture,
) -> Result<InPlaceBase, StepsError> {
    let recipe = steps::read(&build.cell.dockerfile, base)?;
    recipe.notes.iter().for_each(|note| build.note(&note.to_string()));
    let mut steps = recipe.steps;
    let setup = [
        headers.compiler.map(probe_step),
        btf_source(build, headers).map(hide_vmlinux_step),
        Some(uname_step(build, machine)),
    ];
    steps.splice(0..0, setup.into_iter().flatten());
    Ok(InPlaceBase { steps, lowers: [headers.root.clone(), toolchain], headers: headers.key.clone() })
}

fn unsupported_template(build: &CellBuild<'_>, error: &StepsError) -> BuildError {
    let message = format!("template {}: {error}", build.image.spec.template);
    BuildError::problem(ProblemKind::Compile, message, None)
}

/// Builds the base image of the cell's Dockerfile in the engine, unless the engine has it.
async fn build_base_image_if_absent(
    build: &CellBuild<'_>,
    headers: &HeaderSet,
    engine: &DockerEngine,
) -> Result<()> {
    let CellBuild { services, cell, toolchain, .. } = build;
    // Builds run concurrently and can share a base.
    let key = cell.base_name.rsplit(':').next().unwrap_or_default();
    let _lock = services.cache.lock("base", key, LockMode::Exclusive).await?;
    services.cache.stamp("base", key)?;
    if engine.has_image(&cell.base_name).await? {
        return Ok(());
    }
    engine_images::make_room(services, engine).await;
    build.stage(Stage::Toolchain);
    let toolchain = provide_toolchain(build, engine, toolchain).await?;
    build.stage(Stage::Base);
    let log = Arc::new(ProbeLog::default());
    let request = BuildRequest {
        id: format!("base-{}-{}", cell.input_hash.short(), std::process::id()),
        dockerfile: base_dockerfile(build, &toolchain, headers.compiler, btf_source(build, headers)),
        context: vec![ContextEntry { dest: "kernel".to_owned(), from: headers.root.clone() }],
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: services.process.cancel.clone(),
    };
    match engine.build_image(&request, &cell.base_name).await {
        Err(EngineError::Step(message)) => Err(match compiler_probe_error(build, headers, &log) {
            Some(error) => error,
            None => EngineError::Step(message).into(),
        }),
        other => Ok(other?),
    }
}

/// Returns an error if the probe has found that the toolchain lacks the kernel's compiler.
pub(super) fn compiler_probe_error(
    build: &CellBuild<'_>,
    headers: &HeaderSet,
    log: &ProbeLog,
) -> Option<BuildError> {
    let (required, offered) = headers.compiler.zip(log.offered())?;
    let family = &build.family.metadata.name;
    let message = format!(
        "the kernel was built with {required}, which the toolchain of family {family} lacks; the toolchain offers {offered}"
    );
    let hint = format!(
        "add the package of {required} to the toolchain of kernel family {family}, or set a toolchain image that has the compiler"
    );
    Some(BuildError::problem(ProblemKind::Compile, message, Some(hint)))
}

/// Pulls or imports the toolchain, unless the engine has it. Returns the name of its image.
async fn provide_toolchain(
    build: &CellBuild<'_>,
    engine: &DockerEngine,
    toolchain: &Toolchain,
) -> Result<String> {
    let services = build.services;
    let Some(root) = PackageRoot::of_toolchain(toolchain, &build.cell.target) else {
        // Use the digest from the input hash, even if the tag has moved since.
        let reference: ImageReference = build.cell.toolchain.parse()?;
        if engine.has_image(&reference.to_string()).await? {
            return Ok(reference.to_string());
        }
        let copy = services.images.mirrored_reference(reference.clone()).await?;
        // No engine can pull from a layout directory.
        let reference = if copy.repository.host().is_some() { copy } else { reference };
        let pull = || pull(services, engine, &reference);
        return services.process.retry("pull toolchain image", pull).await;
    };
    // Name the image by its content: an image named after the definition could come from anywhere.
    let (digest, layer) = root_fs_layer(services, &root, build.cell).await?;
    let key = &digest.hex()[..24];
    let name = format!("{LOCAL_PREFIX}toolchain:{key}");
    let _lock = services.cache.lock("toolchain", key, LockMode::Exclusive).await?;
    services.cache.stamp("toolchain", key)?;
    if !engine.has_image(&name).await? {
        let request = BuildRequest {
            id: format!("toolchain-{}", std::process::id()),
            dockerfile: "FROM scratch\nADD rootfs.tar.gz /\n".to_owned(),
            context: vec![ContextEntry { dest: "rootfs.tar.gz".to_owned(), from: layer }],
            log: Arc::new(ProbeLog::default()),
            cancel: services.process.cancel.clone(),
        };
        engine.build_image(&request, &name).await?;
    }
    Ok(name)
}

/// Pulls an image from a mirror or its own registry, unless the engine has it. Returns the image's name in the engine.
/// The engine connects to the network directly, so the hosts are checked against the site's network policy first.
async fn pull(services: &BuildServices, engine: &DockerEngine, image: &ImageReference) -> Result<String> {
    let net = services.fetcher.net();
    let candidates = net.image_candidates(&image.repository);
    let name_in = |repository: &Repository| {
        ImageReference { repository: repository.clone(), version: image.version.clone() }.to_string()
    };
    for name in candidates.iter().map(name_in) {
        if engine.has_image(&name).await? {
            return Ok(name);
        }
    }
    let mut outcome = Err(BuildError::no_such_image(image));
    for repository in &candidates {
        let name = name_in(repository);
        outcome = pull_from(services, engine, repository, &name).await.map(|()| name);
        match &outcome {
            Ok(_) => break,
            Err(error) if *repository != image.repository => {
                tracing::warn!(%image, mirror = %repository, error = %error_chain(error), "the mirror cannot be used");
            }
            Err(_) => {}
        }
    }
    outcome
}

async fn pull_from(
    services: &BuildServices,
    engine: &DockerEngine,
    repository: &Repository,
    name: &str,
) -> Result<()> {
    if let Some(host) = HostPort::of_registry(&repository.normalized().0) {
        let what = format!("pull of toolchain image {name}");
        services.fetcher.net().check_allowed(&host, &AccessPurpose::of(&what)).map_err(registry::not_sent)?;
    }
    let found = services.images.credentials.password(repository).await;
    let credentials = found.map(|(username, password)| Credentials { username, password });
    Ok(engine.pull(name, credentials.as_ref()).await?)
}

/// Returns a Dockerfile that adds a header set to a toolchain. The build fails at once if the toolchain lacks the
/// kernel's compiler: in the middle of a driver's build, the same error would come late and be hard to interpret.
fn base_dockerfile(
    build: &CellBuild<'_>,
    toolchain: &str,
    compiler: Option<Compiler>,
    btf_source: Option<String>,
) -> String {
    let target = &build.cell.target;
    let mut text = format!("FROM {toolchain}\nCOPY kernel/ /\n");
    if let Some(path) = btf_source {
        let _ = writeln!(text, "RUN rm {path}");
    }
    if let Some(compiler) = compiler {
        let _ = writeln!(text, "RUN {}", probe(compiler));
    }
    let _ = writeln!(text, "RUN {}", install_uname(target.release.as_str(), target.arch.gnu_name()));
    text
}

/// Returns the path of the headers' `vmlinux` if the build must not use it. kbuild generates BTF for modules from this
/// file. Without the file, kbuild generates no BTF, whatever the kernel's configuration says. With the file, but
/// without pahole or debug information, no module compiles. Decision 23 says which modules get BTF.
fn btf_source(build: &CellBuild<'_>, headers: &HeaderSet) -> Option<String> {
    let release = &build.cell.target.release;
    let build_dir = find_build(&headers.root, release).ok()?;
    let must_hide = !build.family.spec.btf && headers.root.join(build_dir).join("vmlinux").is_file();
    must_hide.then(|| format!("/lib/modules/{release}/build/vmlinux"))
}

/// Step that hides the headers' `vmlinux` from this build.
fn hide_vmlinux_step(path: String) -> Step {
    setup_step("modules get no type information".to_owned(), ["/bin/rm".to_owned(), path].into())
}

/// The compiler probe as an in-place step.
fn probe_step(compiler: Compiler) -> Step {
    let argv = ["/bin/sh".to_owned(), "-c".to_owned(), probe(compiler)];
    setup_step(format!("check that the toolchain has {compiler}"), argv.into())
}

/// Step that installs a `uname` that prints the target kernel's release.
fn uname_step(build: &CellBuild<'_>, machine: Architecture) -> Step {
    let release = build.cell.target.release.as_str();
    let command = install_uname(release, machine.gnu_name());
    setup_step(
        format!("set uname to release {release}"),
        ["/bin/sh".to_owned(), "-c".to_owned(), command].into(),
    )
}

/// A step before the template's steps, without a line of the Dockerfile.
fn setup_step(text: String, argv: Vec<String>) -> Step {
    Step { line: 0, text, action: Action::Run(Run { argv, workdir: "/".to_owned(), ..Run::default() }) }
}

/// Returns a shell command that succeeds if the toolchain has a compiler of this major version. Otherwise the command
/// prints the available versions and fails.
fn probe(Compiler { kind, major }: Compiler) -> String {
    let name = match kind {
        CompilerKind::Gcc => "gcc",
        CompilerKind::Clang => "clang",
    };
    // Shell globbing finds gcc, gcc-12 and x86_64-linux-gnu-gcc-12 alike.
    format!(
        "found=; for cc in /usr/local/bin/{name} /usr/bin/{name} /usr/bin/{name}-[0-9]* /usr/bin/*-{name} /usr/bin/*-{name}-[0-9]*; do \
         [ -x \"$cc\" ] || continue; v=$(\"$cc\" -dumpversion) || continue; \
         [ \"${{v%%.*}}\" = {major} ] && exit 0; \
         case \"$found \" in *\" $v \"*) ;; *) found=\"$found $v\" ;; esac; done; \
         echo \"{PROBE_MARK}${{found:+{name}}}${{found:-no {name}}}\"; exit 86"
    )
}

/// Records what the compiler probe printed.
#[derive(Default)]
pub(super) struct ProbeLog(Mutex<Option<String>>);

impl ProbeLog {
    fn offered(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

impl BuildLog for ProbeLog {
    fn line(&self, line: &str) {
        // The echoed instruction contains the mark too, but not at the start of the line.
        if let Some(offered) = line.strip_prefix(PROBE_MARK) {
            *self.0.lock() = Some(offered.to_owned());
        }
        tracing::debug!(line, "toolchain");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_build_has_limits_also_where_its_definition_sets_none() {
        let base = InPlaceBase { steps: Vec::new(), lowers: Default::default(), headers: String::new() };
        let Limits { memory, processes, disk, inodes } = base.plan(BuildSpec::default()).limits;
        assert!(memory.is_some_and(|bytes| (MIN_MEMORY..64 << 30).contains(&bytes)), "{memory:?}");
        assert_eq!([processes, disk, inodes], [Some(8 << 10), Some(32 << 30), Some(2_000_000)]);
    }

    /// The kubelet evicts farrier, and with it all builds, when the volume has more than its limit.
    #[test]
    fn a_sandboxed_build_fits_into_the_volume_of_the_cache() {
        let overlay = include_str!("../../../../deploy/kustomize/overlays/sandbox/deployment.yaml");
        let limit = overlay.split_once("sizeLimit: ").unwrap().1.split_once("Gi}").unwrap().0;
        let limit: u64 = limit.parse().unwrap();
        let farrier_core::site::Storage { cache, logs, .. } = farrier_core::site::Storage::default();
        assert!(limit << 30 >= MAX_DISK + cache.bytes() + logs.bytes(), "{limit} GiB");
    }
}
