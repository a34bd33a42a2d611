//! The `docker` engine, which uses the classic builder behind Docker's or Podman's socket.

mod output;
mod sweep;

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    path::Path,
    pin::pin,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bollard::{
    API_DEFAULT_VERSION, Docker,
    auth::DockerCredentials,
    errors::Error,
    models::ContainerCreateBody,
    query_parameters::{
        BuildImageOptions, CreateContainerOptions, CreateImageOptions, DownloadFromContainerOptions,
        TagImageOptions,
    },
};
use farrier_core::image::Digest;
use farrier_local::run_notes::{Note, Notes};
use futures::StreamExt;
use oci::error_chain;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::output::Output;
use super::{
    BuildRequest, Credentials, EngineError, EngineKind, Result, bridge,
    context::{self, DOCKERFILE},
    dockerfile,
};

/// Label with the request's ID on everything that a build creates.
const BUILD_LABEL: &str = "farrier.dev/build";
/// Label by which the cleanup finds everything that one run created. Unlike a request's ID, its value is unique.
const RUN_LABEL: &str = "farrier.dev/run";
/// Label of kept images.
const CACHE_LABEL: &str = "farrier.dev/cache";

/// Timeout for the first contact with a daemon.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of short calls. The daemon needs seconds to remove a large image, or minutes on a busy disk.
const CALL_TIMEOUT: Duration = Duration::from_mins(10);
/// Timeout until the first response of a build, a pull or an export. It includes the upload of the context.
const STREAM_TIMEOUT: Duration = Duration::from_hours(24);
/// Time limit for a pull, and for the build of an image that is kept: a toolchain or a base, whose steps are short. A build's
/// own deadline does not include them.
const IMAGE_TIMEOUT: Duration = Duration::from_hours(1);
/// Time that a canceled build has to stop gracefully before its connection is cut.
const CANCEL_GRACE: Duration = Duration::from_secs(5);

/// Engine that runs Dockerfiles in a daemon; `RUN` has no network.
pub struct DockerEngine {
    /// Client for short calls.
    client: Docker,
    /// Client for builds and other long responses.
    streaming: Docker,
    description: String,
    /// Notes about runs that may have left containers or images; `None` if nothing is built.
    notes: Option<Notes>,
}

/// Identity of one run in the engine.
struct Run {
    id: String,
    nonce: String,
    /// Whether the builder was disconnected before it finished; it may still create one more container or image.
    unobserved: AtomicBool,
    note: Option<Note>,
}

impl Run {
    fn new(id: &str) -> Self {
        // The standard library seeds its hasher keys from the system's randomness.
        let nonce = format!("{id}-{:016x}", RandomState::new().hash_one(std::process::id()));
        Self { id: id.to_owned(), nonce, unobserved: AtomicBool::new(false), note: None }
    }

    /// A run of a process that has ended. Its builder may still be working.
    fn abandoned(nonce: String, note: Note) -> Self {
        Self { id: nonce.clone(), nonce, unobserved: AtomicBool::new(true), note: Some(note) }
    }
}

impl DockerEngine {
    /// Connects and negotiates the API version. `address` is `unix://PATH` or `tcp://HOST:PORT`. `notes` is the directory
    /// for notes about runs that may leave containers or images.
    pub(super) async fn connect(address: &str, notes: Option<&Path>) -> Result<Self, String> {
        let seconds = CONNECT_TIMEOUT.as_secs();
        let client = if address.starts_with("tcp://") || address.starts_with("http://") {
            Docker::connect_with_http(address, seconds, API_DEFAULT_VERSION)
        } else if let Some(path) = address.strip_prefix("unix://") {
            Docker::connect_with_unix(path, seconds, API_DEFAULT_VERSION)
        } else {
            return Err("only unix:// and tcp:// addresses are supported".to_owned());
        };
        let describe_error = |error: Error| match error {
            Error::SocketNotFoundError(_) => "no such socket".to_owned(),
            error => root_cause(&error),
        };
        let client = client.map_err(describe_error)?.negotiate_version().await.map_err(describe_error)?;
        let version = client.version().await.map_err(describe_error)?;
        let is_podman = version.components.iter().flatten().any(|part| part.name.contains("Podman"));
        let name = if is_podman { "podman" } else { "docker" };
        Ok(Self {
            description: format!("{name} {} at {address}", version.version.unwrap_or_default()),
            streaming: client.clone().with_timeout(STREAM_TIMEOUT),
            client: client.with_timeout(CALL_TIMEOUT),
            notes: notes.map(|directory| notes_of(directory, address)),
        })
    }

