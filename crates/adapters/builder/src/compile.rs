//! The compile stage assembles the build context (sources, patches, needs), runs the `modules` stage, and collects its
//! payload.

use std::{
    path::{Component, Path, PathBuf},
    pin::pin,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

use farrier_core::{
    image::{Digest, ImageName, Output, Period},
    kernel::KernelRelease,
    provenance::Confinement,
};
use farrier_definitions::read_patch;
use farrier_engines::{BuildLog, BuildRequest, ContextEntry, EngineError, InPlace};
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_payload::{ArchiveImage, DecompressionBudget};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    FileLog,
    base::{InPlaceBase, MIN_MEMORY, PreparedBase, ProbeLog, compiler_probe_error},
    cell_build::{CellBuild, CompileInputs, Payload, ensure_planned},
    diagnosis::Diagnosis,
    logs::log_path,
    pod,
};
use crate::{
    images::fetch_source,
    services::{BuildError, BuildProblem, ProblemKind, Result, Stage},
};

/// Directory with the payload, below the scratch directory.
const TREE: &str = "payload";
/// Archive with an engine-made image, below the scratch directory.
const ARCHIVE: &str = "image.tar";

/// Parts of the messages of gcc, collect2, clang and make about a process that the kernel killed.
const KILLED_PROCESS: [&str; 5] = [
    "Killed signal terminated program",
    "terminated with signal 9 [Killed]",
    "unable to execute command: Killed",
    "] Killed",
    "] Error 137",
];

/// Advice for a build that exceeded a limit of files or processes.
const FIXED_LIMIT_ADVICE: &str =
    "this limit is fixed: use less in the build; farrier does not retry until an input changes";

/// Advice for a build that exceeded the deadline.
const DEADLINE_ADVICE: &str = "if the build needs more time, raise build.deadline in the definition: farrier does not retry until the \
                               deadline is raised or an input changes";

/// Runs the engine and returns the payload that the engine produced.
pub(super) async fn compile(
    build: &CellBuild<'_>,
    base: &PreparedBase,
    compile_inputs: &CompileInputs,
) -> Result<Payload> {
    let CellBuild { services, cell, image, .. } = build;
    let work = services.cache.scratch()?;
    let (mut context, sources) = build_context(build, work.path()).await?;
    // Errors name the user's own source files. Only trees outside the cache are the user's own.
    let own_trees = context.iter().map(|entry| &entry.from);
    let own_trees: Vec<PathBuf> =
        own_trees.filter(|from| from.is_dir() && !from.starts_with(services.cache.root())).cloned().collect();
    context.extend(compile_inputs.needed.context.iter().cloned());
    let probe = Arc::new(ProbeLog::default());
    let log = create_log(build, Arc::clone(&probe))?;
    let request = BuildRequest {
        id: request_id(build),
        dockerfile: cell.dockerfile.clone(),
        context,
        log: Arc::clone(&log) as Arc<dyn BuildLog>,
        cancel: services.process.cancel.child_token(),
    };
    let tree = work.path().join(TREE);
    fs_err::create_dir(&tree)?;
    // The deadline applies to the steps only, because a pod may first wait for capacity.
    let steps_started = CancellationToken::new();
    if !matches!(base, PreparedBase::InCluster(..)) {
        build.stage(Stage::Compile);
        steps_started.cancel();
    }
    let (deadline, started_at) = (image.spec.build.deadline, OnceLock::new());
    let run = run_engine(build, base, &request, &steps_started, work.path());
    let confinement = match within(deadline, &steps_started, &started_at, &request.cancel, run).await {
        Some(Ok(confinement)) => confinement,
        Some(Err(_)) if services.process.cancel.is_cancelled() => return Err(BuildError::Canceled),
        Some(Err(BuildError::Engine(error))) => {
            let known_cause = || compiler_probe_error(build, &compile_inputs.headers, &probe);
            let error = explain(build, error, &log, &own_trees, known_cause);
            let is_in_pod = matches!(base, PreparedBase::InCluster(..));
            return Err(if is_in_pod { explain_in_pod(error, &log) } else { error });
        }
        Some(Err(error)) => return Err(error),
        None => {
            let why = format!("the steps did not end within the deadline of {deadline}");
            return Err(stopped(&log, ProblemKind::TooLong, &why, DEADLINE_ADVICE));
        }
    };
    let elapsed = started_at.get().map(Instant::elapsed).unwrap_or_default();
    let mut payload = Payload {
        image: import_image(image.spec.output, work.path()).await?,
        tree,
        sources,
        toolchain: cell.toolchain.clone(),
        exposed: None,
        reused_from: None,
        confinement,
        decompression: Arc::new(DecompressionBudget::of_build(deadline, elapsed)),
        work,
    };
    payload.exposed = expose(build, &payload).await?;
    Ok(payload)
}

