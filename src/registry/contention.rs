//! Adapter: the patience of those who write a tag that others write, too. The protocol has no way to make others wait:
//! a writer reads what the tag holds, adds to it, writes it, and reads again whether its addition is still there.

use std::time::Duration;

/// Tries to get one's addition into a tag.
pub const MAX_TRIES: u32 = 5;
/// Before the second try, and that much longer before each further one.
const PAUSE: Duration = Duration::from_millis(100);

/// Waits before a try; the first is 0.
pub async fn pause_before(attempt: u32) {
    if attempt > 0 {
        tokio::time::sleep(PAUSE * attempt).await;
    }
}
