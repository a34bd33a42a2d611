//! Cuts excerpts out of build logs for the pages, and caches them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io::{self, BufRead, BufReader, Read as _},
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use farrier_builder::{DAYS, LogReader, LogTimes, diagnosis::Diagnoser, log_of};
use farrier_core::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{Outcome, Phase, Plan, PlannedCell, StatusEntry},
};
use farrier_local::cache::Cache;
use fs_err::File;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;

/// Number of lines that are shown before and after the first error.
const CONTEXT_LINES: usize = 10;
/// Maximum number of bytes of a log that are searched for an error.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum number of characters of a line that are shown.
const MAX_LINE_CHARS: usize = 400;
/// Maximum number of cached excerpts.
const MAX_EXCERPTS: usize = 100;
/// Maximum age of the excerpt of a growing log.
const MAX_AGE: Duration = Duration::from_secs(5);

/// The first error of a log with the lines around it, or the end of a log without errors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Excerpt {
    /// The error in one line.
    pub error: Option<String>,
    pub lines: Vec<Line>,
}

/// A line of a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// Number of the line, from 1.
    pub number: usize,
    pub text: String,
    /// Whether the line is the error.
    pub is_error: bool,
}

/// Log of the latest build with a cell's inputs.
#[derive(Clone, Debug)]
pub struct Log {
    pub path: PathBuf,
    /// Excerpt for the page; `None` if the image is published.
    pub excerpt: Option<Excerpt>,
    /// Whether a build runs that does not write to the log yet.
    pub is_of_previous_attempt: bool,
}

/// Cache of excerpts. A changed log is read again, but a growing log at most every few seconds.
#[derive(Debug, Default)]
pub struct Excerpts(Mutex<HashMap<PathBuf, (Instant, Stamp, Excerpt)>>);

/// Length and modification time of a log.
type Stamp = (u64, Option<SystemTime>);

impl Excerpts {
    /// Returns the cell's log in farrier's cache. Omits an excerpt that cannot be read, because a log may be deleted at any time.
    pub fn find(&self, cache: &Cache, entry: &StatusEntry<'_>) -> Option<Log> {
        let path = log_of(cache, entry.image, entry.target, &entry.input_hash?)?;
        let excerpt = match entry.row.phase {
            Phase::Published => None,
            phase => self.excerpt(&path, phase == Phase::Building).ok(),
        };
        let is_being_written =
            || LogReader::open(&path, 0).and_then(|log| log.is_being_written()).unwrap_or(true);
        let is_of_previous_attempt = entry.row.phase == Phase::Building && !is_being_written();
        Some(Log { path, excerpt, is_of_previous_attempt })
    }

    fn excerpt(&self, path: &Path, may_grow: bool) -> io::Result<Excerpt> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let stamp = (metadata.len(), metadata.modified().ok());
        if let Some((read_at, cached_stamp, excerpt)) = self.0.lock().get(path)
            && (*cached_stamp == stamp || may_grow && read_at.elapsed() < MAX_AGE)
        {
            return Ok(excerpt.clone());
        }
        let excerpt = excerpt_of(BufReader::new(file.take(MAX_BYTES)))?;
        let mut cache = self.0.lock();
        if cache.len() >= MAX_EXCERPTS {
            cache.clear();
        }
        cache.insert(path.to_owned(), (Instant::now(), stamp, excerpt.clone()));
        Ok(excerpt)
    }
}

/// Times and numbers of builds, from the logs in farrier's cache. Images contain no build time, because they are reproducible.
#[derive(Clone, Debug, Default)]
pub struct LoggedBuilds {
    /// When published images were built, if known.
    pub times: BTreeMap<(ImageName, KernelTarget), Timestamp>,
    /// Numbers of an image's builds on each of the last days, the oldest first.
    pub by_day: BTreeMap<ImageName, [usize; DAYS]>,
}