/// Creates the build's log, which also passes each line to `probe` and to the reporter.
fn create_log(build: &CellBuild<'_>, probe: Arc<ProbeLog>) -> Result<Arc<FileLog>> {
    let CellBuild { services, cell, .. } = build;
    let (reporter, subject) = (Arc::clone(&services.process.reporter), cell.subject());
    let live = move |line: &str| {
        probe.line(line);
        reporter.output(&subject, line);
    };
    Ok(Arc::new(FileLog::create(&log_path(&services.cache, cell)?, live)?))
}

/// Runs the `modules` stage. Writes the payload to [`TREE`], or an engine-made image to [`ARCHIVE`].
async fn run_engine(
    build: &CellBuild<'_>,
    base: &PreparedBase,
    request: &BuildRequest,
    steps_started: &CancellationToken,
    work: &Path,
) -> Result<Confinement> {
    let tree = work.join(TREE);
    match (base, build.image.spec.output) {
        (PreparedBase::InPlace(sandbox, base), _) => {
            let in_place = in_place_build(build, base, request.clone(), work.join("sandbox"));
            Ok(sandbox.compile(in_place, &tree).await?)
        }
        (PreparedBase::InCluster(cluster, base, toolchain), _) => {
            let request = request.clone();
            Box::pin(pod::compile(build, cluster, base, toolchain, request, steps_started, &tree)).await
        }
        (PreparedBase::Image(engine), Output::Payload) => {
            engine.build_payload(request, &tree).await?;
            Ok(Confinement::default())
        }
        (PreparedBase::Image(engine), Output::Image) => {
            engine.build_archive(request, &work.join(ARCHIVE)).await?;
            Ok(Confinement::default())
        }
    }
}

fn in_place_build(
    build: &CellBuild<'_>,
    base: &InPlaceBase,
    request: BuildRequest,
    scratch: PathBuf,
) -> InPlace {
    let BuildRequest { id: _, dockerfile: _, context, log, cancel } = request;
    InPlace {
        plan: base.plan(build.image.spec.build),
        lowers: base.lowers.to_vec(),
        context,
        scratch,
        log,
        min_landlock_abi: build.services.definitions.site.builds.landlock,
        cancel,
    }
}

/// Imports an engine-made image from [`ARCHIVE`], and extracts the image's modules to [`TREE`].
async fn import_image(output: Output, work: &Path) -> Result<Option<ArchiveImage>> {
    match output {
        Output::Payload => Ok(None),
        Output::Image => {
            let work = work.to_owned();
            let import = move || {
                let archive = work.join(ARCHIVE);
                payload::extract_modules(&archive, &work.join(TREE))?;
                payload::import_docker_archive(&archive, &work)
            };
            Ok(Some(blocking(import).await?))
        }
    }
}

/// Awaits the engine's run and cancels the run after the deadline. Returns `None` if the deadline canceled the run. The
/// deadline starts when `steps_started` is canceled, and `started_at` records that time.
async fn within<T>(
    deadline: Period,
    steps_started: &CancellationToken,
    started_at: &OnceLock<Instant>,
    cancel: &CancellationToken,
    run: impl Future<Output = Result<T>>,
) -> Option<Result<T>> {
    let mut run = pin!(run);
    let deadline_passed = async {
        steps_started.cancelled().await;
        started_at.get_or_init(Instant::now);
        sleep(deadline.duration()).await;
    };
    tokio::select! {
        biased;
        outcome = run.as_mut() => return Some(outcome),
        () = deadline_passed => {}
    }
    cancel.cancel();
    Some(run.await).filter(|outcome| !matches!(outcome, Err(BuildError::Canceled)))
}

