//! Processes the messages of an in-place build's runner, from the first to the last: output, payload and outcome.

use std::{io, path::Path};

use bytes::Bytes;
use farrier_core::provenance::Confinement;
use futures::{SinkExt as _, channel::mpsc};
use runner::{
    plan::Plan,
    wire::{self, Canary, Message, Outcome},
};
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio_util::sync::CancellationToken;

use super::{
    BuildLog, EngineError, EngineKind, Result, bridge::unpack_out, lines::LineSplitter, protocol::Protocol,
};

/// Maximum number of payload messages in flight.
const MAX_PAYLOAD_MESSAGES: usize = 8;

/// Source of a runner's messages.
pub(super) trait MessageSource {
    /// Returns the next message. After an error no message follows.
    async fn next(&mut self) -> Result<Message>;
}

/// Settings of the session with the runner of one build.
pub(super) struct RunnerSession<'a> {
    pub(super) engine: EngineKind,
    pub(super) plan: &'a Plan,
    pub(super) log: &'a dyn BuildLog,
    /// Lowest Landlock ABI that the site accepts.
    pub(super) min_landlock_abi: u32,
    pub(super) cancel: &'a CancellationToken,
}

/// Sender of a payload's bytes to the unpacking task.
type Payload = mpsc::Sender<Result<Bytes, io::Error>>;

impl RunnerSession<'_> {
    /// Processes messages up to the last one, and unpacks the payload into `dest`. Returns the confinement of the build.
    pub(super) async fn run(&self, source: &mut impl MessageSource, dest: &Path) -> Result<Confinement> {
        let (sender, payload) = mpsc::channel(MAX_PAYLOAD_MESSAGES);
        // A payload is complete only when the runner confirms it: any other end stops the unpacking.
        let stop = self.cancel.child_token();
        let session = async {
            let outcome = tokio::select! {
                biased;
                () = stop.cancelled() => Err(EngineError::Canceled),
                outcome = self.process(source, sender) => outcome,
            };
            if outcome.is_err() {
                stop.cancel();
            }
            outcome
        };
        match tokio::join!(session, unpack_out(payload, dest, &stop, EngineError::Io)) {
            // The unpacking task refused the payload during the transfer.
            (Err(EngineError::Canceled), Err(error)) if !self.cancel.is_cancelled() => Err(error),
            (outcome, unpacked) => outcome.and_then(|confinement| unpacked.map(|()| confinement)),
        }
    }

    async fn process(&self, source: &mut impl MessageSource, mut payload: Payload) -> Result<Confinement> {
        let mut splitter = LineSplitter::default();
        let (mut size, mut hash) = (0, Sha256::new());
        let mut confinement = Confinement::default();
        let mut protocol = Protocol::new(self.plan.steps.len());
        loop {
            let message = source.next().await?;
            protocol.accept(&message).map_err(EngineError::Tampered)?;
            match message {
                Message::Unshared => {}
                Message::Canary(canary) => confinement = self.check_confinement(canary)?,
                Message::Step(step) => {
                    splitter.finish(|line| self.log.line(line));
                    let steps = self.plan.steps.len();
                    self.log.line(&format!("Step {}/{steps} : {}", u64::from(step) + 1, self.text(step)));
                }
                Message::Output(bytes) => splitter.feed(&bytes, |line| self.log.line(line)),
                Message::Payload(bytes) => {
                    size += bytes.len() as u64;
                    hash.update(&bytes);
                    payload.send(Ok(bytes.into())).await.map_err(|_| EngineError::Canceled)?;
                }
                Message::End(outcome) => {
                    splitter.finish(|line| self.log.line(line));
                    let received = Outcome::Done { size, sha256: hash.finalize().into() };
                    return self.check_outcome(outcome, &received).map(|()| confinement);
                }
            }
        }
    }

    fn check_confinement(&self, Canary { refused, landlock }: Canary) -> Result<Confinement> {
        if landlock < self.min_landlock_abi {
            return Err(EngineError::Unconfined(format!(
                "the site requires Landlock ABI {}, and the kernel here has {landlock}",
                self.min_landlock_abi
            )));
        }
        Ok(Confinement { refused, landlock, ..Confinement::default() })
    }

    fn check_outcome(&self, outcome: Outcome, received: &Outcome) -> Result<()> {
        match outcome {
            Outcome::Done { .. } if outcome == *received => Ok(()),
            Outcome::Done { .. } => Err(self.fault("receive the payload", damaged())),
            Outcome::Failed { step, why } => {
                Err(EngineError::Step(format!("{}: {why}", shortened(self.text(step)))))
            }
            Outcome::MemoryLimit { step, why } => {
                Err(EngineError::MemoryLimit(format!("{}: {why}", shortened(self.text(step)))))
            }
            Outcome::FixedLimit { step, why } => {
                Err(EngineError::FixedLimit(format!("{}: {why}", shortened(self.text(step)))))
            }
            Outcome::DiskFull { step, why } => {
                let action = format!("run {}", shortened(self.text(step)));
                Err(EngineError::DiskFull { engine: self.engine, action, message: why })
            }
            Outcome::Broken(why) => Err(self.fault("run a build", io::Error::other(why))),
        }
    }

    fn fault(&self, action: &str, source: io::Error) -> EngineError {
        EngineError::engine(self.engine, action, source)
    }

    fn text(&self, step: u32) -> &str {
        let step = usize::try_from(step).ok().and_then(|step| self.plan.steps.get(step));
        step.map_or("a step", |step| &step.text)
    }
}

