//! The farrier side of the wire protocol with the runner of one sandbox.

use std::io;

use futures::StreamExt as _;
use runner::{
    plan::Plan,
    wire::{self, Message},
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    process::{ChildStdin, ChildStdout},
};
use tokio_util::sync::CancellationToken;

use super::{Owner, fault};
use crate::{
    ContextEntry, EngineError, Result,
    bridge::stream_from_writer,
    context,
    runner_session::{MessageSource, read_frame},
};

/// Connection to one runner. The runner requests the plan and the context once its namespaces exist.
pub(super) struct SandboxChannel<'a> {
    owner: Owner,
    /// Process ID of the runner.
    runner: u32,
    plan: &'a Plan,
    context: &'a [ContextEntry],
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl<'a> SandboxChannel<'a> {
    /// Starts the protocol: sends the directories of the sandbox to the runner.
    pub(super) async fn begin(
        (owner, runner): (Owner, u32),
        directories: &wire::Sandbox,
        (plan, context): (&'a Plan, &'a [ContextEntry]),
        (mut stdin, stdout): (ChildStdin, ChildStdout),
    ) -> Result<Self> {
        let frame = wire::frame(directories).map_err(runner_failed)?;
        stdin.write_all(&frame).await.map_err(runner_failed)?;
        let stdout = BufReader::with_capacity(256 << 10, stdout);
        Ok(Self { owner, runner, plan, context, stdin: Some(stdin), stdout })
    }

    /// Writes the UID and GID maps, which make the sandbox's only user root inside.
    fn write_id_maps(&self) -> io::Result<()> {
        for (file, text) in self.owner.id_map_files() {
            fs_err::write(format!("/proc/{}/{file}", self.runner), text)?;
        }
        Ok(())
    }

    /// Sends the plan and the context. Ignores write errors: a runner that ended early reports the reason itself.
    async fn send_inputs(&self, mut stdin: ChildStdin) -> Result<()> {
        let entries = self.context.to_vec();
        let (context, writer) =
            stream_from_writer(CancellationToken::new(), move |out| context::write_tar(None, &entries, out));
        let mut context = Box::pin(context);
        let send = async {
            stdin.write_all(b".").await?;
            stdin.write_all(&wire::frame(self.plan)?).await?;
            while let Some(chunk) = context.next().await {
                stdin.write_all(&chunk?).await?;
            }
            stdin.shutdown().await
        };
        let _: io::Result<()> = send.await;
        drop((context, stdin));
        match writer.await.map_err(io::Error::from)? {
            Err(EngineError::Io(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Ok(()),
        }
    }
}

impl MessageSource for SandboxChannel<'_> {
    async fn next(&mut self) -> Result<Message> {
        loop {
            let frame = read_frame(&mut self.stdout).await;
            let message = frame.and_then(|frame| wire::decode(&frame)).map_err(runner_failed)?;
            match (&message, self.stdin.take()) {
                (Message::Unshared, Some(stdin)) => {
                    self.write_id_maps().map_err(|source| fault("map users", source))?;
                    self.send_inputs(stdin).await?;
                }
                (_, stdin) => {
                    self.stdin = stdin;
                    return Ok(message);
                }
            }
        }
    }
}

fn runner_failed(source: io::Error) -> EngineError {
    fault("run a build", source)
}
