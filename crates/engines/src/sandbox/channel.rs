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

use super::{Owner, fault};
use crate::{
    ContextEntry, EngineError, Result,
    bridge::stream_from_writer,
    context,
    runner_session::{Source, read_frame},
};

/// Connection to one runner, which requests its plan and context after it has created its namespaces.
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
        place: &wire::Sandbox,
        (plan, context): (&'a Plan, &'a [ContextEntry]),
        (mut stdin, stdout): (ChildStdin, ChildStdout),
    ) -> Result<Self> {
        let place = wire::frame(place).map_err(silent)?;
        stdin.write_all(&place).await.map_err(silent)?;
        let stdout = BufReader::with_capacity(256 << 10, stdout);
        Ok(Self { owner, runner, plan, context, stdin: Some(stdin), stdout })
    }

    /// Writes the UID and GID maps, which make the sandbox's only user root inside.
    fn maps(&self) -> io::Result<()> {
        for (file, text) in self.owner.id_map_files() {
            fs_err::write(format!("/proc/{}/{file}", self.runner), text)?;
        }
        Ok(())
    }

    /// Sends the plan and the context. Ignores write errors: a runner that ended early reports the reason itself.
    async fn hand_in(&self, mut stdin: ChildStdin) -> Result<()> {
        let entries = self.context.to_vec();
        let (context, writer) = stream_from_writer(move |out| context::write_tar(None, &entries, out));
        let mut context = Box::pin(context);
        let hand_in = async {
            stdin.write_all(b".").await?;
            stdin.write_all(&wire::frame(self.plan)?).await?;
            while let Some(chunk) = context.next().await {
                stdin.write_all(&chunk?).await?;
            }
            stdin.shutdown().await
        };
        let _: io::Result<()> = hand_in.await;
        drop((context, stdin));
        match writer.await.map_err(io::Error::from)? {
            Err(EngineError::Io(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Ok(()),
        }
    }
}

impl Source for SandboxChannel<'_> {
    async fn next(&mut self) -> Result<Message> {
        loop {
            let frame = read_frame(&mut self.stdout).await;
            let message = frame.and_then(|frame| wire::decode(&frame)).map_err(silent)?;
            match (&message, self.stdin.take()) {
                (Message::Unshared, Some(stdin)) => {
                    self.maps().map_err(|source| fault("map users", source))?;
                    self.hand_in(stdin).await?;
                }
                (_, stdin) => {
                    self.stdin = stdin;
                    return Ok(message);
                }
            }
        }
    }
}

fn silent(source: io::Error) -> EngineError {
    fault("run a build", source)
}
