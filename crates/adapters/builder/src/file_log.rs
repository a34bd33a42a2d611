//! Writes a build's log to a file and finds the decisive error.

use std::{
    collections::VecDeque,
    io::{LineWriter, Write},
    path::{Path, PathBuf},
};

use farrier_engines::{BuildLog, EngineError};
use fs_err::{self as fs, File};
use parking_lot::Mutex;

use super::diagnosis::{Diagnoser, Diagnosis, Hint};

/// Limits of a log file: many times the output of a complete GPU driver build.
const LIMITS: LogLimits = LogLimits { beginning: 32 << 20, end: 1 << 20 };

/// File with a build's log. Forwards each line, finds the decisive error, and keeps only the beginning and the end of an
/// oversized log.
pub struct FileLog {
    path: PathBuf,
    live: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    file: CappedFile,
    /// Whether a write has failed; only the first failure is reported.
    write_failed: bool,
    diagnoser: Diagnoser,
}

impl FileLog {
    /// Creates the file and its directory, if necessary; `live` receives each line as it arrives.
    pub fn create(path: &Path, live: impl Fn(&str) + Send + Sync + 'static) -> Result<Self, EngineError> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let file = File::create(path)?;
        // The lock tells readers that more output will follow. If locking fails, readers stop at the current end.
        let _ = file.try_lock();
        let file = LineWriter::new(file);
        Ok(Self {
            path: path.to_owned(),
            live: Box::new(live),
            state: Mutex::new(State {
                file: CappedFile::new(file, LIMITS),
                write_failed: false,
                diagnoser: Diagnoser::default(),
            }),
        })
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Completes the file and returns the decisive error and the log's last lines. If the disk is full, the log is lost
    /// and the build continues.
    pub fn finish(&self) -> (Option<Diagnosis>, Vec<String>) {
        let mut state = self.state.lock();
        let flushed = state.file.finish();
        self.report_write_failure(&mut state, flushed);
        (state.diagnoser.diagnosis().cloned(), state.diagnoser.tail().map(str::to_owned).collect())
    }

    /// Returns a hint about the failure, if the log contains a known error.
    pub fn hint(&self) -> Option<Hint> {
        self.state.lock().diagnoser.hint().cloned()
    }

    fn report_write_failure(&self, state: &mut State, written: std::io::Result<()>) {
        if let Err(error) = written
            && !state.write_failed
        {
            state.write_failed = true;
            tracing::warn!(path = %self.path.display(), %error, "build log is incomplete");
        }
    }
}

impl BuildLog for FileLog {
    fn line(&self, line: &str) {
        (self.live)(line);
        let mut state = self.state.lock();
        state.diagnoser.feed(line);
        let written = state.file.line(line);
        self.report_write_failure(&mut state, written);
    }
}

impl Drop for FileLog {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Number of bytes kept of a long log, at its beginning and its end.
#[derive(Clone, Copy)]
struct LogLimits {
    beginning: usize,
    end: usize,
}

/// A file that accepts lines up to a limit. The last lines after the limit stay in memory until the log ends.
struct CappedFile {
    file: LineWriter<File>,
    limits: LogLimits,
    written: usize,
    end: VecDeque<String>,
    end_bytes: usize,
    omitted: u64,
}

impl CappedFile {
    fn new(file: LineWriter<File>, limits: LogLimits) -> Self {
        Self { file, limits, written: 0, end: VecDeque::new(), end_bytes: 0, omitted: 0 }
    }

    fn line(&mut self, line: &str) -> std::io::Result<()> {
        let size = line.len() + 1;
        if self.written.saturating_add(size) <= self.limits.beginning && self.end.is_empty() {
            self.written += size;
            return writeln!(self.file, "{line}");
        }
        self.end.push_back(line.to_owned());
        self.end_bytes += size;
        while self.end_bytes > self.limits.end {
            let Some(first) = self.end.pop_front() else { break };
            self.end_bytes -= first.len() + 1;
            self.omitted += 1;
        }
        Ok(())
    }

    /// Writes the lines that were kept from the end.
    fn finish(&mut self) -> std::io::Result<()> {
        if self.omitted > 0 {
            writeln!(self.file, "[farrier: {} lines are omitted here: the log is too long]", self.omitted)?;
        }
        self.omitted = 0;
        for line in std::mem::take(&mut self.end) {
            writeln!(self.file, "{line}")?;
        }
        self.end_bytes = 0;
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn keeps_the_log_and_its_first_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/build.log");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let live = Arc::clone(&seen);
        let log = FileLog::create(&path, move |line| live.lock().push(line.to_owned())).unwrap();
        for line in ["CC a.o", "a.c:1:2: error: bad", "make: *** [a.o] Error 1"] {
            log.line(line);
        }
        let (diagnosis, tail) = log.finish();
        assert_eq!(diagnosis.unwrap().to_string(), "a.c:1:2: bad");
        assert_eq!(tail.len(), 3);
        assert_eq!(*seen.lock(), tail);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), tail.join("\n") + "\n");
    }

    #[test]
    fn an_oversized_log_keeps_its_beginning_and_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let new = |limits| CappedFile::new(LineWriter::new(File::create(&path).unwrap()), limits);
        let mut log = new(LogLimits { beginning: 12, end: 9 });
        for number in 0..1000 {
            log.line(&number.to_string()).unwrap();
            assert!(log.end_bytes <= 9);
        }
        log.finish().unwrap();
        log.finish().unwrap();
        let notice = "[farrier: 992 lines are omitted here: the log is too long]";
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, format!("0\n1\n2\n3\n4\n5\n{notice}\n998\n999\n"));

        // A log that just fits is kept in full.
        let mut log = new(LogLimits { beginning: 4, end: 4 });
        for number in 0..4 {
            log.line(&number.to_string()).unwrap();
        }
        log.finish().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "0\n1\n2\n3\n");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(FileLog::create(dir.path(), |_| {}), Err(EngineError::Io(_))));
    }
}
