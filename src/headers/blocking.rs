//! Adapter: work that blocks, off the runtime's threads, and that ends with the future that waits for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use super::FetchError;

/// Runs `work` on a thread where blocking is allowed. When the future is dropped, `work`'s flag becomes
/// true and the drop waits for it to return: its files are about to be removed.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&AtomicBool) -> Result<T, FetchError> + Send + 'static,
) -> Result<T, FetchError> {
    let stop = Arc::new(AtomicBool::new(false));
    let (done, ended) = mpsc::channel::<()>();
    let mut guard = Guard { stop: Arc::clone(&stop), ended, armed: true };
    let task = tokio::task::spawn_blocking(move || {
        // Dropped with the closure, whether it runs, panics or never starts.
        let _done = done;
        work(&stop)
    });
    let result = task.await;
    guard.armed = false;
    result.map_err(|_| FetchError::Interrupted)?
}

struct Guard {
    stop: Arc<AtomicBool>,
    ended: mpsc::Receiver<()>,
    armed: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.armed {
            self.stop.store(true, Ordering::Relaxed);
            // Nothing is ever sent: this returns when the sender is gone. Bounded, since a hung disk must
            // not keep the program from ending.
            let _ = self.ended.recv_timeout(Duration::from_secs(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn dropping_stops_the_work_and_waits() {
        let finished = Arc::new(AtomicBool::new(false));
        let (seen, started) = (Arc::clone(&finished), Arc::new(AtomicBool::new(false)));
        let running = Arc::clone(&started);
        let work = blocking(move |stop| {
            running.store(true, Ordering::SeqCst);
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            seen.store(true, Ordering::SeqCst);
            Ok(())
        });
        tokio::select! {
            _ = work => unreachable!(),
            () = async { while !started.load(Ordering::SeqCst) { tokio::task::yield_now().await } } => {}
        }
        assert!(finished.load(Ordering::SeqCst));
    }
}
