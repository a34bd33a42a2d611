//! Adapter: work that blocks, off the threads of the asynchronous runtime.

/// Runs `work` on a thread where it may block, and gives back what it returns. A panic in it goes on in the caller.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that shuts down refuses work, and it polls no caller any more.
            Err(_) => std::future::pending().await,
        },
    }
}
