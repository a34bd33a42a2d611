//! Adapter: what a page shows of a build's log.

use std::{
    collections::VecDeque,
    io::{self, BufRead, BufReader},
    path::PathBuf,
};

use fs_err::File;
use serde::Serialize;

use crate::{
    build::newest_log,
    cache::Cache,
    engine::Diagnoser,
    plan::{Phase, StatusEntry},
};

/// Lines before and after the first error.
const AROUND: usize = 10;
/// Bytes of a log that are looked through, and characters of a line that are shown.
const MOST: u64 = 64 << 20;
const LINE: usize = 400;

/// The first error with what is around it; the end of a log without one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Excerpt {
    /// The error in one line.
    pub error: Option<String>,
    pub lines: Vec<Line>,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// From 1.
    pub number: usize,
    pub text: String,
    /// Is it the error?
    pub is_error: bool,
}

/// The log of a cell's newest build.
#[derive(Clone, Debug)]
pub struct Log {
    pub path: PathBuf,
    /// What a page shows of it, where there is no image.
    pub excerpt: Option<Excerpt>,
}

impl Log {
    /// What this cache has. A log that cannot be read is as none: the cache may be deleted at any time.
    pub fn find(cache: &Cache, entry: &StatusEntry<'_>) -> Option<Self> {
        let path = newest_log(cache, entry.image, &entry.target.release).ok()??;
        let excerpt = || of(BufReader::new(io::Read::take(File::open(&path)?, MOST)));
        let excerpt = if entry.row.phase == Phase::Published { None } else { excerpt().ok() };
        Some(Self { path, excerpt })
    }
}

fn of(mut log: impl BufRead) -> io::Result<Excerpt> {
    let mut diagnoser = Diagnoser::default();
    let mut last: VecDeque<Line> = VecDeque::new();
    let (mut shown, mut after): (Vec<Line>, usize) = (Vec::new(), 0);
    let (mut bytes, mut number) = (Vec::new(), 0);
    loop {
        bytes.clear();
        if log.read_until(b'\n', &mut bytes)? == 0 {
            break;
        }
        number += 1;
        let line = String::from_utf8_lossy(&bytes);
        let line = line.trim_end_matches(['\n', '\r']);
        let before = diagnoser.diagnosis().cloned();
        diagnoser.feed(line);
        let is_error = diagnoser.diagnosis() != before.as_ref();
        let line = Line { number, text: line.chars().take(LINE).collect(), is_error };
        if is_error {
            // What was read last stands before it, also where that was an error of another kind.
            shown = last.iter().cloned().map(|line| Line { is_error: false, ..line }).collect();
            after = AROUND + 1;
        }
        if after > 0 {
            shown.push(line.clone());
            after -= 1;
        }
        last.push_back(line);
        if last.len() > AROUND {
            last.pop_front();
        }
    }
    let error = diagnoser.diagnosis().map(ToString::to_string);
    let lines = if error.is_some() { shown } else { last.into() };
    Ok(Excerpt { error, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(excerpt: &Excerpt) -> Vec<usize> {
        excerpt.lines.iter().map(|line| line.number).collect()
    }

    #[test]
    fn the_first_compiler_error_with_ten_lines_around_it() {
        let mut log: Vec<String> = (1..=40).map(|n| format!("  CC [M]  {n}.o")).collect();
        log[4] = "bash: line 1: bc: command not found".to_owned();
        log[19] = "a.c:3:1: error: <script>".to_owned();
        log[29] = "b.c:1:1: error: later".to_owned();
        let found = of(log.join("\n").as_bytes()).unwrap();
        assert_eq!(found.error.as_deref(), Some("a.c:3:1: <script>"));
        assert_eq!(numbers(&found), (10..=30).collect::<Vec<_>>());
        let errors: Vec<usize> =
            found.lines.iter().filter(|line| line.is_error).map(|line| line.number).collect();
        assert_eq!(errors, [20]);
    }

    #[test]
    fn a_log_without_an_error_shows_its_end_and_any_bytes_are_read() {
        let log: Vec<u8> =
            (1..=40).flat_map(|n| format!("{n} \u{1b}[1m\n").into_bytes()).chain([0xff, 0]).collect();
        let found = of(log.as_slice()).unwrap();
        assert_eq!((found.error.as_ref(), numbers(&found)), (None, (32..=41).collect()));
        assert_eq!(of(&b""[..]).unwrap(), Excerpt { error: None, lines: Vec::new() });
    }
}
