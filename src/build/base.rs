//! Adapter: the base stage: what a compile starts from, a toolchain with one kernel's headers. In place it is two trees of the
//! cache; for a daemon an image, made once per content and kept in the engine.

use std::{fmt::Write as _, path::PathBuf, sync::Arc};

use parking_lot::Mutex;
use runner::plan::{Action, Limits, Plan, Run, Step};

use super::{cross, host_tools, intact::intact, job::Job, kept};
use crate::{
    blocking::blocking,
    cache::LockMode,
    engine::{
        BuildJob, BuildLog, ContextEntry, Credentials, DockerEngine, Engine, EngineError, Kubernetes,
        LOCAL_PREFIX, Sandbox,
    },
    error_chain,
    image::{BuildSpec, ImageReference, Output, Repository},
    images::{BaseImage, root_fs_layer, toolchain_tree},
    inputs::{HeaderSet, PackageRoot, find_build},
    kernel::{Compiler, CompilerKind, Toolchain},
    net::Asker,
    parts::{FindingKind, Parts, Result, Stage, TargetError},
    registry,
    site::HostPort,
    template::steps::{self, Base, StepsError},
};

/// What the probe of a toolchain prints before the compilers that it found.
const PROBE_MARK: &str = "farrier: toolchain offers ";
/// Memory that any build may use, in bytes.
pub(super) const LEAST_MEMORY: u64 = 4 << 30;

/// Processes of a build at a time: several for each processor of the largest machines.
const MOST_PROCESSES: u64 = 8 << 10;
/// Bytes that a build may write: a pod's share of its node's disk (`JobSpec`) is the same.
const MOST_DISK: u64 = 32 << 30;
/// Files, links and directories that a build may make: ten times those of a kernel's whole source tree, compiled.
const MOST_INODES: u64 = 2_000_000;

/// What a compile starts from.
pub(super) enum PreparedBase {
    /// An image of the daemon, under the name that the cell's Dockerfile starts from.
    Image(Arc<DockerEngine>),
    /// Trees in the cache, for a sandbox.
    InPlace(Arc<Sandbox>, InPlaceBase),
    /// The same, for a pod, with the image that the toolchain is.
    InCluster(Arc<Kubernetes>, InPlaceBase, BaseImage),
}

/// Trees, and what is done over them.
pub(super) struct InPlaceBase {
    /// The steps of the `modules` stage; the first looks for the compiler.
    pub(super) steps: Vec<Step>,
    /// The uppermost first: headers and toolchain. Of a cross toolchain the toolchain comes first: its tools of kbuild run here,
    /// where those of the headers do not.
    pub(super) lowers: [PathBuf; 2],
    /// The entry of the headers in the cache.
    pub(super) headers: String,
}

impl InPlaceBase {
    /// The steps, and what they may use. What a definition says of its memory is when a build may start beside others, and so
    /// an estimate.
    pub(super) fn plan(&self, spec: BuildSpec) -> Plan {
        let memory = spec.memory.bytes().saturating_mul(2).max(LEAST_MEMORY);
        let limits = Limits {
            memory: Some(memory),
            processes: Some(MOST_PROCESSES),
            disk: Some(MOST_DISK),
            inodes: Some(MOST_INODES),
        };
        Plan { steps: self.steps.clone(), limits }
    }
}

