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
    pod::{BEAT, RUNNER},
    wire::{Message, decode},
};
use tokio::{
    io::{AsyncRead, BufReader},
    time::{sleep, timeout},
};

use super::{
    Kubernetes, fault,
    job::CONTAINER,
    wait::{Wait, missing_right},
};
use crate::{
    EngineError, Result,
    runner_session::{Source, read_frame},
};

/// Timeout of a silent connection, which counts as dead because the runner sends heartbeats.
const SILENCE: Duration = Duration::from_secs(6 * BEAT.as_secs());
/// First and longest pause between two attempts to reach the runner.
const PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];
/// Buffer size of a connection, in bytes.
const BUFFER: usize = 256 << 10;

/// Connection to a `follow` process in the pod.
struct Line {
    output: BufReader<Box<dyn AsyncRead + Unpin + Send>>,
    /// Resolves when the process or the connection has ended; kube's reader does not report that.
    end: BoxFuture<'static, ()>,
    _process: AttachedProcess,
}

/// Message source for one build.
pub(super) struct Follower<'a> {
    pods: Api<Pod>,
    wait: Wait<'a>,
    /// Name of the pod, once it runs.
    pod: Option<String>,
    line: Option<Line>,
    /// Number of bytes read, in complete frames.
    place: u64,
    pause: Duration,
}

/// Reason why a connection yields no frame.
enum Cut {
    /// The connection failed or was cut; a retry may succeed.
    Line(io::Error),
    /// The cluster denies farrier the access.
    Refused(EngineError),
}

impl From<io::Error> for Cut {
    fn from(error: io::Error) -> Self {
        Self::Line(error)
    }
}

impl<'a> Follower<'a> {
    pub(super) fn new(engine: &Kubernetes, namespace: &str, wait: Wait<'a>) -> Self {
        let pods = Api::namespaced(engine.client.clone(), namespace);
        Self { pods, wait, pod: None, line: None, place: 0, pause: PAUSES[0] }
    }

    /// Reads the next frame. Connects first if there is no connection.
    async fn read(&mut self) -> Result<Vec<u8>, Cut> {
        if self.line.is_none() {
            let name = self.pod.as_deref().unwrap_or_default();
            let params =
                AttachParams::default().container(CONTAINER).stderr(false).max_stdout_buf_size(BUFFER);
            let command = [RUNNER.to_owned(), "follow".to_owned(), self.place.to_string()];
            let follow = self.pods.exec(name, command, &params);
            let opened = timeout(SILENCE, follow).await.map_err(io::Error::from)?;
            let mut process = opened.map_err(|error| refusal(&error))?;
            let output = process.stdout().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
            let status = process.take_status().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
            self.line = Some(Line {
                output: BufReader::with_capacity(BUFFER, Box::new(output)),
                end: status.map(drop).boxed(),
                _process: process,
            });
        }
        let Some(Line { output, end, .. }) = &mut self.line else { return Err(cut()) };
        tokio::select! {
            biased;
            frame = timeout(SILENCE, read_frame(output)) => Ok(frame.map_err(io::Error::from)??),
            () = end => Err(cut()),
        }
    }
}

impl Source for Follower<'_> {
    async fn next(&mut self) -> Result<Message> {
        loop {
            if self.pod.is_none() {
                self.pod = Some(self.wait.until_running().await?);
            }
            match self.read().await {
                Ok(frame) if frame.is_empty() => {}
                Ok(frame) => {
                    self.place += 4 + frame.len() as u64;
                    self.pause = PAUSES[0];
                    return decode(&frame).map_err(|error| fault("read what a build says", error));
                }
                Err(Cut::Refused(error)) => return Err(error),
                Err(Cut::Line(error)) => {
                    tracing::debug!(pod = self.pod, place = self.place, %error, "the line to a build was cut");
                    // The pod may be gone; if it still runs, the next round reconnects.
                    (self.line, self.pod) = (None, None);
                    sleep(self.pause).await;
                    self.pause = (2 * self.pause).min(PAUSES[1]);
                }
            }
        }
    }
}

fn cut() -> Cut {
    Cut::Line(io::ErrorKind::ConnectionAborted.into())
}

fn refusal(error: &kube::Error) -> Cut {
    let is_forbidden = matches!(
        error,
        kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) if matches!(status.as_u16(), 401 | 403)
    );
    if is_forbidden {
        return Cut::Refused(missing_right("`get` and `create` of pods/exec"));
    }
    Cut::Line(io::Error::other(causes(error)))
}
