//! Minimum speed of transfers, below which a transfer is aborted.

use std::time::Duration;

use tokio::time::{Instant, timeout};

/// Minimum speed of a transfer: at least `min_bytes` bytes per `period` of waiting. A transfer that ends within the first period
/// may have fewer bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Minimum number of bytes per period.
    pub min_bytes: u64,
    /// Maximum time of waiting for `min_bytes` bytes.
    pub period: Duration,
}

impl Default for Pace {
    /// 256 KiB per minute: a tenth of the speed of one of many concurrent transfers on a slow connection. Transfers survive
    /// interruptions of less than a minute.
    fn default() -> Self {
        Self { min_bytes: 256 << 10, period: Duration::from_mins(1) }
    }
}

/// The transfer is slower than its [`Pace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("fewer than {} bytes moved in {} seconds", .0.min_bytes, .0.period.as_secs())]
pub struct TooSlow(pub(super) Pace);

/// Enforces a pace on one transfer. Only time in [`Pacer::wait`] counts, because the receiver of the bytes may be slow.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    pace: Pace,
    remaining: Duration,
    moved: u64,
}

impl Pacer {
    /// Starts a transfer.
    pub fn new(pace: Pace) -> Self {
        Self { pace, remaining: pace.period, moved: 0 }
    }

    /// Waits for the next bytes, but not longer than the pace allows.
    pub async fn wait<T>(&mut self, next: impl Future<Output = T>) -> Result<T, TooSlow> {
        let since = Instant::now();
        let outcome = timeout(self.remaining, next).await;
        self.remaining = self.remaining.saturating_sub(since.elapsed());
        outcome.map_err(|_| TooSlow(self.pace))
    }

    /// Records bytes that were received or sent. The waiting time starts again after each [`Pace::min_bytes`] bytes.
    pub fn moved(&mut self, bytes: u64) {
        self.moved = self.moved.saturating_add(bytes);
        if self.moved >= self.pace.min_bytes {
            *self = Self::new(self.pace);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    const PACE: Pace = Pace { min_bytes: 100, period: Duration::from_secs(10) };

    /// Transfers one chunk of this many bytes per second; returns the number of chunks.
    async fn transfer(chunk: u64, chunks: u64) -> Result<u64, TooSlow> {
        let mut pacer = Pacer::new(PACE);
        for _ in 0..chunks {
            pacer.wait(sleep(Duration::from_secs(1))).await?;
            pacer.moved(chunk);
        }
        Ok(chunks)
    }

    #[tokio::test(start_paused = true)]
    async fn the_pace_applies_throughout_a_transfer() {
        assert_eq!(transfer(20, 1000).await, Ok(1000));
        assert_eq!(transfer(1, 8).await, Ok(8), "a short transfer may have fewer bytes");
        let error = transfer(1, 1000).await.unwrap_err();
        assert_eq!(error.to_string(), "fewer than 100 bytes moved in 10 seconds");
        // A fast start earns no credit.
        let mut pacer = Pacer::new(PACE);
        pacer.moved(1 << 40);
        assert!(pacer.wait(sleep(Duration::from_secs(11))).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn time_of_the_receiver_does_not_count() {
        let mut pacer = Pacer::new(PACE);
        for _ in 0..20 {
            sleep(Duration::from_mins(1)).await;
            pacer.wait(async {}).await.unwrap();
            pacer.moved(1);
        }
    }
}
