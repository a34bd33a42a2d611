//! Handles signals: the first one asks a command to stop and clean up, the second one ends the process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use tokio_util::sync::CancellationToken;

use super::{args::LogFormat, output};

/// Stop request for a command.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    pub cancel: CancellationToken,
    terminated: Arc<AtomicBool>,
}

impl Stop {
    /// Whether SIGTERM, which is how services are stopped, caused the stop, and not Ctrl-C.
    pub fn is_termination(&self) -> bool {
        self.terminated.load(Ordering::Acquire)
    }

    /// The first Ctrl-C or SIGTERM asks the command to stop and clean up; the second ends the process.
    pub fn on_signals(&self, log_format: LogFormat) {
        use tokio::signal::unix::{SignalKind, signal};
        let stop = self.clone();
        let (Ok(mut interrupt), Ok(mut terminate)) =
            (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
        else {
            tracing::warn!("signals cannot be caught; an interrupted build may leave containers behind");
            return;
        };
        tokio::spawn(async move {
            for first in [true, false] {
                let terminated = tokio::select! {
                    _ = interrupt.recv() => false,
                    _ = terminate.recv() => true,
                };
                if !first {
                    std::process::exit(130);
                }
                match log_format {
                    LogFormat::Text => {
                        output::message("stopping: cleaning up (interrupt again to stop at once)");
                    }
                    LogFormat::Json => tracing::info!("stopping: cleaning up"),
                }
                stop.terminated.store(terminated, Ordering::Release);
                stop.cancel.cancel();
            }
        });
    }
}
