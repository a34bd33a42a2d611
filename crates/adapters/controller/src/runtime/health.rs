//! Liveness and readiness of the control loop.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time without an iteration after which the loop counts as hung, so that a restart is the remedy. A healthy
/// loop iterates every few seconds, and everything that it waits for has a shorter timeout.
const STALLED: Duration = Duration::from_mins(5);

/// State behind the liveness and readiness probes.
#[derive(Debug)]
pub struct Health(Mutex<State>);

#[derive(Clone, Copy, Debug)]
struct State {
    beat: Instant,
    ready: bool,
}

impl Default for Health {
    /// Starts alive and not ready.
    fn default() -> Self {
        Self(Mutex::new(State { beat: Instant::now(), ready: false }))
    }
}

impl Health {
    /// Records an iteration of the loop.
    pub fn beat(&self) {
        self.0.lock().beat = Instant::now();
    }

    /// Marks farrier as ready after the first successful snapshot of the cluster. From then on this replica
    /// could lead.
    pub fn set_ready(&self) {
        self.0.lock().ready = true;
    }

    /// Whether the cluster has been seen.
    pub fn is_ready(&self) -> bool {
        self.0.lock().ready
    }

    /// Returns how long the loop has been stalled, if that exceeds the limit.
    pub fn stalled(&self) -> Option<Duration> {
        let still = self.0.lock().beat.elapsed();
        (still > STALLED).then_some(still)
    }
}
