//! Durations in definitions.

use std::{fmt, str::FromStr, time::Duration};

use jiff::SignedDuration;
use schemars::json_schema;
use serde_with::{DeserializeFromStr, SerializeDisplay};

use super::{ParseError, text_schema};

/// A duration as people write it: `90s`, `10m`, `1h 30m`, `2d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, DeserializeFromStr, SerializeDisplay)]
pub struct Period(Duration);

/// Ten years, so that clock arithmetic with a period cannot overflow.
const MAX_PERIOD: Duration = Duration::from_hours(10 * 366 * 24);

impl Period {
    /// Returns the period as a [`Duration`].
    pub fn duration(self) -> Duration {
        self.0
    }

    /// Returns the period as jiff's [`SignedDuration`], for arithmetic with timestamps.
    pub fn signed_duration(self) -> SignedDuration {
        SignedDuration::try_from(self.0).unwrap_or(SignedDuration::MAX)
    }

    /// Creates a period of this many seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    fn parse(text: &str) -> Option<Self> {
        if text.starts_with(' ') {
            return None;
        }
        let mut total = Duration::ZERO;
        for part in text.split_inclusive(['s', 'm', 'h', 'd']) {
            let part = part.strip_prefix(' ').unwrap_or(part);
            let (number, unit) = part.split_at_checked(part.len().checked_sub(1)?)?;
            if !number.bytes().all(|digit| digit.is_ascii_digit()) {
                return None;
            }
            let number: u32 = number.parse().ok()?;
            let unit = match unit {
                "s" => 1,
                "m" => 60,
                "h" => 3600,
                "d" => 86400,
                _ => return None,
            };
            total = total.checked_add(Duration::from_secs(u64::from(number) * unit))?;
        }
        (!text.is_empty() && total <= MAX_PERIOD).then_some(Self(total))
    }
}

impl FromStr for Period {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let expected = "a duration such as `90s`, `10m`, `1h 30m` or `2d`";
        Self::parse(text).ok_or_else(|| ParseError::new(text, expected))
    }
}

impl fmt::Display for Period {
    /// Uses the largest unit that gives a whole number: `600s` is shown as `10m`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [(86400, 'd'), (3600, 'h'), (60, 'm')];
        let largest = units.into_iter().find(|(unit, _)| seconds > 0 && seconds.is_multiple_of(*unit));
        let (unit, name) = largest.unwrap_or((1, 's'));
        write!(f, "{}{name}", seconds / unit)
    }
}

text_schema!(
    Period,
    false,
    json_schema!({
        "type": "string",
        "pattern": r"^[0-9]+(s|m|h|d)( ?[0-9]+(s|m|h|d))*$",
        "description": "A duration: `90s`, `10m`, `1h 30m`, `2d`.",
    })
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_read_and_written() {
        for (text, seconds, written) in [
            ("90s", 90, "90s"),
            ("600s", 600, "10m"),
            ("1h 30m", 5400, "90m"),
            ("2d", 172_800, "2d"),
            ("0s", 0, "0s"),
        ] {
            let period = Period::parse(text).unwrap();
            assert_eq!((period.duration().as_secs(), period.to_string()), (seconds, written.to_owned()));
            assert_eq!(Period::parse(written), Some(period));
        }
        for text in ["", "10", "m", "-1s", "1.5h", "1w", "99999d", "1s  2s", "+1s", " 1s"] {
            assert_eq!(Period::parse(text), None, "{text:?}");
        }
    }
}
