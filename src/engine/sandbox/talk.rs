//! Adapter: the conversation with one runner, from its start to its last word.

use std::{io, path::Path};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _, channel::mpsc};
use runner::{
    plan::Plan,
    wire::{self, Message, Outcome},
};
use sha2::{Digest as _, Sha256};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    process::{ChildStdin, ChildStdout},
};
use tokio_util::sync::CancellationToken;

use super::{LineSplitter, Owner, fault};
use crate::engine::{
    BuildLog, ContextEntry, EngineError,
    bridge::{stream_from_writer, unpack_out},
    context,
};

/// Messages of the payload that are under way.
const UNDER_WAY: usize = 8;

/// One build, and the runner that does it.
pub(super) struct Talk<'a> {
    pub(super) owner: Owner,
    /// The runner's process.
    pub(super) runner: u32,
    pub(super) place: wire::Sandbox,
    pub(super) plan: &'a Plan,
    pub(super) context: Vec<ContextEntry>,
    pub(super) log: &'a dyn BuildLog,
    pub(super) cancel: &'a CancellationToken,
}

/// Ends the stream of a payload: it was cut, or is not wanted any more.
type Payload = mpsc::Sender<Result<Bytes, io::Error>>;

impl Talk<'_> {
    /// Runs the build and unpacks its payload into `dest`. Gives what its canary was refused.
    pub(super) async fn run(
        self,
        stdin: ChildStdin,
        stdout: ChildStdout,
        dest: &Path,
    ) -> Result<Vec<String>, EngineError> {
        let (to, payload) = mpsc::channel(UNDER_WAY);
        // A payload is whole when the runner has said so: anything else ends its unpacking.
        let stop = self.cancel.child_token();
        let cancel = self.cancel;
        let listen = async {
            let ended = tokio::select! {
                biased;
                () = stop.cancelled() => Err(EngineError::Cancelled),
                ended = self.listen(stdin, stdout, to) => ended,
            };
            if ended.is_err() {
                stop.cancel();
            }
            ended
        };
        match tokio::join!(listen, unpack_out(payload, dest, &stop, EngineError::Io)) {
            // It was refused while it came.
            (Err(EngineError::Cancelled), Err(refused)) if !cancel.is_cancelled() => Err(refused),
            (ended, unpacked) => ended.and_then(|refused| unpacked.map(|()| refused)),
        }
    }

    /// Gives the runner what it asks for, and takes what it says, to its last word.
    async fn listen(
        self,
        mut stdin: ChildStdin,
        stdout: ChildStdout,
        mut payload: Payload,
    ) -> Result<Vec<String>, EngineError> {
        let silent = |source| fault("run a build", source);
        write_frame(&mut stdin, &self.place.encode()).await.map_err(silent)?;
        let mut stdout = BufReader::with_capacity(256 << 10, stdout);
        let mut stdin = Some(stdin);
        let mut splitter = LineSplitter::default();
        let (mut size, mut hash) = (0, Sha256::new());
        let mut refused = Vec::new();
        loop {
            let message = read_message(&mut stdout).await.map_err(silent)?;
            match message {
                Message::Unshared => {
                    let stdin = stdin.take().ok_or_else(|| fault("run a build", damaged()))?;
                    self.maps().map_err(|source| fault("map users", source))?;
                    self.hand_in(stdin).await?;
                }
                Message::Canary(what) => refused = what,
                Message::Step(step) => {
                    splitter.finish(|line| self.log.line(line));
                    let steps = self.plan.steps.len();
                    self.log.line(&format!("Step {}/{steps} : {}", step + 1, self.text(step)));
                }
                Message::Output(bytes) => splitter.feed(&bytes, |line| self.log.line(line)),
                Message::Payload(bytes) => {
                    size += bytes.len() as u64;
                    hash.update(&bytes);
                    payload.send(Ok(bytes.into())).await.map_err(|_| EngineError::Cancelled)?;
                }
                Message::End(outcome) => {
                    splitter.finish(|line| self.log.line(line));
                    let received = Outcome::Done { size, sha256: hash.finalize().into() };
                    self.judge(outcome, &received)?;
                    let without_canary = || fault("run a build", io::Error::other("it had no canary"));
                    return Some(refused).filter(|refused| !refused.is_empty()).ok_or_else(without_canary);
                }
            }
        }
    }

    /// The one user of the sandbox: root in there.
    fn maps(&self) -> io::Result<()> {
        for (file, text) in self.owner.maps() {
            fs_err::write(format!("/proc/{}/{file}", self.runner), text)?;
        }
        Ok(())
    }

    /// The plan and the context. A runner that has ended by itself says why: that it reads no more is no news.
    async fn hand_in(&self, mut stdin: ChildStdin) -> Result<(), EngineError> {
        let entries = self.context.clone();
        let (context, writer) = stream_from_writer(move |out| context::write_tar(None, &entries, out));
        let mut context = Box::pin(context);
        let hand_in = async {
            stdin.write_all(b".").await?;
            write_frame(&mut stdin, &self.plan.encode()).await?;
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

    fn judge(&self, outcome: Outcome, received: &Outcome) -> Result<(), EngineError> {
        match outcome {
            Outcome::Done { .. } if outcome == *received => Ok(()),
            Outcome::Done { .. } => Err(fault("hand out the payload", damaged())),
            Outcome::Failed { step, why } => {
                Err(EngineError::Step { message: format!("{}: {why}", shortened(self.text(step))) })
            }
            Outcome::Limit { step, why } => {
                Err(EngineError::Limit { message: format!("{}: {why}", shortened(self.text(step))) })
            }
            Outcome::Broken { why } => Err(fault("run a build", io::Error::other(why))),
        }
    }

    fn text(&self, step: u32) -> &str {
        let step = usize::try_from(step).ok().and_then(|step| self.plan.steps.get(step));
        step.map_or("a step", |step| &step.text)
    }
}

/// A step's beginning: the log has all of it, and a template's may be a script of a hundred lines.
fn shortened(text: &str) -> String {
    const CHARS: usize = 80;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{} ...", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

async fn write_frame(to: &mut ChildStdin, bytes: &[u8]) -> io::Result<()> {
    let mut frame = Vec::with_capacity(bytes.len() + 4);
    wire::write_frame(&mut frame, bytes)?;
    to.write_all(&frame).await
}

async fn read_message(from: &mut BufReader<ChildStdout>) -> io::Result<Message> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await?;
    let mut bytes = vec![0; wire::checked_length(length)?];
    from.read_exact(&mut bytes).await?;
    Message::decode(&bytes)
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what came is not what was sent")
}

#[cfg(test)]
mod tests {
    use super::shortened;

    #[test]
    fn a_long_step_is_told_by_its_beginning() {
        assert_eq!(shortened("RUN make"), "RUN make");
        assert_eq!(shortened(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(shortened(&format!("RUN {}", "x".repeat(100))), format!("RUN {} ...", "x".repeat(76)));
    }
}