    /// Begins a run. First removes the leftovers of abandoned runs, because the daemon is reachable now.
    async fn begin(&self, id: &str) -> Result<Run> {
        let mut run = Run::new(id);
        if let Some(notes) = &self.notes {
            for (nonce, note) in notes.abandoned() {
                self.clean(Run::abandoned(nonce, note)).await;
            }
            run.note = Some(notes.begin(&run.nonce)?);
        }
        Ok(run)
    }

    /// Runs the Dockerfile up to the stage `target` (or all of it when empty) and returns the image ID.
    async fn build(
        &self,
        run: &Run,
        request: &BuildRequest,
        target: &str,
        labels: &[(&str, &str)],
    ) -> Result<String> {
        let mut labels = labels.to_vec();
        labels.extend([(BUILD_LABEL, run.id.as_str()), (RUN_LABEL, run.nonce.as_str())]);
        let text = dockerfile::label_stages(&request.dockerfile, &labels);
        let entries = request.context.clone();
        let abandoned = CancellationToken::new();
        let (body, writer) = bridge::stream_from_writer(abandoned.clone(), move |out| {
            context::write_tar(Some(&text), &entries, out)
        });
        // Disable the cache, which could combine a changed input with an unchanged step. Disable pulls, because base images are
        // present.
        let options = BuildImageOptions {
            dockerfile: DOCKERFILE.to_owned(),
            target: target.to_owned(),
            networkmode: Some("none".to_owned()),
            nocache: true,
            rm: true,
            forcerm: true,
            ..BuildImageOptions::default()
        };
        let mut output = Output::new(request.log.as_ref());
        let mut stream =
            pin!(self.streaming.build_image(options, None, Some(bollard::body_try_stream(body))));
        let built = loop {
            tokio::select! {
                biased;
                () = request.cancel.cancelled() => {
                    self.stop(run, stream.as_mut()).await;
                    break Err(EngineError::Canceled);
                }
                item = stream.next() => match item {
                    Some(Ok(info)) => output.process(info),
                    Some(Err(error)) => break Err(output.failure(error)),
                    None => break output.image(),
                }
            }
        };
        if built.as_ref().is_err_and(EngineError::is_transient) {
            run.unobserved.store(true, Ordering::Relaxed);
        }
        // A daemon may neither read the context nor disconnect. The HTTP client then keeps the body, even without `stream`.
        abandoned.cancel();
        // If the context could not be read, that error caused the daemon's error and explains the failure better.
        match writer.await {
            Ok(Err(error))
                if built.is_err() && !request.cancel.is_cancelled() && !is_send_failure(&error) =>
            {
                Err(error)
            }
            _ => built,
        }
    }

    /// Stops a build gracefully: removes its step's container, so that the step fails and the builder finishes while its
    /// response is still read. Only a builder that does not stop is disconnected, because it would continue unobserved up to
    /// the next boundary between steps.
    async fn stop<S: futures::Stream + Unpin>(&self, run: &Run, mut stream: S) {
        let deadline = tokio::time::Instant::now() + CANCEL_GRACE;
        loop {
            let removal = tokio::time::timeout_at(deadline, self.remove_containers(run)).await;
            if let Ok(Err(error)) = removal {
                tracing::debug!(error = %error_chain(&error), "cannot remove containers of a canceled build yet");
            }
            let pause = (tokio::time::Instant::now() + Duration::from_millis(100)).min(deadline);
            match tokio::time::timeout_at(pause, async { while stream.next().await.is_some() {} }).await {
                Ok(()) => return,
                Err(_) if tokio::time::Instant::now() >= deadline => {
                    run.unobserved.store(true, Ordering::Relaxed);
                    return;
                }
                Err(_) => {}
            }
        }
    }

