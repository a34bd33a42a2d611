//! Adapter: the images that builds start from: toolchains, and toolchains with one kernel's headers. Each is
//! made once per content and kept in the engine; toolchains are found again in the registry.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    Controller, Stage, TargetError,
    retry::{chain, with_retry},
};
use crate::{
    cache::LockMode,
    engine::{BuildJob, BuildLog, ContextEntry, Credentials, Engine, EngineError},
    headers::{HeaderLookup, HeaderSet, bootstrap_key},
    image::{ImageReference, Repository, Version},
    kernel::{Architecture, Compiler, CompilerKind, KernelFamily, Toolchain},
    net::Asker,
    plan::Cell,
    registry::{Registry, RegistryError},
    site::{HostPort, normalised},
};

/// What the probe of a toolchain prints before the compilers that it found.
const PROBE_MARK: &str = "farrier: toolchain offers ";

impl Controller {
    /// The header set of a cell's kernel.
    pub(super) async fn header_set(
        &self,
        cell: &Cell,
        family: &KernelFamily,
    ) -> Result<HeaderSet, TargetError> {
        let source = &family.spec.headers;
        let root = &self.definitions.root;
        let lookup =
            with_retry("fetch headers", &self.cancel, || self.fetcher.header_set(source, root, &cell.target))
                .await?;
        match lookup {
            HeaderLookup::Found(headers) => Ok(*headers),
            HeaderLookup::Missing { looked_for, hint } => {
                Err(TargetError::HeadersMissing { looked_for, hint })
            }
        }
    }

    /// Makes sure that the engine has the cell's base: toolchain plus header set.
    pub(super) async fn ensure_base(
        &self,
        engine: &dyn Engine,
        cell: &Cell,
        family: &KernelFamily,
        headers: &HeaderSet,
    ) -> Result<(), TargetError> {
        // Builds run side by side, and one base serves many of them.
        let key = cell.base_name.rsplit(':').next().unwrap_or_default();
        let _lock = self.cache.lock("base", key, LockMode::Exclusive).await?;
        if engine.has_image(&cell.base_name).await? {
            return Ok(());
        }
        self.reporter.stage(&cell.subject(), Stage::Toolchain);
        let toolchain = self.ensure_toolchain(engine, &family.spec.toolchain, cell.target.arch).await?;
        self.reporter.stage(&cell.subject(), Stage::Base);
        let log = Arc::new(ProbeLog::default());
        let job = BuildJob {
            id: format!("base-{}-{}", cell.input_hash.short(), std::process::id()),
            dockerfile: base_dockerfile(&toolchain, headers.compiler),
            context: vec![ContextEntry { dest: "kernel".to_owned(), from: headers.root.clone() }],
            log: Arc::clone(&log) as Arc<dyn BuildLog>,
            cancel: self.cancel.clone(),
        };
        match engine.build_image(&job, &cell.base_name).await {
            Err(EngineError::Step { message }) => Err(match (headers.compiler, log.offered()) {
                (Some(wanted), Some(offered)) => {
                    TargetError::CompilerMissing { wanted, family: family.metadata.name.to_string(), offered }
                }
                _ => EngineError::Step { message }.into(),
            }),
            other => Ok(other?),
        }
    }

