//! Handles signals: the first one asks a command to stop and clean up, the second one ends the process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{args::LogFormat, output};

/// Waits for the next signal. Returns whether the signal was SIGTERM.
async fn next_is_sigterm(interrupt: &mut Signal, terminate: &mut Signal) -> bool {
    tokio::select! {
        _ = interrupt.recv() => false,
        _ = terminate.recv() => true,
    }
}

/// Stop request for a command.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    pub cancel: CancellationToken,
    terminated: Arc<AtomicBool>,
}

impl Stop {
    /// Whether SIGTERM, the signal that stops a service, caused the stop rather than Ctrl-C.
    pub fn is_termination(&self) -> bool {
        self.terminated.load(Ordering::Acquire)
    }

    /// The first Ctrl-C or SIGTERM asks the command to stop and clean up; the second ends the process.
    pub fn on_signals(&self, log_format: LogFormat) {
        let stop = self.clone();
        let (Ok(mut interrupt), Ok(mut terminate)) =
            (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
        else {
            tracing::warn!("signals cannot be caught; an interrupted build may leave containers behind");
            return;
        };
        tokio::spawn(async move {
            let terminated = next_is_sigterm(&mut interrupt, &mut terminate).await;
            match log_format {
                LogFormat::Text => {
                    output::message("stopping: cleaning up (interrupt again to stop at once)");
                }
                LogFormat::Json => tracing::info!("stopping: cleaning up"),
            }
            stop.terminated.store(terminated, Ordering::Release);
            stop.cancel.cancel();
            next_is_sigterm(&mut interrupt, &mut terminate).await;
            std::process::exit(130);
        });
    }
}
