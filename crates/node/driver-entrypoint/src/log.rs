//! The container's log. Each line has a UTC time, a level and a message.

use std::{
    cell::RefCell,
    fmt::Display,
    io::{self, Write},
    time::{SystemTime, UNIX_EPOCH},
};

/// Sink of the log lines.
pub(crate) struct Log {
    sink: RefCell<Box<dyn Write>>,
    /// Sink that also gets the lines, for a while.
    copy: RefCell<Option<Box<dyn Write>>>,
}

impl Log {
    pub(crate) fn stderr() -> Self {
        Self::to(Box::new(io::stderr()))
    }

    pub(crate) fn to(sink: Box<dyn Write>) -> Self {
        Self { sink: RefCell::new(sink), copy: RefCell::new(None) }
    }

    /// Sets or removes a second sink for the following lines.
    pub(crate) fn copy_to(&self, sink: Option<Box<dyn Write>>) {
        self.copy.replace(sink);
    }

    /// Logs that a step was performed or skipped.
    pub(crate) fn step(&self, message: impl Display) {
        self.line("INFO", &message);
    }

    /// Logs a problem that does not stop the container.
    pub(crate) fn warn(&self, message: impl Display) {
        self.line("WARN", &message);
    }

    /// Logs the error of a step whose failure is not fatal.
    pub(crate) fn warn_of<T>(&self, result: Result<T, impl Display>) {
        if let Err(error) = result {
            self.warn(error);
        }
    }

    /// Logs an error that aborts the start or the stop of the container.
    pub(crate) fn error(&self, message: impl Display) {
        self.line("ERROR", &message);
    }

    /// Writes one line. Ignores write errors, because the drivers matter more than the log.
    fn line(&self, level: &str, message: &dyn Display) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = format!("{} {level:<5} {message}\n", timestamp(now.as_secs(), now.subsec_millis()));
        let mut copy = self.copy.borrow_mut();
        for sink in std::iter::once(&mut *self.sink.borrow_mut()).chain(copy.as_mut()) {
            let _ = sink.write_all(line.as_bytes()).and_then(|()| sink.flush());
        }
    }
}

/// Formats a time as `2026-11-21T10:11:12.345Z`. Converts days to a date as Howard Hinnant's `civil_from_days` does.
fn timestamp(seconds: u64, milliseconds: u32) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    // Months count from March, so that the leap day is the last day of the year.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, year_carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let year = year + era * 400 + year_carry;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(timestamp(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(951_782_399, 7), "2000-02-28T23:59:59.007Z");
        assert_eq!(timestamp(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(timestamp(1_795_256_189, 999), "2026-11-21T10:16:29.999Z");
    }
}