/// Prepares the cell's base: toolchain plus header set.
pub(super) async fn prepare(job: &Job<'_>, headers: &HeaderSet) -> Result<PreparedBase> {
    let engines = &job.parts.engine;
    let docker = match (job.image.spec.output, engines.get().await) {
        (Output::Payload, Ok(Engine::Kubernetes(cluster))) => {
            let (tree, toolchain) = own_toolchain(job, headers).await?;
            let base = Base::of(&job.cell.base_name, &toolchain.image.config);
            let base =
                in_place(job, headers, tree, &base).map_err(|refused| refused_template(job, &refused))?;
            return Ok(PreparedBase::InCluster(cluster, base, toolchain));
        }
        (Output::Payload, Ok(Engine::Sandbox(sandbox))) => match in_sandbox(job, headers).await? {
            Ok(base) => {
                // One at a time: two would walk the same tree.
                let _lock = job.parts.cache.lock("trees", "owner", LockMode::Exclusive).await?;
                let (owner, trees) = (sandbox.owner(), base.lowers.clone());
                blocking(move || trees.iter().try_for_each(|tree| owner.own(tree))).await?;
                return Ok(PreparedBase::InPlace(sandbox, base));
            }
            // What a daemon can do is done by one, if there is one.
            Err(refused @ StepsError::Unsupported { .. }) if engines.may_be_another() => {
                engines.docker().await.map_err(|_| refused_template(job, &refused))?
            }
            Err(refused) => return Err(refused_template(job, &refused)),
        },
        (Output::Payload, Ok(Engine::Docker(docker))) => docker,
        (Output::Payload, Err(error)) => return Err(error.into()),
        (Output::Image, _) => engines.docker().await?,
    };
    confined_by_docker(job.parts.definitions.site.builds.landlock)?;
    with_image(job, headers, &docker).await?;
    Ok(PreparedBase::Image(docker))
}

/// A daemon's containers have no Landlock of farrier's.
fn confined_by_docker(least_landlock: u32) -> Result<()> {
    if least_landlock == 0 {
        return Ok(());
    }
    let message =
        format!("the site requires Landlock ABI {least_landlock}, which Docker does not give to builds");
    let hint = "build with --engine sandbox or kubernetes, or lower builds.landlock in site.yaml";
    Err(TargetError::finding(FindingKind::Usage, message, Some(hint.to_owned())))
}

/// The cell's toolchain as a tree, in which the tools of the headers run, and the image that it is.
async fn own_toolchain(job: &Job<'_>, headers: &HeaderSet) -> Result<(PathBuf, BaseImage)> {
    job.stage(Stage::Toolchain);
    let get = || toolchain_tree(job.parts, &job.toolchain, job.cell);
    let (tree, image) = intact(job.parts, get, |(tree, _)| Some(tree)).await?;
    host_tools::check(job, headers, &tree).await?;
    Ok((tree, image))
}

/// The trees and steps of a build on this machine, which may be of another architecture than the kernel.
async fn in_sandbox(job: &Job<'_>, headers: &HeaderSet) -> Result<Result<InPlaceBase, StepsError>> {
    if !cross::is_foreign(job) {
        let (tree, toolchain) = own_toolchain(job, headers).await?;
        let base = Base::of(&job.cell.base_name, &toolchain.image.config);
        return Ok(in_place(job, headers, tree, &base));
    }
    job.stage(Stage::Toolchain);
    let (tree, base) = cross::toolchain(job, headers).await?;
    Ok(in_place(job, headers, tree, &base).map(|mut made| {
        made.lowers.reverse();
        made
    }))
}

/// The trees, and the steps over them, unless the Dockerfile asks for what is not done in place.
fn in_place(
    job: &Job<'_>,
    headers: &HeaderSet,
    toolchain: PathBuf,
    base: &Base,
) -> Result<InPlaceBase, StepsError> {
    let recipe = steps::read(&job.cell.dockerfile, base)?;
    recipe.notes.iter().for_each(|note| job.note(&note.to_string()));
    let mut steps = recipe.steps;
    let first = [headers.compiler.map(probe_step), btf_source(job, headers).map(without_btf_step)];
    steps.splice(0..0, first.into_iter().flatten());
    Ok(InPlaceBase { steps, lowers: [headers.root.clone(), toolchain], headers: headers.key.clone() })
}

fn refused_template(job: &Job<'_>, refused: &StepsError) -> TargetError {
    let message = format!("template {}: {refused}", job.image.spec.template);
    TargetError::finding(FindingKind::Compile, message, None)
}