impl LoggedBuilds {
    pub fn of(cache: &Cache, plan: &Plan, now: Timestamp) -> Self {
        let logs = LogTimes::of(cache);
        let time = |planned: &PlannedCell| {
            let PlannedCell { image, target, outcome, .. } = planned;
            let Outcome::UpToDate { cell, .. } = outcome else { return None };
            let written = logs.get(image, target, &cell.input_hash)?;
            Some(((image.clone(), target.clone()), Timestamp::try_from(written).ok()?))
        };
        let images: BTreeSet<&ImageName> = plan.cells.iter().map(|planned| &planned.image).collect();
        Self {
            times: plan.cells.iter().filter_map(time).collect(),
            by_day: logs.by_day(images.into_iter(), now.into()).into_iter().collect(),
        }
    }
}

fn excerpt_of(mut log: impl BufRead) -> io::Result<Excerpt> {
    let mut diagnoser = Diagnoser::default();
    let mut recent_lines: VecDeque<Line> = VecDeque::new();
    let (mut excerpt_lines, mut lines_left): (Vec<Line>, usize) = (Vec::new(), 0);
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
        let line = Line { number, text: line.chars().take(MAX_LINE_CHARS).collect(), is_error };
        if is_error {
            // The diagnoser found a better error. An earlier candidate among the context lines is no longer the error.
            excerpt_lines =
                recent_lines.iter().cloned().map(|line| Line { is_error: false, ..line }).collect();
            lines_left = CONTEXT_LINES + 1;
        }
        if lines_left > 0 {
            excerpt_lines.push(line.clone());
            lines_left -= 1;
        }
        recent_lines.push_back(line);
        if recent_lines.len() > CONTEXT_LINES {
            recent_lines.pop_front();
        }
    }
    let error = diagnoser.diagnosis().map(ToString::to_string);
    let lines = if error.is_some() { excerpt_lines } else { recent_lines.into() };
    Ok(Excerpt { error, lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(excerpt: &Excerpt) -> Vec<usize> {
        excerpt.lines.iter().map(|line| line.number).collect()
    }

    #[test]
    fn an_excerpt_shows_the_first_compiler_error_with_context() {
        let mut log: Vec<String> = (1..=40).map(|n| format!("  CC [M]  {n}.o")).collect();
        log[4] = "bash: line 1: bc: command not found".to_owned();
        log[19] = "a.c:3:1: error: <script>".to_owned();
        log[29] = "b.c:1:1: error: later".to_owned();
        let found = excerpt_of(log.join("\n").as_bytes()).unwrap();
        assert_eq!(found.error.as_deref(), Some("a.c:3:1: <script>"));
        assert_eq!(numbers(&found), (10..=30).collect::<Vec<_>>());
        let errors: Vec<usize> =
            found.lines.iter().filter(|line| line.is_error).map(|line| line.number).collect();
        assert_eq!(errors, [20]);
    }

    #[test]
    fn an_excerpt_without_error_shows_the_end_of_the_log() {
        let log: Vec<u8> =
            (1..=40).flat_map(|n| format!("{n} \u{1b}[1m\n").into_bytes()).chain([0xff, 0]).collect();
        let found = excerpt_of(log.as_slice()).unwrap();
        assert_eq!((found.error.as_ref(), numbers(&found)), (None, (32..=41).collect()));
        assert_eq!(excerpt_of(&b""[..]).unwrap(), Excerpt { error: None, lines: Vec::new() });
    }

    #[test]
    fn a_changed_log_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let (path, excerpts) = (directory.path().join("build.log"), Excerpts::default());
        let error = |may_grow| excerpts.excerpt(&path, may_grow).unwrap().error.unwrap();
        fs_err::write(&path, "a.c:1:1: error: first\n").unwrap();
        let written = fs_err::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(error(false), "a.c:1:1: first");
        // A log with unchanged length and modification time is not read again.
        fs_err::write(&path, "b.c:2:2: error: other\n").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
        assert_eq!(error(false), "a.c:1:1: first");
        fs_err::write(&path, "b.c:2:2: error: another one\n").unwrap();
        assert_eq!(error(true), "a.c:1:1: first", "a growing log that was just read is not read again");
        assert_eq!(error(false), "b.c:2:2: another one");
    }
}
