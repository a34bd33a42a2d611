//! Liveness and readiness of the control loop.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time without a beat after which the loop counts as hung and must be restarted. A healthy loop beats every few seconds.
const STALL_LIMIT: Duration = Duration::from_mins(5);
/// Interval between the beats of a reconcile that takes long.
const BEAT_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a reconcile counts as hung.
const MAX_RECONCILE: Duration = Duration::from_hours(1);

/// State behind the liveness and readiness probes.
#[derive(Debug)]
pub struct Health(Mutex<HealthState>);

#[derive(Clone, Copy, Debug)]
struct HealthState {
    last_beat: Instant,
    ready: bool,
}

impl Default for Health {
    /// Starts alive and not ready.
    fn default() -> Self {
        Self(Mutex::new(HealthState { last_beat: Instant::now(), ready: false }))
    }
}

impl Health {
    /// Records that the loop runs.
    pub(crate) fn beat(&self) {
        self.0.lock().last_beat = Instant::now();
    }

    /// Awaits a reconcile and beats meanwhile, for at most [`MAX_RECONCILE`]. A reconcile can take longer than [`STALL_LIMIT`] when
    /// servers do not answer. A restart would not help then, and would stop the builds.
    pub(crate) async fn beat_during<T>(&self, mut work: impl Future<Output = T> + Unpin) -> T {
        let began = Instant::now();
        while began.elapsed() < MAX_RECONCILE {
            if let Ok(outcome) = tokio::time::timeout(BEAT_INTERVAL, &mut work).await {
                return outcome;
            }
            self.beat();
        }
        work.await
    }

    /// Marks farrier as ready after the first successful snapshot of the cluster, when this replica is able to lead.
    pub fn set_ready(&self) {
        self.0.lock().ready = true;
    }

    /// Whether the cluster has been read at least once.
    pub fn is_ready(&self) -> bool {
        self.0.lock().ready
    }

    /// Returns the time since the last beat, if that time exceeds the limit.
    pub fn stalled(&self) -> Option<Duration> {
        let elapsed = self.0.lock().last_beat.elapsed();
        (elapsed > STALL_LIMIT).then_some(elapsed)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reconcile_that_never_ends_is_a_hang() {
        let health = Health::default();
        let mut reconcile = Box::pin(health.beat_during(pending::<()>()));
        assert!(tokio::time::timeout(Duration::from_mins(59), &mut reconcile).await.is_err());
        assert_eq!(health.stalled(), None);
        assert!(tokio::time::timeout(Duration::from_mins(7), reconcile).await.is_err());
        assert!(health.stalled().is_some());
    }
}