/// Makes sure that the engine has the image that the cell's Dockerfile starts from.
async fn with_image(job: &Job<'_>, headers: &HeaderSet, engine: &DockerEngine) -> Result<()> {
    let Job { parts, cell, toolchain, .. } = job;
    // Builds run side by side, and one base serves many of them.
    let key = cell.base_name.rsplit(':').next().unwrap_or_default();
    let _lock = parts.cache.lock("base", key, LockMode::Exclusive).await?;
    parts.cache.stamp("base", key)?;
    if engine.has_image(&cell.base_name).await? {
        return Ok(());
    }
    kept::make_room(parts, engine).await;
    job.stage(Stage::Toolchain);
    let toolchain = ensure_toolchain(job, engine, toolchain).await?;
    job.stage(Stage::Base);
    let log = Arc::new(ProbeLog::default());
    let build = BuildJob {
        id: format!("base-{}-{}", cell.input_hash.short(), std::process::id()),
        dockerfile: base_dockerfile(&toolchain, headers.compiler, btf_source(job, headers)),
        context: vec![ContextEntry { dest: "kernel".to_owned(), from: headers.root.clone() }],
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: parts.cancel.clone(),
    };
    match engine.build_image(&build, &cell.base_name).await {
        Err(EngineError::Step(message)) => Err(match missing_compiler(job, headers, &log) {
            Some(error) => error,
            None => EngineError::Step(message).into(),
        }),
        other => Ok(other?),
    }
}

/// The toolchain lacks the compiler that the kernel was built with, if that is what the probe has found.
pub(super) fn missing_compiler(job: &Job<'_>, headers: &HeaderSet, log: &ProbeLog) -> Option<TargetError> {
    let (wanted, offered) = headers.compiler.zip(log.offered())?;
    let family = &job.family.metadata.name;
    let message = format!(
        "the kernel was built with {wanted}, which the toolchain of family {family} lacks; it offers {offered}"
    );
    let hint = format!(
        "add the package of {wanted} to the toolchain of kernels family {family}, or name an image that has it"
    );
    Some(TargetError::finding(FindingKind::Compile, message, Some(hint)))
}

/// Makes sure that the engine has the toolchain, and says under which name.
async fn ensure_toolchain(job: &Job<'_>, engine: &DockerEngine, toolchain: &Toolchain) -> Result<String> {
    let parts = job.parts;
    let root = PackageRoot::of_toolchain(toolchain, &job.cell.target);
    let Some(root) = root else {
        // With the digest that the input hash has, whatever the tag names by now.
        let reference: ImageReference = job.cell.toolchain.parse()?;
        if engine.has_image(&reference.to_string()).await? {
            return Ok(reference.to_string());
        }
        let copy = parts.nearest(reference.clone()).await?;
        // No engine pulls from a layout directory.
        let reference = if copy.repository.host().is_some() { copy } else { reference };
        let pull = || pull(parts, engine, &reference);
        return parts.retry("pull toolchain image", pull).await;
    };
    // By its content: what an engine has under a name that is made from the definition may be from anywhere.
    let (digest, layer) = root_fs_layer(parts, &root, job.cell).await?;
    let key = &digest.hex()[..24];
    let name = format!("{LOCAL_PREFIX}toolchain:{key}");
    let _lock = parts.cache.lock("toolchain", key, LockMode::Exclusive).await?;
    parts.cache.stamp("toolchain", key)?;
    if !engine.has_image(&name).await? {
        let build = BuildJob {
            id: format!("toolchain-{}", std::process::id()),
            dockerfile: "FROM scratch\nADD rootfs.tar.gz /\n".to_owned(),
            context: vec![ContextEntry { dest: "rootfs.tar.gz".to_owned(), from: layer }],
            log: Arc::new(ProbeLog::default()),
            cancel: parts.cancel.clone(),
        };
        engine.build_image(&build, &name).await?;
    }
    Ok(name)
}

/// Makes sure that the engine has an image, from a mirror or its own place, and says under which name. The engine
/// goes to the network by itself, so that its hosts are looked at before.
async fn pull(parts: &Parts, engine: &DockerEngine, image: &ImageReference) -> Result<String> {
    let net = parts.fetcher.net();
    let places = net.image_candidates(&image.repository);
    let named = |place: &Repository| {
        ImageReference { repository: place.clone(), version: image.version.clone() }.to_string()
    };
    for name in places.iter().map(named) {
        if engine.has_image(&name).await? {
            return Ok(name);
        }
    }
    let mut outcome = Err(TargetError::no_such_image(image));
    for place in &places {
        let name = named(place);
        outcome = pull_from(parts, engine, place, &name).await.map(|()| name);
        match &outcome {
            Ok(_) => break,
            Err(error) if *place != image.repository => {
                tracing::warn!(%image, mirror = %place, error = %error_chain(error), "the mirror cannot be used");
            }
            Err(_) => {}
        }
    }
    outcome
}

