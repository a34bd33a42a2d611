//! Splits chunks of terminal output into lines.

use anstream::adapter::strip_bytes;
use farrier_core::text::printable_lines;

/// Maximum line length in bytes; a longer line is split into several lines.
const MAX_LINE: usize = 64 * 1024;

/// Splits output into lines. Holds a partial line until its end arrives. Removes color and cursor codes (ECMA-48), and makes
/// other characters visible that would affect a terminal or mislead a reader. A lone carriage return (progress bars) also
/// ends a line.
#[derive(Debug, Default)]
pub(super) struct LineSplitter {
    pending: Vec<u8>,
}

impl LineSplitter {
    /// Processes a chunk and passes on each line that it completes.
    pub(super) fn feed(&mut self, chunk: &[u8], mut line: impl FnMut(&str)) {
        for &byte in chunk {
            match byte {
                b'\n' => self.flush(&mut line),
                // A run of carriage returns ends a line once, and must not fill the memory.
                b'\r' if self.pending.is_empty() || self.pending.ends_with(b"\r") => {}
                b'\r' => self.pending.push(byte),
                _ => {
                    if self.pending.last() == Some(&b'\r') || self.pending.len() >= MAX_LINE {
                        self.flush_text(&mut line);
                    }
                    self.pending.push(byte);
                }
            }
        }
    }

    /// Passes on the last, incomplete line at the end of the output.
    pub(super) fn finish(&mut self, mut line: impl FnMut(&str)) {
        self.flush_text(&mut line);
    }

    /// Flushes without a line end: control codes alone do not make a line.
    fn flush_text(&mut self, line: &mut impl FnMut(&str)) {
        self.flush(&mut |text: &str| {
            if !text.is_empty() {
                line(text);
            }
        });
    }

    fn flush(&mut self, line: &mut impl FnMut(&str)) {
        while self.pending.last() == Some(&b'\r') {
            self.pending.pop();
        }
        // Strip each line separately, so that an incomplete code does not swallow the next line.
        let text = strip_bytes(&self.pending).into_vec();
        self.pending.clear();
        line(&printable_lines(&String::from_utf8_lossy(&text)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(chunks: &[&[u8]]) -> Vec<String> {
        let (mut splitter, mut found) = (LineSplitter::default(), Vec::new());
        for chunk in chunks {
            splitter.feed(chunk, |line| found.push(line.to_owned()));
        }
        splitter.finish(|line| found.push(line.to_owned()));
        found
    }

    #[test]
    fn joins_partial_lines() {
        assert_eq!(lines(&[b"ab", b"c\nd", b"\n\ne"]), ["abc", "d", "", "e"]);
    }

    #[test]
    fn drops_colors_even_when_cut_in_two() {
        assert_eq!(lines(&[b"\x1b[0;9", b"1mred\x1b[0m\n", b"\x1b]0;title\x07x\n"]), ["red", "x"]);
    }

    #[test]
    fn nothing_in_a_line_steers_a_terminal() {
        let text = "a\u{9b}31mb\tc\u{202e}d\x08e\n";
        assert_eq!(lines(&[text.as_bytes()]), ["a\u{fffd}31mb\tc\u{fffd}de"]);
    }

    #[test]
    fn carriage_returns_end_lines_once() {
        assert_eq!(lines(&[b"10%\r20%\r\nend\r\n"]), ["10%", "20%", "end"]);
    }

    #[test]
    fn an_open_escape_does_not_swallow_the_next_line() {
        assert_eq!(lines(&[b"a\x1b[\nb\n"]), ["a", "b"]);
    }

    #[test]
    fn a_line_without_end_is_bounded() {
        let huge = vec![b'x'; 3 * MAX_LINE];
        assert!(lines(&[&huge]).iter().all(|line| line.len() <= MAX_LINE));
        let mut splitter = LineSplitter::default();
        splitter.feed(b"a", |_| {});
        splitter.feed(&vec![b'\r'; 3 * MAX_LINE], |_| {});
        assert_eq!(splitter.pending, b"a\r");
    }

    proptest! {
        #[test]
        fn chunking_does_not_matter(text in prop::collection::vec(prop_oneof![any::<u8>(), Just(b'\n'), Just(b'\r'), Just(0x1b), Just(b'[')], 0..200), cut in 0usize..200) {
            let cut = cut.min(text.len());
            prop_assert_eq!(lines(&[&text]), lines(&[&text[..cut], &text[cut..]]));
        }
    }
}
