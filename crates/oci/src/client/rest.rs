//! Adapter: honors the `Retry-After` delays of registries (RFC 9110, section 10.2.3).

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::header::{HeaderMap, RETRY_AFTER};

/// Upper limit of a requested delay.
const LONGEST: Duration = Duration::from_hours(1);

/// Delay that a response asks for; `None` without the header, or if its value is invalid.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    wait_of(headers.get(RETRY_AFTER)?.to_str().ok()?.trim(), Timestamp::now())
}

/// Parses a number of seconds or a date.
fn wait_of(text: &str, now: Timestamp) -> Option<Duration> {
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        text.parse().map_or(LONGEST, Duration::from_secs)
    } else {
        let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
        Duration::try_from(date.duration_since(now)).unwrap_or_default()
    };
    Some(wait.min(LONGEST))
}

/// End of the delay that each registry asked for, with the response's status. The delay applies to all calls to the
/// registry, not only to the one that received it.
#[derive(Default)]
pub(super) struct RetryAfter(Mutex<HashMap<String, (Instant, u16)>>);

impl RetryAfter {
    pub(super) fn begin(&self, authority: &str, status: u16, wait: Duration, now: Instant) {
        self.0.lock().insert(authority.to_owned(), (now + wait, status));
    }

    /// Status and remaining delay of the registry; `None` when requests are allowed.
    pub(super) fn left(&self, authority: &str, now: Instant) -> Option<(u16, Duration)> {
        let mut rests = self.0.lock();
        let &(until, status) = rests.get(authority)?;
        if until > now {
            return Some((status, until - now));
        }
        rests.remove(authority);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates() {
        let now: Timestamp = "1994-11-06T08:49:07Z".parse().unwrap();
        for (text, seconds) in [
            ("0", Some(0)),
            ("120", Some(120)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(30)),
            ("Sun, 06 Nov 1994 08:49:00 GMT", Some(0)),
            // Docker Hub has sent an absolute Unix time.
            ("1700000000", Some(3600)),
            ("99999999999999999999", Some(3600)),
            ("-5", None),
            ("1.5", None),
            ("soon", None),
            ("", None),
        ] {
            assert_eq!(wait_of(text, now).map(|wait| wait.as_secs()), seconds, "{text:?}");
        }
    }

    #[test]
    fn a_rest_is_one_registrys_and_ends() {
        let (rests, now) = (RetryAfter::default(), Instant::now());
        rests.begin("r.example", 429, Duration::from_secs(10), now);
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(rests.left("r.example", at(4)), Some((429, Duration::from_secs(6))));
        assert_eq!(rests.left("s.example", at(4)), None);
        assert_eq!(rests.left("r.example", at(10)), None);
    }
}
