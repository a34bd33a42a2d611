//! Reads the messages of a build in a pod through the API server. After a disconnect it resumes at the same offset.

use std::{io, time::Duration};

use farrier_cluster::kube::causes;
use futures::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{AttachParams, AttachedProcess},
    client::UpgradeConnectionError,
};
use runner::{
    pod::{HEARTBEAT, RUNNER},
    wire::{Message, decode},
};
use tokio::{
    io::{AsyncRead, BufReader},
    time::{Instant, sleep, timeout},
};

use super::{
    Kubernetes, fault,
    job::CONTAINER,
    wait::{Wait, missing_permission},
};
use crate::{
    EngineError, Result,
    runner_session::{MessageSource, read_frame},
};

/// Timeout of a silent connection, which counts as dead because the runner sends heartbeats.
const SILENCE: Duration = Duration::from_secs(6 * HEARTBEAT.as_secs());
/// Shortest and longest pause between two attempts to reach the runner.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Buffer size of a connection, in bytes.
const BUFFER: usize = 256 << 10;

/// Connection to a `follow` process in the pod.
struct Connection {
    output: BufReader<Box<dyn AsyncRead + Unpin + Send>>,
    /// Resolves when the process or the connection has ended; kube's reader does not report that.
    end: BoxFuture<'static, ()>,
    _process: AttachedProcess,
}

/// Message source for one build.
pub(super) struct Follower<'a> {
    pods: Api<Pod>,
    wait: Wait<'a>,
    /// Name of the pod, once it has run.
    pod: Option<String>,
    /// Whether the pod ran when farrier last looked.
    is_running: bool,
    connection: Option<Connection>,
    /// Time of the last frame, or of the pod's start.
    last_frame: Option<Instant>,
    /// Error of the last connection that failed.
    pub(super) last_error: Option<String>,
    /// Number of bytes read, in complete frames.
    offset: u64,
    pause: Duration,
}

/// Reason why a connection yields no frame.
enum ReadError {
    /// The connection failed or was closed; a retry may succeed.
    Connection(io::Error),
    /// The cluster denies farrier the access.
    Refused(EngineError),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Connection(error)
    }
}

impl<'a> Follower<'a> {
    pub(super) fn new(engine: &Kubernetes, namespace: &str, wait: Wait<'a>) -> Self {
        let pods = Api::namespaced(engine.client.clone(), namespace);
        Self {
            pods,
            wait,
            pod: None,
            is_running: false,
            connection: None,
            last_frame: None,
            last_error: None,
            offset: 0,
            pause: MIN_PAUSE,
        }
    }

    /// Whether the runner's heartbeats have not arrived for so long that the connection to the pod is lost.
    pub(super) fn is_silent(&self) -> bool {
        self.last_frame.is_some_and(|last| last.elapsed() > SILENCE)
    }

    /// Reads the next frame. Connects first if there is no connection.
    async fn read(&mut self) -> Result<Vec<u8>, ReadError> {
        if self.connection.is_none() {
            let name = self.pod.as_deref().unwrap_or_default();
            let params =
                AttachParams::default().container(CONTAINER).stderr(false).max_stdout_buf_size(BUFFER);
            let command = [RUNNER.to_owned(), "follow".to_owned(), self.offset.to_string()];
            let follow = self.pods.exec(name, command, &params);
            let opened = timeout(SILENCE, follow).await.map_err(io::Error::from)?;
            let mut process = opened.map_err(|error| exec_error(&error))?;
            let output = process.stdout().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
            let status = process.take_status().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
            self.connection = Some(Connection {
                output: BufReader::with_capacity(BUFFER, Box::new(output)),
                end: status.map(drop).boxed(),
                _process: process,
            });
        }
        let Some(Connection { output, end, .. }) = &mut self.connection else { return Err(disconnected()) };
        tokio::select! {
            biased;
            frame = timeout(SILENCE, read_frame(output)) => Ok(frame.map_err(io::Error::from)??),
            () = end => Err(disconnected()),
        }
    }
}

impl MessageSource for Follower<'_> {
    async fn next(&mut self) -> Result<Message> {
        loop {
            if !self.is_running {
                let pod = self.wait.until_running().await?;
                // The offset counts bytes of the first pod's messages, and is no offset in the messages of another pod.
                if let Some(first) = self.pod.as_ref().filter(|first| self.offset > 0 && **first != pod) {
                    return Err(replaced(first, &pod));
                }
                (self.pod, self.is_running) = (Some(pod), true);
                self.last_frame.get_or_insert_with(Instant::now);
            }
            let outcome = self.read().await;
            if outcome.is_ok() {
                self.last_frame = Some(Instant::now());
            }
            match outcome {
                Ok(frame) if frame.is_empty() => {}
                Ok(frame) => {
                    self.offset += 4 + frame.len() as u64;
                    self.pause = MIN_PAUSE;
                    return decode(&frame).map_err(|error| fault("decode a message of a build", error));
                }
                Err(ReadError::Refused(error)) => return Err(error),
                Err(ReadError::Connection(error)) => {
                    tracing::debug!(pod = self.pod, offset = self.offset, %error, "the connection to the pod of a build failed");
                    // The pod may be gone; if it still runs, the next round reconnects.
                    (self.connection, self.is_running) = (None, false);
                    // Tell the user once, before the pause reaches its maximum.
                    if (MAX_PAUSE / 2..MAX_PAUSE).contains(&self.pause) {
                        tracing::warn!(pod = self.pod, %error, "farrier cannot reach the pod of a build, and keeps trying");
                    }
                    self.last_error = Some(error.to_string());
                    sleep(self.pause).await;
                    self.pause = (2 * self.pause).min(MAX_PAUSE);
                }
            }
        }
    }
}

/// Error for a pod that the cluster replaced, with its messages, during the build.
fn replaced(first: &str, second: &str) -> EngineError {
    EngineError::Pod {
        message: format!("pod {first} ended without a result: the cluster replaced it by pod {second}"),
        hint: "farrier retries automatically".to_owned(),
        is_transient: true,
    }
}

fn disconnected() -> ReadError {
    ReadError::Connection(io::ErrorKind::ConnectionAborted.into())
}

fn exec_error(error: &kube::Error) -> ReadError {
    let is_forbidden = matches!(
        error,
        kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) if matches!(status.as_u16(), 401 | 403)
    );
    if is_forbidden {
        return ReadError::Refused(missing_permission("`get` and `create` of pods/exec"));
    }
    ReadError::Connection(io::Error::other(causes(error)))
}