    async fn export_payload(&self, run: &Run, request: &BuildRequest, dest: &Path) -> Result<()> {
        let image = self.build(run, request, "modules", &[]).await?;
        // This container is never started. Docker's API gives access to an image's files only through a container.
        let body = ContainerCreateBody {
            image: Some(image),
            cmd: Some(vec!["/none".to_owned()]),
            labels: Some(HashMap::from([(RUN_LABEL.to_owned(), run.nonce.clone())])),
            network_disabled: Some(true),
            ..ContainerCreateBody::default()
        };
        let container = self
            .client
            .create_container(None::<CreateContainerOptions>, body)
            .await
            .map_err(fault("open the modules stage"))?;
        let options = DownloadFromContainerOptions { path: "/out".to_owned() };
        let stream = self.streaming.download_from_container(&container.id, Some(options));
        bridge::unpack_out(stream, dest, &request.cancel, |error| match error {
            Error::DockerResponseServerError { status_code: 404, .. } => EngineError::no_out(),
            error => fault("read the payload")(error),
        })
        .await
        .map_err(transfer_error)
    }

    async fn export_archive(&self, run: &Run, request: &BuildRequest, dest: &Path) -> Result<()> {
        let image = self.build(run, request, "", &[]).await?;
        bridge::save(self.streaming.export_image(&image), dest, &request.cancel, fault("export the image"))
            .await
            .map_err(transfer_error)
    }

    async fn tag_build(&self, run: &Run, request: &BuildRequest, name: &str) -> Result<()> {
        let image = self.build(run, request, "", &[(CACHE_LABEL, "base")]).await?;
        let (repo, tag) = split_tag(name);
        let options =
            TagImageOptions { repo: Some(repo.to_owned()), tag: Some(tag.unwrap_or("latest").to_owned()) };
        self.client.tag_image(&image, Some(options)).await.map_err(fault("tag the image"))
    }

    /// Makes and tags an image within [`IMAGE_TIMEOUT`].
    async fn tag_build_in_time(&self, run: &Run, request: &BuildRequest, name: &str) -> Result<()> {
        let cancel = request.cancel.child_token();
        let request = BuildRequest { cancel: cancel.clone(), ..request.clone() };
        let mut build = pin!(self.tag_build(run, &request, name));
        if let Ok(result) = timeout(IMAGE_TIMEOUT, build.as_mut()).await {
            return result;
        }
        // Stop the build gracefully, instead of dropping it.
        cancel.cancel();
        build.await.map_err(|_| EngineError::engine(EngineKind::Docker, "build", timed_out()))
    }

    /// Removes the containers and images of a run, except for a kept image. A failure only logs a warning, because the run's own
    /// outcome matters more. The next run tries again.
    async fn clean(&self, run: Run) {
        match self.sweep(&run).await {
            Ok(()) => run.note.into_iter().for_each(Note::remove),
            Err(error) => {
                tracing::warn!(build = %run.id, error = %error_chain(&error), "containers or images of this build remain in the engine; the next build removes them");
            }
        }
    }
}

/// Operations for other modules.
impl DockerEngine {
    /// Returns the engine, its version and its address in one line, for display.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Whether a local image of this name exists.
    pub async fn has_image(&self, name: &str) -> Result<bool> {
        match self.client.inspect_image(name).await {
            Ok(_) => Ok(true),
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => Ok(false),
            Err(error) => Err(fault("look for an image")(error)),
        }
    }

    /// Writes a local image to `dest` as a `docker save` archive. Returns `false` if no image has this name.
    pub async fn export_image(&self, name: &str, dest: &Path, cancel: &CancellationToken) -> Result<bool> {
        // Export by ID, because a name without a tag selects every tag.
        let id = match self.client.inspect_image(name).await {
            Ok(image) => image.id.unwrap_or_else(|| name.to_owned()),
            Err(Error::DockerResponseServerError { status_code: 404, .. }) => return Ok(false),
            Err(error) => return Err(fault("look for an image")(error)),
        };
        bridge::save(self.streaming.export_image(&id), dest, cancel, fault("export the image")).await?;
        Ok(true)
    }

