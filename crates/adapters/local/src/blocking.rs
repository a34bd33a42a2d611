//! Runs blocking work off the threads of the asynchronous runtime.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use tokio::sync::oneshot;

/// Runs `work` on a thread that may block and returns its result. A panic in `work` propagates to the caller.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, result) = oneshot::channel();
    // Tokio's task machinery is compiled for each closure type. The boxed closure gives all work one type.
    let work: Box<dyn FnOnce() + Send> = Box::new(move || drop(sender.send(work())));
    if let Err(error) = tokio::task::spawn_blocking(work).await
        && let Ok(panic) = error.try_into_panic()
    {
        std::panic::resume_unwind(panic);
    }
    match result.await {
        Ok(value) => value,
        // The runtime drops the work only during its shutdown, when it no longer polls the caller either.
        Err(_) => std::future::pending().await,
    }
}

/// Runs `work` as [`blocking`] does, with cancellation. Dropping the future sets the flag that `work` received, and waits for
/// `work` to return, because the caller may then remove the files that `work` uses.
pub async fn stoppable<T: Send + 'static>(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> T {
    let stop = Arc::new(AtomicBool::new(false));
    let (done, ended) = mpsc::channel::<()>();
    let mut guard = StopOnDrop { stop: Arc::clone(&stop), ended, armed: true };
    let result = blocking(move || {
        // Dropped with the closure, whether the closure runs, panics or never starts.
        let _done = done;
        work(&stop)
    })
    .await;
    guard.armed = false;
    result
}

struct StopOnDrop {
    stop: Arc<AtomicBool>,
    ended: mpsc::Receiver<()>,
    armed: bool,
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if self.armed {
            self.stop.store(true, Ordering::Relaxed);
            // Nothing is ever sent: this returns when the sender is dropped. The timeout keeps a hung disk
            // from blocking program exit.
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
        let work = stoppable(move |stop| {
            running.store(true, Ordering::SeqCst);
            while !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            seen.store(true, Ordering::SeqCst);
        });
        tokio::select! {
            () = work => unreachable!(),
            () = async { while !started.load(Ordering::SeqCst) { tokio::task::yield_now().await } } => {}
        }
        assert!(finished.load(Ordering::SeqCst));
    }
}