/// Shortens the text of a step, which in a template may be a script of a hundred lines. The log contains all of it.
fn shortened(text: &str) -> String {
    const CHARS: usize = 80;
    match text.char_indices().nth(CHARS) {
        Some((end, _)) => format!("{} ...", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// Reads one frame.
pub(super) async fn read_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await?;
    let mut bytes = vec![0; wire::checked_length(length)?];
    from.read_exact(&mut bytes).await?;
    Ok(bytes)
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the received payload differs from the sent payload")
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    impl BuildLog for () {
        fn line(&self, _: &str) {}
    }

    impl MessageSource for vec::IntoIter<Message> {
        async fn next(&mut self) -> Result<Message> {
            Iterator::next(self).ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof).into())
        }
    }

    /// Result for a runner that sends `payload`, with or without an end message.
    async fn heard(payload: &[u8], end: Option<Outcome>) -> (Result<Confinement>, usize) {
        let canary = Canary { refused: vec!["a disk".to_owned()], landlock: 2 };
        let mut messages = vec![Message::Canary(canary), Message::Payload(payload.to_vec())];
        messages.extend(end.map(Message::End));
        hear(messages, 0).await
    }

    async fn hear(messages: Vec<Message>, min_landlock_abi: u32) -> (Result<Confinement>, usize) {
        let dest = tempfile::tempdir().unwrap();
        let (plan, cancel) = (Plan::default(), CancellationToken::new());
        let session = RunnerSession {
            engine: EngineKind::Kubernetes,
            plan: &plan,
            log: &(),
            min_landlock_abi,
            cancel: &cancel,
        };
        let heard = session.run(&mut messages.into_iter(), dest.path()).await;
        (heard, dest.path().read_dir().unwrap().count())
    }

    #[tokio::test]
    async fn what_is_not_of_the_stated_digest_and_length_is_refused_whole() {
        let mut archive = tar::Builder::new(Vec::new());
        archive.append_dir("out", "/").unwrap();
        let mut header = tar::Header::new_gnu();
        header.set_size(3);
        header.set_mode(0o644);
        archive.append_data(&mut header, "out/a.ko", &b"ELF"[..]).unwrap();
        let payload = archive.into_inner().unwrap();
        let (size, sha256) = (payload.len() as u64, Sha256::digest(&payload).into());
        let (whole, entries) = heard(&payload, Some(Outcome::Done { size, sha256 })).await;
        let confined =
            Confinement { refused: vec!["a disk".to_owned()], landlock: 2, ..Confinement::default() };
        assert_eq!((whole.unwrap(), entries), (confined, 1));
        for lie in [
            Outcome::Done { size, sha256: [0; 32] },
            Outcome::Done { size: size + 1, sha256 },
            Outcome::Broken("it was".to_owned()),
        ] {
            let (refused, entries) = heard(&payload, Some(lie)).await;
            assert_eq!((refused.is_err(), entries), (true, 0));
        }
        let (cut, entries) = heard(&payload, None).await;
        assert_eq!((cut.is_err(), entries), (true, 0));
    }

    #[tokio::test]
    async fn a_build_without_the_required_restrictions_does_not_begin() {
        let canary = Canary { refused: vec!["a disk".to_owned()], landlock: 2 };
        let (refused, entries) = hear(vec![Message::Canary(canary)], 3).await;
        let error = refused.unwrap_err();
        assert_eq!(
            error.to_string(),
            "build refused: the site requires Landlock ABI 3, and the kernel here has 2"
        );
        assert!(!error.is_transient() && error.hint().is_some() && entries == 0);
    }

    #[tokio::test]
    async fn a_forged_message_ends_the_build() {
        let canary = || Message::Canary(Canary { refused: vec!["a disk".to_owned()], landlock: 2 });
        let (refused, entries) = hear(vec![canary(), canary()], 0).await;
        let error = refused.unwrap_err();
        assert!(matches!(error, EngineError::Tampered(_)) && !error.is_transient(), "{error}");
        assert_eq!(entries, 0);
    }

    #[test]
    fn a_long_step_is_told_by_its_beginning() {
        assert_eq!(shortened("RUN make"), "RUN make");
        assert_eq!(shortened(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(shortened(&format!("RUN {}", "x".repeat(100))), format!("RUN {} ...", "x".repeat(76)));
    }
}
