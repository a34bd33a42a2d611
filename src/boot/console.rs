//! Pure: the last lines of a virtual machine's console.

use std::collections::VecDeque;

use driver_entrypoint::report::is_death;

use crate::text::is_deceptive;

/// Lines that are kept.
const LINES: usize = 400;
/// Bytes of one that are kept.
const LINE: usize = 512;
/// Lines that are shown.
const SHOWN: usize = 30;

/// The end of what was written to a console.
#[derive(Debug, Default)]
pub(super) struct Console {
    lines: VecDeque<String>,
    partial: Vec<u8>,
}

impl Console {
    /// Reads on.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                self.end_line();
            } else if self.partial.len() < LINE && byte != b'\r' {
                self.partial.push(byte);
            }
        }
    }

    /// What comes after is another line.
    pub(super) fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.partial);
        let line: String = line.chars().filter(|c| !is_deceptive(*c)).collect();
        let line = without_time(&line).trim_end();
        if !line.is_empty() && !is_trace(line) {
            if self.lines.len() == LINES {
                self.lines.pop_front();
            }
            self.lines.push_back(line.to_owned());
        }
        self.partial.clear();
    }

    /// The last lines.
    pub(super) fn last_lines(&self) -> Vec<String> {
        let from = self.lines.len().saturating_sub(SHOWN);
        self.lines.iter().skip(from).cloned().collect()
    }

    /// The lines from where the kernel says that it dies; the last ones when it did not say so.
    pub(super) fn last_words(&self) -> Vec<String> {
        match self.lines.iter().position(|line| is_death(line)) {
            Some(from) => self.lines.iter().skip(from).take(SHOWN).cloned().collect(),
            None => self.last_lines(),
        }
    }
}

/// Is it a line of `initcall_debug`, which only farrier asked for?
pub(super) fn is_trace(line: &str) -> bool {
    ["calling  ", "initcall ", "PM: Calling "].iter().any(|start| line.starts_with(start))
}

/// Without `[    1.234567] `.
fn without_time(line: &str) -> &str {
    let rest = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    match rest {
        Some((time, text)) if time.trim().bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => text,
        _ => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lose_their_time_and_traces_are_left_out() {
        let mut console = Console::default();
        console.push(b"[    1.000001] calling  m_init+0x0 [m] @ 4\r\n[    1.5] m: he");
        console.push(b"llo\r\n\x1b\n[note] x\nlast");
        console.end_line();
        assert_eq!(console.last_lines(), ["m: hello", "[note] x", "last"]);
    }

    #[test]
    fn last_words_begin_where_it_dies() {
        let mut console = Console::default();
        console.push(b"a\nBUG: kernel NULL pointer dereference\nb\n");
        assert_eq!(console.last_words(), ["BUG: kernel NULL pointer dereference", "b"]);
        let mut console = Console::default();
        console.push("x\n".repeat(1000).as_bytes());
        assert_eq!((console.lines.len(), console.last_words().len()), (LINES, SHOWN));
    }

    #[test]
    fn an_endless_line_takes_no_memory() {
        let mut console = Console::default();
        console.push(&vec![b'x'; 1 << 20]);
        assert_eq!(console.partial.len(), LINE);
    }
}
