//! Keeps the last lines of a virtual machine's console output.

use std::collections::VecDeque;

use driver_entrypoint::report::reports_oops;
use farrier_core::text::is_deceptive;

/// Maximum number of lines to keep.
const MAX_LINES: usize = 400;
/// Maximum number of bytes to keep of each line.
const MAX_LINE_BYTES: usize = 512;
/// Maximum number of lines to show.
const SHOWN_LINES: usize = 30;

/// Last lines of a console's output.
#[derive(Debug, Default)]
pub(super) struct Console {
    lines: VecDeque<String>,
    partial: Vec<u8>,
}

impl Console {
    /// Appends output, which may end in the middle of a line.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                self.end_line();
            } else if self.partial.len() < MAX_LINE_BYTES && byte != b'\r' {
                self.partial.push(byte);
            }
        }
    }

    /// Ends the current line, so that further output starts a new line.
    pub(super) fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.partial);
        let line: String = line.chars().filter(|c| !is_deceptive(*c)).collect();
        let line = strip_timestamp(&line).trim_end();
        if !line.is_empty() && !is_initcall_trace(line) {
            if self.lines.len() == MAX_LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(line.to_owned());
        }
        self.partial.clear();
    }

    pub(super) fn last_lines(&self) -> Vec<String> {
        let start = self.lines.len().saturating_sub(SHOWN_LINES);
        self.lines.iter().skip(start).cloned().collect()
    }

    /// Returns the lines from the first report of an oops or panic on, or the last lines if there is none.
    pub(super) fn crash_lines(&self) -> Vec<String> {
        match self.lines.iter().position(|line| reports_oops(line)) {
            Some(start) => self.lines.iter().skip(start).take(SHOWN_LINES).cloned().collect(),
            None => self.last_lines(),
        }
    }
}

/// Whether the line comes from `initcall_debug`, which boot checks enable to classify failures. Such lines are not shown.
pub(super) fn is_initcall_trace(line: &str) -> bool {
    ["calling  ", "initcall ", "PM: Calling "].iter().any(|start| line.starts_with(start))
}

/// Removes a timestamp such as `[    1.234567] `.
fn strip_timestamp(line: &str) -> &str {
    match line.strip_prefix('[').and_then(|stamped| stamped.split_once("] ")) {
        Some((time, text)) if time.trim().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => text,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_and_initcall_traces_are_removed() {
        let mut console = Console::default();
        console.push(b"[    1.000001] calling  m_init+0x0 [m] @ 4\r\n[    1.5] m: he");
        console.push(b"llo\r\n\x1b\n[note] x\nlast");
        console.end_line();
        assert_eq!(console.last_lines(), ["m: hello", "[note] x", "last"]);
    }

    #[test]
    fn crash_lines_begin_at_the_crash() {
        let mut console = Console::default();
        console.push(b"a\nBUG: kernel NULL pointer dereference\nb\n");
        assert_eq!(console.crash_lines(), ["BUG: kernel NULL pointer dereference", "b"]);
        let mut console = Console::default();
        console.push("x\n".repeat(1000).as_bytes());
        assert_eq!((console.lines.len(), console.crash_lines().len()), (MAX_LINES, SHOWN_LINES));
    }

    #[test]
    fn an_endless_line_is_truncated() {
        let mut console = Console::default();
        console.push(&vec![b'x'; 1 << 20]);
        assert_eq!(console.partial.len(), MAX_LINE_BYTES);
    }
}