    /// Makes sure that the engine has the toolchain, and says under which name.
    async fn ensure_toolchain(
        &self,
        engine: &dyn Engine,
        toolchain: &Toolchain,
        arch: Architecture,
    ) -> Result<String, TargetError> {
        let spec = match toolchain {
            Toolchain::Image(reference) => {
                let reference = self.resolve_reference(reference).await?;
                if engine.has_image(&reference.to_string()).await? {
                    return Ok(reference.to_string());
                }
                let copy = self.at_hand(reference.clone()).await?;
                // No engine pulls from a layout directory.
                let reference = if copy.repository.host().is_some() { copy } else { reference };
                let pull = || self.pull(engine, &reference);
                return with_retry("pull toolchain image", &self.cancel, pull).await;
            }
            Toolchain::Bootstrap(spec) => spec,
        };
        let key = &bootstrap_key(spec, arch)[..24];
        let name = format!("localhost/farrier/toolchain:{key}");
        let _lock = self.cache.lock("toolchain", key, LockMode::Exclusive).await?;
        if !engine.has_image(&name).await? {
            let layer = self.root_fs_layer(spec, arch).await?;
            let job = BuildJob {
                id: format!("toolchain-{}", std::process::id()),
                dockerfile: "FROM scratch\nADD rootfs.tar.gz /\n".to_owned(),
                context: vec![ContextEntry { dest: "rootfs.tar.gz".to_owned(), from: layer }],
                log: Arc::new(ProbeLog::default()),
                cancel: self.cancel.clone(),
            };
            engine.build_image(&job, &name).await?;
        }
        Ok(name)
    }

    /// Makes sure that the engine has an image, from a mirror or its own place, and says under which name. The engine
    /// goes to the network by itself, so that its hosts are looked at before.
    async fn pull(&self, engine: &dyn Engine, image: &ImageReference) -> Result<String, TargetError> {
        let net = self.fetcher.net();
        let places = net.image_candidates(&image.repository);
        let named = |place: &Repository| {
            ImageReference { repository: place.clone(), version: image.version.clone() }.to_string()
        };
        for name in places.iter().map(named) {
            if engine.has_image(&name).await? {
                return Ok(name);
            }
        }
        let mut outcome = Err(TargetError::BaseMissing(image.to_string()));
        for place in &places {
            let name = named(place);
            outcome = self.pull_from(engine, place, &name).await.map(|()| name);
            match &outcome {
                Ok(_) => break,
                Err(error) if *place != image.repository => {
                    tracing::warn!(%image, mirror = %place, error = %chain(error), "the mirror cannot be used");
                }
                Err(_) => {}
            }
        }
        outcome
    }

    async fn pull_from(
        &self,
        engine: &dyn Engine,
        place: &Repository,
        name: &str,
    ) -> Result<(), TargetError> {
        if let Some(host) = HostPort::of_registry(&normalised(place).0) {
            let what = format!("pull of toolchain image {name}");
            self.fetcher.net().permit(&host, &Asker::of(&what)).map_err(RegistryError::Net)?;
        }
        let found = self.credentials.password(place).await;
        let credentials = found.map(|(username, password)| Credentials { username, password });
        Ok(engine.pull(name, credentials.as_ref()).await?)
    }

    /// A reference of a definition with its tag replaced by the digest it has now.
    pub(super) async fn resolve_reference(&self, text: &str) -> Result<ImageReference, TargetError> {
        let reference: ImageReference = text.parse()?;
        if matches!(reference.version, Version::Digest(_)) {
            return Ok(reference);
        }
        // What a tag names may have changed upstream; where that is not asked, what was copied last counts.
        if self.fetcher.is_offline()
            && let Some((_, copy)) = self.copy_of(&reference).await?
        {
            let version = Version::Digest(copy.digest);
            return Ok(ImageReference { repository: reference.repository, version });
        }
        let found = self
            .registry_of(&reference.repository)
            .manifest(&reference.repository, &reference.version)
            .await?;
        let manifest = found.ok_or_else(|| TargetError::BaseMissing(text.to_owned()))?;
        Ok(ImageReference { repository: reference.repository, version: Version::Digest(manifest.digest) })
    }

    /// The registry in which needed images of a repository are looked up.
    pub(super) fn shelf(&self, repository: &Repository) -> &dyn Registry {
        match &self.needs_from {
            Some(from) => from.registry.as_ref(),
            None => self.registry_of(repository),
        }
    }

    /// The registry that holds a repository: the layout directory for what farrier publishes there, the
    /// distribution protocol for everything else.
    pub(super) fn registry_of(&self, repository: &Repository) -> &dyn Registry {
        if self.location.holds(repository) { self.registry.as_ref() } else { self.remote.as_ref() }
    }
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

/// Keeps what the probe said, and the last lines for the error.
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
