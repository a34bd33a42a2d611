//! Adapter: one image for one kernel, from headers to a published digest.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Controller, Failures, Stage, TargetError, needs::Needed, retry::with_retry};
use crate::{
    blocking::blocking,
    cache::Scratch,
    engine::{BuildJob, BuildLog, ContextEntry, Engine, EngineError, FileLog},
    headers::HeaderSet,
    image::{Digest, DriverImage, Output},
    kernel::KernelFamily,
    kmod::CheckReport,
    oci::ReusedFrom,
    payload,
    plan::Cell,
};

/// How one build is to be done.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuildOptions {
    /// Publish the result.
    pub push: bool,
    /// May a tag that holds other content be replaced?
    pub overwrite: bool,
    /// Compile even where another kernel's payload would do.
    pub compile: bool,
}

/// What a build gave.
#[derive(Debug)]
pub struct Built {
    /// The image's manifest digest.
    pub digest: Digest,
    /// What the check said.
    pub report: CheckReport,
    /// The image whose payload this is; `None` where it was compiled.
    pub reused_from: Option<ReusedFrom>,
    /// Bytes sent to the registry; 0 when nothing was pushed.
    pub pushed_bytes: u64,
}

/// What an engine or another image left, ready to become an image.
pub(super) struct Payload {
    /// `/out`, unpacked; for an engine-made image only its modules.
    pub tree: PathBuf,
    /// The engine-made image, for `output: image`.
    pub image: Option<payload::ArchiveImage>,
    /// Keeps everything above until it is dropped.
    pub work: Scratch,
}

/// A checked payload.
pub(super) struct Made {
    /// The payload.
    pub payload: Payload,
    /// What the check said.
    pub report: CheckReport,
    /// What it was made from.
    pub origins: Origins,
    /// Digest over what it exposes.
    pub exposed: Option<Digest>,
    /// The image whose payload it is; `None` where it was compiled.
    pub reused_from: Option<ReusedFrom>,
}

/// What the inputs were resolved to, for the image's annotations.
pub(super) struct Origins {
    /// The header set's packages or file.
    pub headers: Vec<String>,
    /// Each source's.
    pub sources: Vec<String>,
    /// The toolchain.
    pub toolchain: String,
}

impl Controller {
    /// Builds one cell, or takes over another kernel's payload: headers, base, sources, compile, check, assemble
    /// and, if asked for, publish.
    pub async fn build(&self, cell: &Cell, options: BuildOptions) -> Result<Built, TargetError> {
        let definition = self.definitions_of(cell)?;
        let (image, family) = definition;
        let subject = cell.subject();
        self.can_check(image)?;
        if options.push {
            self.can_sign_images().await?;
        }
        self.reporter.stage(&subject, Stage::Headers);
        let headers = self.header_set(cell, family).await?;
        self.can_sign(cell, image, &headers).await?;
        let needed = self.needed(cell, image).await?;
        let reused =
            if options.compile { None } else { self.take_over(cell, definition, &headers, &needed).await? };
        let made = match reused {
            Some(made) => made,
            None => self.make(cell, definition, &headers, &needed).await?,
        };

        self.reporter.stage(&subject, Stage::Assemble);
        let assembled = self.assemble(cell, definition, &made).await?;
        let mut pushed_bytes = 0;
        if options.push {
            self.reporter.stage(&subject, Stage::Publish);
            pushed_bytes = self.publish(cell, &assembled, options.overwrite).await?;
        }
        let Made { payload: _, report, origins: _, exposed: _, reused_from } = made;
        Ok(Built { digest: assembled.assembled.digest.clone(), report, reused_from, pushed_bytes })
    }

    /// A published payload that needs no compiler: this kernel's own, signed otherwise, or another kernel's.
    async fn take_over(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        headers: &HeaderSet,
        needed: &Needed,
    ) -> Result<Option<Made>, TargetError> {
        match self.resign(cell, definition, headers, needed).await? {
            Some(made) => Ok(Some(made)),
            None => self.reuse(cell, definition, headers, needed).await,
        }
    }

    /// Compiles and checks.
    async fn make(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        headers: &HeaderSet,
        needed: &Needed,
    ) -> Result<Made, TargetError> {
        let (image, family) = definition;
        let engine = self.engine.get().await?;
        self.ensure_base(engine.as_ref(), cell, family, headers).await?;
        let (mut context, sources) = self.context(cell, image).await?;
        context.extend(needed.context.iter().cloned());
        self.reporter.stage(&cell.subject(), Stage::Compile);
        let payload = self.compile(engine.as_ref(), cell, image, context).await?;
        let exposed = self.expose(cell, image, &payload).await?;
        let report = self.check(cell, definition, (headers, None), needed, &payload.tree).await?;
        let toolchain = cell.toolchain.clone();
        let origins = Origins { headers: headers.origin.clone(), sources, toolchain };
        Ok(Made { payload, report, origins, exposed, reused_from: None })
    }

