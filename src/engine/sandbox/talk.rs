//! Adapter: the conversation with the runner of one sandbox.

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
use crate::engine::{
    ContextEntry, EngineError, Result,
    bridge::stream_from_writer,
    context,
    hearing::{Source, read_frame},
};

/// One runner, which is given its build when it asks for it.
pub(super) struct Talk<'a> {
    owner: Owner,
    /// The runner's process.
    runner: u32,
    plan: &'a Plan,
    context: &'a [ContextEntry],
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl<'a> Talk<'a> {
    /// Says where the sandbox is to be made.
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

    /// The one user of the sandbox: root in there.
    fn maps(&self) -> io::Result<()> {
        for (file, text) in self.owner.maps() {
            fs_err::write(format!("/proc/{}/{file}", self.runner), text)?;
        }
        Ok(())
    }

    /// The plan and the context. A runner that has ended by itself says why: that it reads no more is no news.
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

impl Source for Talk<'_> {
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
