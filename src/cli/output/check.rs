//! Colours for check reports.

use std::fmt::Write as _;

use crate::kmod::Verdict;

const RED: &str = "\u{1b}[31m";
const YELLOW: &str = "\u{1b}[33m";
const GREEN: &str = "\u{1b}[32m";
const DIM: &str = "\u{1b}[2m";
const RESET: &str = "\u{1b}[0m";

/// A check report with a terminal's colours (ANSI escape sequences) for verdicts and help. They are put on the finished
/// text, so that they cannot change its columns.
pub fn coloured(text: &str) -> String {
    let columns = text.lines().find_map(|line| Some((line.find("VERDICT")?, line.find("REASON")?)));
    let mut out = String::with_capacity(text.len() * 2);
    for (number, line) in text.lines().enumerate() {
        match columns {
            _ if number == 0 => match line.rsplit_once(": ") {
                Some((start, verdict)) => {
                    let _ = write!(out, "{start}: {}", painted(verdict));
                }
                None => out.push_str(line),
            },
            Some((verdict, reason)) if line.get(..verdict).is_some() => {
                let (name, rest) = line.split_at(verdict);
                let width = (reason - verdict).min(rest.len());
                let (word, tail) = rest.split_at_checked(width).unwrap_or((rest, ""));
                let word_painted = if word.trim().is_empty() { word.to_owned() } else { painted(word) };
                if is_verdict(word.trim_end()) || word.trim().is_empty() {
                    let _ = write!(out, "{}{word_painted}{}", start_painted(name), start_painted(tail));
                } else {
                    out.push_str(&start_painted(line));
                }
            }
            _ => out.push_str(&start_painted(line)),
        }
        out.push('\n');
    }
    out
}

fn is_verdict(word: &str) -> bool {
    word.parse::<Verdict>().is_ok()
}

/// A verdict in its colour, the spaces after it without.
fn painted(word: &str) -> String {
    let colour = match word.trim_end().parse() {
        Ok(Verdict::Loads) => GREEN,
        Ok(Verdict::Unknown) => YELLOW,
        Ok(Verdict::Refused) => RED,
        Err(_) => return word.to_owned(),
    };
    let trimmed = word.trim_end();
    format!("{colour}{trimmed}{RESET}{}", word.get(trimmed.len()..).unwrap_or(""))
}

/// A line whose first word says what it is, that word in its colour; help is dim.
fn start_painted(line: &str) -> String {
    if line.trim_start().starts_with("help: ") {
        return format!("{DIM}{line}{RESET}");
    }
    for (word, colour) in
        [("refused:", RED), ("unknown:", YELLOW), ("warning:", YELLOW), ("warning,", YELLOW)]
    {
        if let Some(rest) = line.strip_prefix(word) {
            return format!("{colour}{word}{RESET}{rest}");
        }
    }
    line.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = "\
payload on 6.1.0-9-amd64 (amd64): refused
MODULE      VERDICT  REASON
nvidia      refused  refused: disagrees about version of symbol ib_free: found 0x00000004, wanted 0x00000005
                       help: rebuild it against the exposed headers of mofed
nvidia_uvm  loads
warning, 2 modules: the module is not signed
  help: sign it
load order: nvidia, nvidia_uvm
";

    #[test]
    fn colours_change_no_letter() {
        let coloured = coloured(REPORT);
        let mut bare = coloured.clone();
        for code in [RED, YELLOW, GREEN, DIM, RESET] {
            bare = bare.replace(code, "");
        }
        assert_eq!(bare, REPORT);
        assert!(coloured.starts_with("payload on 6.1.0-9-amd64 (amd64): \u{1b}[31mrefused\u{1b}[0m\n"));
        assert!(coloured.contains("\nnvidia_uvm  \u{1b}[32mloads\u{1b}[0m"), "{coloured}");
        assert!(coloured.contains("\u{1b}[31mrefused:\u{1b}[0m disagrees"), "{coloured}");
        assert!(coloured.contains("\u{1b}[33mwarning,\u{1b}[0m 2 modules"), "{coloured}");
        assert!(coloured.contains("\u{1b}[2m"), "{coloured}");
    }
}
