//! Honors the `Retry-After` delays of registries (RFC 9110, section 10.2.3).

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use parking_lot::Mutex;
use reqwest::header::{HeaderMap, RETRY_AFTER};

/// Upper limit of a requested delay. Longer delays are shortened.
const MAX_DELAY: Duration = Duration::from_hours(1);

/// Returns the delay that a response requests. Returns `None` if the header is missing or invalid.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    parse_delay(headers.get(RETRY_AFTER)?.to_str().ok()?.trim(), Timestamp::now())
}

/// Parses a number of seconds or a date. A date in the past gives a delay of zero.
fn parse_delay(text: &str, now: Timestamp) -> Option<Duration> {
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        text.parse().map_or(MAX_DELAY, Duration::from_secs)
    } else {
        let date = jiff::fmt::rfc2822::parse(text).ok()?.timestamp();
        Duration::try_from(date.duration_since(now)).unwrap_or_default()
    };
    Some(wait.min(MAX_DELAY))
}

/// End of the delay that each registry requested, and the status of the response. A delay applies to all requests to the registry,
/// not only to the one whose response requested it.
#[derive(Default)]
pub(super) struct RequestedDelays(Mutex<HashMap<String, (Instant, u16)>>);

impl RequestedDelays {
    pub(super) fn record(&self, authority: &str, status: u16, wait: Duration, now: Instant) {
        self.0.lock().insert(authority.to_owned(), (now + wait, status));
    }

    /// Returns the status and the remaining delay of a registry. Returns `None` if requests are allowed.
    pub(super) fn remaining(&self, authority: &str, now: Instant) -> Option<(u16, Duration)> {
        let mut delays = self.0.lock();
        let &(end, status) = delays.get(authority)?;
        if end > now {
            return Some((status, end - now));
        }
        delays.remove(authority);
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
            assert_eq!(parse_delay(text, now).map(|wait| wait.as_secs()), seconds, "{text:?}");
        }
    }

    #[test]
    fn a_delay_applies_to_one_registry_and_ends() {
        let (delays, now) = (RequestedDelays::default(), Instant::now());
        delays.record("r.example", 429, Duration::from_secs(10), now);
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(delays.remaining("r.example", at(4)), Some((429, Duration::from_secs(6))));
        assert_eq!(delays.remaining("s.example", at(4)), None);
        assert_eq!(delays.remaining("r.example", at(10)), None);
    }
}
