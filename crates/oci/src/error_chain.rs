//! Walks through errors and their causes, and formats them.

use std::{error::Error, io};

/// Iterates over an error and its causes. Unwraps an `io::Error`, because `io::Error::source` skips the wrapped error and returns
/// the source of the wrapped error.
pub fn error_causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        }
    })
}

/// Formats an error and its causes on one line.
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let cause_text = error.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        cause = error.source();
    }
    text
}