/// Returns the error for a failed run, with the decisive error from the log, the log's path and a hint.
fn explain(
    build: &CellBuild<'_>,
    error: EngineError,
    log: &FileLog,
    own_trees: &[PathBuf],
    known_cause: impl FnOnce() -> Option<BuildError>,
) -> BuildError {
    let is_killed = error.is_killed();
    match error {
        EngineError::Step(message) => known_cause().unwrap_or_else(|| {
            step_failed(log, message, is_killed, own_trees, &build.cell.image, &build.cell.target.release)
        }),
        EngineError::MemoryLimit(message) => stopped(log, ProblemKind::OverLimit, &message, &memory_advice()),
        EngineError::FixedLimit(message) => {
            stopped(log, ProblemKind::OverLimit, &message, FIXED_LIMIT_ADVICE)
        }
        EngineError::Deadline(message) => stopped(log, ProblemKind::TooLong, &message, DEADLINE_ADVICE),
        EngineError::Tampered(_) => tampered(log, &error).into(),
        other => BuildError::Engine(other),
    }
}

/// Returns the error for a failed run in a pod. There the pod's own memory limit kills processes.
fn explain_in_pod(error: BuildError, log: &FileLog) -> BuildError {
    match error {
        BuildError::Problem(problem) if problem.kind == ProblemKind::Killed => {
            stopped(log, ProblemKind::OverLimit, &problem.message, &memory_advice())
        }
        error => error,
    }
}

/// Returns the error for a failed step of the Dockerfile.
fn step_failed(
    log: &FileLog,
    message: String,
    is_killed: bool,
    own_trees: &[PathBuf],
    image: &ImageName,
    release: &KernelRelease,
) -> BuildError {
    let (mut diagnosis, tail) = log.finish();
    if is_killed || diagnosis.as_ref().is_some_and(names_killed_process) {
        return killed(log, &message, tail).into();
    }
    if let Some(Diagnosis { file, message, .. }) = &mut diagnosis {
        let own = file.as_deref().and_then(|file| in_own_tree(file, own_trees));
        *file = own.or(file.take());
        *message = with_own_paths(message, own_trees);
    }
    let advice = log.hint().and_then(|hint| hint.text(release.as_str())).map(|text| text + "; ");
    let (message, detail) = match diagnosis {
        Some(diagnosis) => (diagnosis.to_string(), Vec::new()),
        None => (message, tail),
    };
    let hint = format!(
        "{}the full log is {}; correct the source or the definition and run again; to compile the same inputs again, first run \
         `farrier retry {image} {release}`",
        advice.unwrap_or_default(),
        log.path().display()
    );
    let message = format!("compile failed: {message}");
    BuildProblem { kind: ProblemKind::Compile, message, detail, hint: Some(hint) }.into()
}

/// Whether the error is about a process that the kernel killed.
fn names_killed_process(diagnosis: &Diagnosis) -> bool {
    KILLED_PROCESS.iter().any(|part| diagnosis.message.contains(part))
}

/// Replaces build paths in a message by paths of the user's own source files. An object file becomes its source file.
fn with_own_paths(message: &str, own_trees: &[PathBuf]) -> String {
    let own = |word: &str| {
        let source = word.strip_suffix(".o").map(|stem| format!("{stem}.c"));
        let path = Some(word).filter(|word| word.starts_with('/'))?;
        in_own_tree(path, own_trees).or_else(|| in_own_tree(&source?, own_trees))
    };
    message.split(' ').map(|word| own(word).unwrap_or_else(|| word.to_owned())).collect::<Vec<_>>().join(" ")
}