async fn pull_from(parts: &Parts, engine: &DockerEngine, place: &Repository, name: &str) -> Result<()> {
    if let Some(host) = HostPort::of_registry(&place.normalised().0) {
        let what = format!("pull of toolchain image {name}");
        parts.fetcher.net().permit(&host, &Asker::of(&what)).map_err(registry::not_sent)?;
    }
    let found = parts.credentials.password(place).await;
    let credentials = found.map(|(username, password)| Credentials { username, password });
    Ok(engine.pull(name, credentials.as_ref()).await?)
}

/// The Dockerfile that puts a header set into a toolchain, and fails at once when the toolchain cannot
/// compile for it: hours later, in the middle of a driver, the message would be of no use.
fn base_dockerfile(toolchain: &str, compiler: Option<Compiler>, btf_source: Option<String>) -> String {
    let mut text = format!("FROM {toolchain}\nCOPY kernel/ /\n");
    if let Some(path) = btf_source {
        let _ = writeln!(text, "RUN rm {path}");
    }
    if let Some(compiler) = compiler {
        let _ = writeln!(text, "RUN {}", probe(compiler));
    }
    text
}

/// Where the kernel's headers bring a `vmlinux`, from which kbuild would make type information for modules (BTF): its place.
/// Without it kbuild makes none, whatever the kernel's configuration says; with it, and neither pahole nor debug information, no
/// module is compiled at all. Decision 23 says which modules get it.
fn btf_source(job: &Job<'_>, headers: &HeaderSet) -> Option<String> {
    let release = &job.cell.target.release;
    let build = find_build(&headers.root, release).ok()?;
    let is_there = !job.family.spec.btf && headers.root.join(build).join("vmlinux").is_file();
    is_there.then(|| format!("/lib/modules/{release}/build/vmlinux"))
}

/// Takes that `vmlinux` away, for this build.
fn without_btf_step(path: String) -> Step {
    first_step("modules get no type information".to_owned(), ["/bin/rm".to_owned(), path].into())
}

/// The same probe, as a step in place.
fn probe_step(compiler: Compiler) -> Step {
    let argv = ["/bin/sh".to_owned(), "-c".to_owned(), probe(compiler)];
    first_step(format!("is {compiler} in the toolchain?"), argv.into())
}

/// A step before those of the template.
fn first_step(text: String, argv: Vec<String>) -> Step {
    Step { line: 0, text, action: Action::Run(Run { argv, workdir: "/".to_owned(), ..Run::default() }) }
}

/// A command that fails where the toolchain has no compiler of this major version, and prints which it has.
fn probe(Compiler { kind, major }: Compiler) -> String {
    let name = match kind {
        CompilerKind::Gcc => "gcc",
        CompilerKind::Clang => "clang",
    };
    // The shell's own globbing finds gcc, gcc-12 and x86_64-linux-gnu-gcc-12 alike.
    format!(
        "found=; for cc in /usr/local/bin/{name} /usr/bin/{name} /usr/bin/{name}-[0-9]* /usr/bin/*-{name} /usr/bin/*-{name}-[0-9]*; do \
         [ -x \"$cc\" ] || continue; v=$(\"$cc\" -dumpversion) || continue; \
         [ \"${{v%%.*}}\" = {major} ] && exit 0; \
         case \"$found \" in *\" $v \"*) ;; *) found=\"$found $v\" ;; esac; done; \
         echo \"{PROBE_MARK}${{found:+{name}}}${{found:-no {name}}}\"; exit 86"
    )
}

/// Keeps what the probe of the compilers printed.
#[derive(Default)]
pub(super) struct ProbeLog(Mutex<Option<String>>);

impl ProbeLog {
    fn offered(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

impl BuildLog for ProbeLog {
    fn line(&self, line: &str) {
        // The instruction itself is echoed too, with the mark in its middle.
        if let Some(offered) = line.strip_prefix(PROBE_MARK) {
            *self.0.lock() = Some(offered.to_owned());
        }
        tracing::debug!(line, "toolchain");
    }
}
