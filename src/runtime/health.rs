//! Adapter: is the loop alive, and has it seen the cluster?

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// The loop turns at least every few seconds, and each single thing that it waits for has a bound of its own. So a
/// loop that has not turned for this long hangs, and a restart is what helps.
const STALLED: Duration = Duration::from_mins(5);

/// What the probes ask about.
#[derive(Debug)]
pub struct Health(Mutex<State>);

#[derive(Clone, Copy, Debug)]
struct State {
    beat: Instant,
    ready: bool,
}

impl Default for Health {
    /// Alive now, and not ready.
    fn default() -> Self {
        Self(Mutex::new(State { beat: Instant::now(), ready: false }))
    }
}

impl Health {
    /// The loop turns.
    pub fn beat(&self) {
        self.0.lock().beat = Instant::now();
    }

    /// The cluster was seen for the first time: from here on this farrier could lead.
    pub fn set_ready(&self) {
        self.0.lock().ready = true;
    }

    /// Has the cluster been seen?
    pub fn is_ready(&self) -> bool {
        self.0.lock().ready
    }

    /// For how long the loop has not turned, where that is too long.
    pub fn stalled(&self) -> Option<Duration> {
        let still = self.0.lock().beat.elapsed();
        (still > STALLED).then_some(still)
    }
}