/// Finds the user's own file for a path in a build, such as `/build/acme.c`. Compares only path suffixes, because a template
/// can copy sources to any directory.
fn in_own_tree(file: &str, own_trees: &[PathBuf]) -> Option<String> {
    let names: Vec<Component<'_>> = Path::new(file)
        .components()
        .filter(|name| !matches!(name, Component::RootDir | Component::CurDir))
        .collect();
    if names.contains(&Component::ParentDir) {
        return None;
    }
    let suffixes = (0..names.len()).map(|start| names[start..].iter().collect::<PathBuf>());
    let mut paths = suffixes.flat_map(|suffix| own_trees.iter().map(move |tree| tree.join(&suffix)));
    let path = paths.find(|path| path.is_file())?;
    Some(path.canonicalize().unwrap_or(path).display().to_string())
}

/// Returns the problem of a build with a killed process. Another machine, or another time, may have enough memory.
fn killed(log: &FileLog, message: &str, detail: Vec<String>) -> BuildProblem {
    let hint = format!(
        "most likely the machine ran out of memory: raise build.memory in the definition, so that fewer builds run at the same \
         time; the log is {}",
        log.path().display()
    );
    let message = format!("a process of the build was killed: {message}");
    BuildProblem { kind: ProblemKind::Killed, message, detail, hint: Some(hint) }
}

fn memory_advice() -> String {
    format!(
        "if the build needs more memory, raise build.memory in the definition: a build may use twice that value, and at least {} GiB; \
         farrier does not retry until build.memory is raised or an input changes",
        MIN_MEMORY >> 30
    )
}

/// Returns the error for a build that exceeded a resource limit or the deadline.
fn stopped(log: &FileLog, kind: ProblemKind, why: &str, advice: &str) -> BuildError {
    let (_, detail) = log.finish();
    let message = format!("the build was stopped: {why}");
    let hint = Some(format!("the log is {}; {advice}", log.path().display()));
    BuildProblem { kind, message, detail, hint }.into()
}

/// Returns the problem of a build with a step that forged runner messages.
fn tampered(log: &FileLog, error: &EngineError) -> BuildProblem {
    let (_, detail) = log.finish();
    let hint = error.hint().unwrap_or_default();
    let hint = Some(format!("{hint}: {}", log.path().display()));
    BuildProblem { kind: ProblemKind::Tampered, message: error.to_string(), detail, hint }
}

/// Locates the payload's exposed headers, resolves their links, and returns their digest.
async fn expose(build: &CellBuild<'_>, payload: &Payload) -> Result<Option<Digest>> {
    let exposes = build.image.spec.exposes.clone();
    if exposes.is_empty() || payload.image.is_some() {
        return Ok(None);
    }
    let tree = payload.tree.clone();
    let headers = blocking(move || payload::expose(&tree, &exposes)).await?;
    for path in headers.without_tables() {
        build.note(&format!("exposed /{} has no Module.symvers", path.display()));
    }
    Ok(Some(headers.digest))
}

/// Builds the context from the sources and the applicable patches. Also returns the identity of each source.
async fn build_context(build: &CellBuild<'_>, work: &Path) -> Result<(Vec<ContextEntry>, Vec<String>)> {
    let CellBuild { services, cell, image, .. } = build;
    let (mut context, mut origins) = (Vec::new(), Vec::new());
    if !image.spec.sources.is_empty() {
        build.stage(Stage::Sources);
    }
    for source in &image.spec.sources {
        let fetched = fetch_source(services, source, &cell.target).await?;
        let planned = cell.fetched.sources.get(source.name.as_str());
        ensure_planned(planned == Some(&fetched.origin), format!("source {}", source.name))?;
        if let Some(warning) = services.fetcher.sources().archive_warning(source).await? {
            build.note(&warning);
        }
        context.push(ContextEntry { dest: format!("sources/{}", source.name), from: fetched.root });
        origins.push(format!("{}: {}", source.name, fetched.origin));
    }
    for patch in &cell.patches {
        let bytes = read_patch(&services.definitions, &image.spec.patches[patch.index].path).await?;
        ensure_planned(Digest::of(&bytes).hex() == patch.sha256, format!("patch {}", patch.name))?;
        let from = work.join(&patch.name);
        fs_err::tokio::write(&from, bytes).await?;
        // A fixed modification time keeps pod layers reproducible.
        fs_err::File::options().write(true).open(&from)?.set_modified(SystemTime::UNIX_EPOCH)?;
        context.push(ContextEntry { dest: format!("patches/{}", patch.name), from });
    }
    Ok((context, origins))
}

