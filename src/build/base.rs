//! Adapter: the base stage: the image that a build starts from, a toolchain with one kernel's headers. Each is
//! made once per content and kept in the engine; toolchains are found again in the registry.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
};

use super::job::Job;
use crate::{
    cache::LockMode,
    engine::{BuildJob, BuildLog, ContextEntry, Credentials, Engine, EngineError},
    error_chain,
    image::{ImageReference, Repository},
    images::root_fs_layer,
    inputs::{HeaderSet, PackageRoot},
    kernel::{Compiler, CompilerKind, Toolchain},
    net::Asker,
    parts::{FindingKind, Parts, Stage, TargetError},
    registry,
    site::HostPort,
};

/// What the probe of a toolchain prints before the compilers that it found.
const PROBE_MARK: &str = "farrier: toolchain offers ";

/// An engine that has the cell's base, under the name that the cell's Dockerfile starts from.
pub(super) struct PreparedBase {
    pub(super) engine: Arc<dyn Engine>,
}

/// Makes sure that the engine has the cell's base: toolchain plus header set.
pub(super) async fn prepare(job: &Job<'_>, headers: &HeaderSet) -> Result<PreparedBase, TargetError> {
    let Job { parts, cell, family, .. } = job;
    let engine = parts.engine.get().await?;
    // Builds run side by side, and one base serves many of them.
    let key = cell.base_name.rsplit(':').next().unwrap_or_default();
    let _lock = parts.cache.lock("base", key, LockMode::Exclusive).await?;
    if engine.has_image(&cell.base_name).await? {
        return Ok(PreparedBase { engine });
    }
    job.stage(Stage::Toolchain);
    let toolchain = ensure_toolchain(job, engine.as_ref(), &family.spec.toolchain).await?;
    job.stage(Stage::Base);
    let log = Arc::new(ProbeLog::default());
    let build = BuildJob {
        id: format!("base-{}-{}", cell.input_hash.short(), std::process::id()),
        dockerfile: base_dockerfile(&toolchain, headers.compiler),
        context: vec![ContextEntry { dest: "kernel".to_owned(), from: headers.root.clone() }],
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: parts.cancel.clone(),
    };
    match engine.build_image(&build, &cell.base_name).await {
        Ok(()) => Ok(PreparedBase { engine }),
        Err(EngineError::Step { message }) => Err(match (headers.compiler, log.offered()) {
            (Some(wanted), Some(offered)) => {
                let family = &family.metadata.name;
                TargetError::finding(
                    FindingKind::Compile,
                    format!(
                        "the kernel was built with {wanted}, which the toolchain image of family {family} lacks; it offers {offered}"
                    ),
                    Some(format!(
                        "add the package of {wanted} to the toolchain of kernels family {family}, or name an image that has it"
                    )),
                )
            }
            _ => EngineError::Step { message }.into(),
        }),
        Err(other) => Err(other.into()),
    }
}

/// Makes sure that the engine has the toolchain, and says under which name.
async fn ensure_toolchain(
    job: &Job<'_>,
    engine: &dyn Engine,
    toolchain: &Toolchain,
) -> Result<String, TargetError> {
    let (parts, arch) = (job.parts, job.cell.target.arch);
    let root = match toolchain {
        Toolchain::Image(_) => {
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
        }
        Toolchain::Bootstrap(spec) => PackageRoot::Toolchain(spec.clone()),
    };
    let key = &root.key(arch)[..24];
    let name = format!("localhost/farrier/toolchain:{key}");
    let _lock = parts.cache.lock("toolchain", key, LockMode::Exclusive).await?;
    if !engine.has_image(&name).await? {
        let layer = root_fs_layer(parts, &root, arch).await?;
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
async fn pull(parts: &Parts, engine: &dyn Engine, image: &ImageReference) -> Result<String, TargetError> {
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

async fn pull_from(
    parts: &Parts,
    engine: &dyn Engine,
    place: &Repository,
    name: &str,
) -> Result<(), TargetError> {
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
fn base_dockerfile(toolchain: &str, compiler: Option<Compiler>) -> String {
    let mut text = format!("FROM {toolchain}\nCOPY kernel/ /\n");
    if let Some(Compiler { kind, major }) = compiler {
        let name = match kind {
            CompilerKind::Gcc => "gcc",
            CompilerKind::Clang => "clang",
        };
        // The shell's own globbing finds gcc, gcc-12 and x86_64-linux-gnu-gcc-12 alike.
        let _ = writeln!(
            text,
            "RUN found=; for cc in /usr/bin/{name} /usr/bin/{name}-[0-9]* /usr/bin/*-{name} /usr/bin/*-{name}-[0-9]*; do \
             [ -x \"$cc\" ] || continue; v=$(\"$cc\" -dumpversion) || continue; \
             [ \"${{v%%.*}}\" = {major} ] && exit 0; \
             case \"$found \" in *\" $v \"*) ;; *) found=\"$found $v\" ;; esac; done; \
             echo \"{PROBE_MARK}${{found:+{name}}}${{found:-no {name}}}\"; exit 86"
        );
    }
    text
}

/// Keeps what the probe of the compilers printed.
#[derive(Default)]
struct ProbeLog(Mutex<Option<String>>);

impl ProbeLog {
    fn offered(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl BuildLog for ProbeLog {
    fn line(&self, line: &str) {
        // The instruction itself is echoed too, with the mark in its middle.
        if let Some(offered) = line.strip_prefix(PROBE_MARK) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(offered.to_owned());
        }
        tracing::debug!(line, "toolchain");
    }
}