    /// Finds what the payload exposes and settles its links.
    async fn expose(
        &self,
        cell: &Cell,
        image: &DriverImage,
        payload: &Payload,
    ) -> Result<Option<Digest>, TargetError> {
        let exposes = image.spec.exposes.clone();
        if exposes.is_empty() || payload.image.is_some() {
            return Ok(None);
        }
        let tree = payload.tree.clone();
        let found = blocking(move || payload::expose(&tree, &exposes)).await?;
        for path in found.without_tables() {
            let path = path.display();
            self.reporter.note(&cell.subject(), &format!("exposed /{path} has no Module.symvers"));
        }
        Ok(Some(found.digest))
    }

    /// The build context, sources and the patches that apply, and what the sources are.
    async fn context(
        &self,
        cell: &Cell,
        image: &DriverImage,
    ) -> Result<(Vec<ContextEntry>, Vec<String>), TargetError> {
        let root = &self.definitions.root;
        let (mut context, mut origins) = (Vec::new(), Vec::new());
        if !image.spec.sources.is_empty() {
            self.reporter.stage(&cell.subject(), Stage::Sources);
        }
        for source in &image.spec.sources {
            let fetched =
                with_retry("fetch source", &self.cancel, || self.fetcher.source(source, root)).await?;
            context.push(ContextEntry { dest: format!("sources/{}", source.name), from: fetched.root });
            origins.push(format!("{}: {}", source.name, fetched.origin));
        }
        for patch in &cell.patches {
            let path = &image.spec.patches[patch.index].path;
            context.push(ContextEntry { dest: format!("patches/{}", patch.name), from: root.join(path) });
        }
        Ok((context, origins))
    }

    /// Runs the engine and collects what it left.
    async fn compile(
        &self,
        engine: &dyn Engine,
        cell: &Cell,
        image: &DriverImage,
        context: Vec<ContextEntry>,
    ) -> Result<Payload, TargetError> {
        let work = self.cache.scratch()?;
        let log_path = Failures::new(&self.cache).log_path(
            cell.image.as_str(),
            cell.target.release.as_str(),
            cell.input_hash,
        );
        let (reporter, subject) = (Arc::clone(&self.reporter), cell.subject());
        let log = Arc::new(FileLog::create(&log_path, move |line| reporter.output(&subject, line))?);
        let job = BuildJob {
            id: job_id(cell),
            dockerfile: cell.dockerfile.clone(),
            context,
            log: Arc::clone(&log) as Arc<dyn BuildLog>,
            cancel: self.cancel.clone(),
        };
        let tree = work.path().join("payload");
        fs::create_dir(&tree).map_err(|source| TargetError::Input { path: tree.clone(), source })?;
        let outcome = match image.spec.output {
            Output::Payload => engine.build_payload(&job, &tree).await.map(|()| None),
            Output::Image => {
                let archive = work.path().join("image.tar");
                engine.build_archive(&job, &archive).await.map(|()| Some(archive))
            }
        };
        let archive = match outcome {
            Ok(archive) => archive,
            Err(EngineError::Step { message }) => {
                let (diagnosis, tail) = log.finish();
                return Err(TargetError::Compile { diagnosis, message, tail, log: log_path });
            }
            Err(EngineError::Cancelled) => return Err(TargetError::Cancelled),
            Err(other) => return Err(other.into()),
        };
        let image = match archive {
            None => None,
            Some(archive) => {
                let (work, modules) = (work.path().to_owned(), tree.clone());
                let import = move || {
                    payload::extract_modules(&archive, &modules)?;
                    payload::import_docker_archive(&archive, &work)
                };
                Some(blocking(import).await?)
            }
        };
        Ok(Payload { tree, image, work })
    }

    fn definitions_of<'a>(&'a self, cell: &Cell) -> Result<(&'a DriverImage, &'a KernelFamily), TargetError> {
        let image = self.definitions.images.get(&cell.image);
        let family = self.definitions.families.iter().find(|family| family.metadata.name == cell.family);
        image.zip(family).ok_or_else(|| TargetError::Definition(cell.subject()))
    }
}

/// Names what an engine makes for this build: unique among all farriers of a machine.
fn job_id(cell: &Cell) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    format!(
        "{}-{}-{}-{}",
        cell.image,
        cell.input_hash.short(),
        std::process::id(),
        COUNTER.fetch_add(1, Ordering::Relaxed)
    )
}