/// Returns an ID for the engine's resources, unique among all farrier processes of a machine.
fn request_id(build: &CellBuild<'_>) -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let (image, hash) = (&build.cell.image, build.cell.input_hash.short());
    format!("{image}-{hash}-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Build steps control their output, so a message about a full disk must not make a failure retryable.
    #[test]
    fn a_step_that_speaks_of_a_full_disk_has_failed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("build.log");
        let outcome = |last: &str| {
            let log = FileLog::create(&path, |_: &str| ()).unwrap();
            log.line("  CC [M]  /build/acme.o");
            log.line(last);
            let (image, release) = ("acme".parse().unwrap(), "6.1.0-47-amd64".parse().unwrap());
            step_failed(&log, "RUN make: exit code 2".to_owned(), false, &[], &image, &release)
        };
        for said in [
            "/build/acme.c:3:1: fatal error: error writing to /tmp/cc.s: No space left on device",
            "no space left on device",
            "Disk quota exceeded",
        ] {
            let failed = outcome(said);
            assert!(failed.is_permanent(), "{failed:?}");
            let text = format!("{failed} {:?}", failed.hint());
            assert!(!text.contains("the disk is full"), "{text}");
        }
        assert!(outcome("/build/acme.c:3:1: error: expected ';'").is_permanent());
    }

    #[test]
    fn a_build_whose_process_was_killed_is_retried() {
        let dir = tempfile::tempdir().unwrap();
        let (image, release) = ("acme".parse().unwrap(), "6.1.0-47-amd64".parse().unwrap());
        for (lines, message) in [
            ("gcc: fatal error: Killed signal terminated program cc1", "RUN make: exit code 2"),
            ("clang: error: unable to execute command: Killed", "RUN make: exit code 2"),
            ("make[2]: *** [Makefile:1903: acme.o] Killed", "RUN make: exit code 2"),
            ("make[2]: *** [Makefile:1903: acme.o] Error 137", "RUN make: exit code 2"),
            (
                "collect2: fatal error: ld terminated with signal 9 [Killed]\nmake: *** [Makefile:3: acme] Error 1",
                "RUN make: exit code 2",
            ),
            ("  CC [M]  /build/acme.o", "RUN make: exit code 137"),
        ] {
            let log = FileLog::create(&dir.path().join("build.log"), |_: &str| ()).unwrap();
            for line in lines.lines() {
                log.line(line);
            }
            let is_killed = EngineError::Step(message.to_owned()).is_killed();
            let failed = step_failed(&log, message.to_owned(), is_killed, &[], &image, &release);
            assert!(!failed.is_permanent(), "{failed:?}");
            assert!(failed.hint().unwrap().contains("memory"), "{failed:?}");
        }
    }

    #[test]
    fn a_process_that_is_killed_in_a_pod_exceeded_the_memory_of_the_pod() {
        let dir = tempfile::tempdir().unwrap();
        let (image, release) = ("acme".parse().unwrap(), "6.1.0-47-amd64".parse().unwrap());
        let log = FileLog::create(&dir.path().join("build.log"), |_: &str| ()).unwrap();
        log.line("gcc: fatal error: Killed signal terminated program cc1");
        let failed = step_failed(&log, "RUN make: exit code 2".to_owned(), false, &[], &image, &release);
        let failed = explain_in_pod(failed, &log);
        assert!(failed.is_caused_by_limit(), "{failed:?}");
        assert!(failed.hint().unwrap().contains("raise build.memory"), "{failed:?}");
    }

    #[test]
    fn a_user_s_own_file_is_named_by_its_own_path() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("hello");
        fs_err::create_dir_all(tree.join("kernel")).unwrap();
        fs_err::write(tree.join("kernel/acme.c"), "").unwrap();
        fs_err::write(dir.path().join("outside.c"), "").unwrap();
        // A definition names its source by a relative path.
        let tree = tree.join("../hello");
        let own = |file: &str| in_own_tree(file, std::slice::from_ref(&tree));
        let path = tree.join("kernel/acme.c").canonicalize().unwrap().display().to_string();
        for file in ["/build/kernel/acme.c", "kernel/acme.c", "./kernel/acme.c"] {
            assert_eq!(own(file).as_ref(), Some(&path), "{file}");
        }
        for file in ["/build/acme.c", "/build/../outside.c", "/build/kernel", "cc1", ""] {
            assert_eq!(own(file), None, "{file}");
        }
        let license =
            with_own_paths("missing MODULE_LICENSE() in /build/kernel/acme.o", std::slice::from_ref(&tree));
        assert_eq!(license, format!("missing MODULE_LICENSE() in {path}"));
        let log = FileLog::create(&dir.path().join("log"), |_: &str| ()).unwrap();
        log.line("/build/kernel/acme.c:3:1: error: expected ';'");
        let (image, release) = ("acme".parse().unwrap(), "6.1.0-47-amd64".parse().unwrap());
        let failed = step_failed(&log, String::new(), false, &[tree], &image, &release);
        assert_eq!(failed.to_string(), format!("compile failed: {path}:3:1: expected ';'"));
    }

    /// An engine run that ends after some seconds, or on cancellation.
    async fn run(seconds: u64, cancel: &CancellationToken) -> Result<u64, BuildError> {
        tokio::select! {
            () = sleep(Duration::from_secs(seconds)) => Ok(seconds),
            () = cancel.cancelled() => Err(BuildError::Canceled),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_run_is_stopped_at_its_deadline() {
        let deadline = Period::seconds(60);
        let (in_time, steps_started) = (CancellationToken::new(), CancellationToken::new());
        let any = OnceLock::new();
        steps_started.cancel();
        assert!(matches!(
            within(deadline, &steps_started, &any, &in_time, run(59, &in_time)).await,
            Some(Ok(59))
        ));
        assert!(!in_time.is_cancelled());
        let late = CancellationToken::new();
        assert!(within(deadline, &steps_started, &any, &late, run(61, &late)).await.is_none());
        // Canceling farrier cancels the run, which then does not count as late.
        let stopped = CancellationToken::new();
        let stop = async {
            sleep(Duration::from_secs(5)).await;
            stopped.cancel();
        };
        let (outcome, ()) =
            tokio::join!(within(deadline, &steps_started, &any, &stopped, run(61, &stopped)), stop);
        assert!(matches!(outcome, Some(Err(BuildError::Canceled))));
        // The run succeeds while it is being canceled.
        let ends = CancellationToken::new();
        let started_at = OnceLock::new();
        let outcome = within(deadline, &steps_started, &started_at, &ends, async {
            sleep(Duration::from_secs(61)).await;
            Ok(())
        });
        assert!(matches!(outcome.await, Some(Ok(()))));
        // The check gets the rest of the deadline.
        assert_eq!(started_at.get().unwrap().elapsed(), Duration::from_secs(61));
        // A run that waits for capacity has not started its steps.
        let (waits, steps_started) = (CancellationToken::new(), CancellationToken::new());
        let started_at = OnceLock::new();
        let outcome = within(deadline, &steps_started, &started_at, &waits, run(600, &waits)).await;
        assert!(matches!(outcome, Some(Ok(600))) && started_at.get().is_none());
    }
}

#[cfg(test)]
#[path = "planned_inputs_tests.rs"]
mod planned_inputs_tests;

#[cfg(test)]
#[path = "prebuilt_tests.rs"]
mod prebuilt_tests;