    /// Pulls an image from its registry into the engine.
    pub async fn pull(&self, reference: &str, credentials: Option<&Credentials>) -> Result<()> {
        // Without a tag the daemon would pull every tag.
        let from = match split_tag(reference) {
            (_, Some(_)) => reference.to_owned(),
            (repo, None) if repo.contains('@') => reference.to_owned(),
            (repo, None) => format!("{repo}:latest"),
        };
        let options = CreateImageOptions { from_image: Some(from), ..CreateImageOptions::default() };
        let credentials = credentials.map(|Credentials { username, password }| DockerCredentials {
            username: Some(username.clone()),
            password: Some(password.clone()),
            ..DockerCredentials::default()
        });
        let mut stream = pin!(self.streaming.create_image(Some(options), None, credentials));
        let failed = |message: String| EngineError::from_pull(EngineKind::Docker, reference, message);
        let pull = async {
            while let Some(step) = stream.next().await {
                step.map_err(|error| failed(error_chain(&error)))?;
            }
            Ok::<_, EngineError>(())
        };
        timeout(IMAGE_TIMEOUT, pull).await.unwrap_or_else(|_| Err(failed(timed_out())))
    }

    /// Runs the Dockerfile and keeps its final image under a local name, labeled `farrier.dev/cache=base`.
    pub async fn build_image(&self, request: &BuildRequest, name: &str) -> Result<()> {
        let run = self.begin(&request.id).await?;
        let result = self.tag_build_in_time(&run, request, name).await;
        self.clean(run).await;
        result
    }

    /// Runs the Dockerfile's `modules` stage, unpacks its `/out` into the empty directory `dest`, and leaves nothing in the
    /// engine.
    pub async fn build_payload(&self, request: &BuildRequest, dest: &Path) -> Result<()> {
        let run = self.begin(&request.id).await?;
        let result = self.export_payload(&run, request, dest).await;
        self.clean(run).await;
        result
    }

    /// Runs the whole Dockerfile, writes its final image to `dest` as a `docker save` archive, and leaves nothing in the
    /// engine.
    pub async fn build_archive(&self, request: &BuildRequest, dest: &Path) -> Result<()> {
        let run = self.begin(&request.id).await?;
        let result = self.export_archive(&run, request, dest).await;
        self.clean(run).await;
        result
    }
}

/// Notes for the daemon at an address, in a subdirectory of the directory for all daemons.
fn notes_of(directory: &Path, address: &str) -> Notes {
    Notes::in_directory(directory.join(&Digest::of(address.as_bytes()).hex()[..16]))
}

/// Error of a transfer. The steps have ended: if their deadline passes during the transfer, the daemon is late.
fn transfer_error(error: EngineError) -> EngineError {
    match error {
        EngineError::Canceled => EngineError::engine(
            EngineKind::Docker,
            "send the result",
            "build.deadline passed after the steps ended: raise it if this repeats",
        ),
        error => error,
    }
}

fn timed_out() -> String {
    format!("it is not done after {} minutes", IMAGE_TIMEOUT.as_secs() / 60)
}

/// Converts an error of the daemon.
fn fault(action: &'static str) -> impl Fn(Error) -> EngineError {
    move |error| EngineError::engine(EngineKind::Docker, action, error)
}

/// Message of the innermost cause; the HTTP client's outer messages only name its own layers.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Whether the writer of the context failed only because the daemon disconnected.
fn is_send_failure(error: &EngineError) -> bool {
    matches!(error, EngineError::Io(source) if source.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Splits an image's name from its tag, which follows a colon after the last slash.
fn split_tag(name: &str) -> (&str, Option<&str>) {
    let start = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[start..].split_once(':') {
        Some((last, tag)) if !last.contains('@') => (&name[..start + last.len()], Some(tag)),
        _ => (name, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_told_from_ports_and_digests() {
        assert_eq!(split_tag("localhost:5000/a/b"), ("localhost:5000/a/b", None));
        assert_eq!(split_tag("localhost:5000/a/b:1"), ("localhost:5000/a/b", Some("1")));
        assert_eq!(split_tag("b:1"), ("b", Some("1")));
        assert_eq!(split_tag("r/b@sha256:00"), ("r/b@sha256:00", None));
    }

    #[test]
    fn runs_of_one_job_differ() {
        let (a, b) = (Run::new("job"), Run::new("job"));
        assert_ne!(a.nonce, b.nonce);
        assert!(a.nonce.starts_with("job-"));
    }
}

#[cfg(test)]
#[path = "dead_runs_tests.rs"]
mod dead_runs_tests;
