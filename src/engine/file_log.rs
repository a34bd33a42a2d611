//! Adapter: a build's whole log in a file, with its diagnosis.

use std::{
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use fs_err::{self as fs, File};

use super::{BuildLog, Diagnoser, Diagnosis, EngineError};

/// Writes a build's output to a file, looks for its first error and hands each line on.
pub struct FileLog {
    path: PathBuf,
    live: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<State>,
}

struct State {
    file: BufWriter<File>,
    /// Writing failed once: reported then, not for each line.
    broken: bool,
    diagnoser: Diagnoser,
}

impl FileLog {
    /// Creates the file, and its directory if need be; `live` gets each line as it comes.
    pub fn create(path: &Path, live: impl Fn(&str) + Send + Sync + 'static) -> Result<Self, EngineError> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let file = BufWriter::new(File::create(path)?);
        Ok(Self {
            path: path.to_owned(),
            live: Box::new(live),
            state: Mutex::new(State { file, broken: false, diagnoser: Diagnoser::default() }),
        })
    }

    /// Completes the file and says what went wrong, with the log's last lines. A full disk costs the log,
    /// not the build.
    pub fn finish(&self) -> (Option<Diagnosis>, Vec<String>) {
        let mut state = self.lock();
        let flushed = state.file.flush();
        self.note(&mut state, flushed);
        (state.diagnoser.diagnosis().cloned(), state.diagnoser.tail().map(str::to_owned).collect())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, state: &mut State, written: std::io::Result<()>) {
        if let Err(error) = written
            && !state.broken
        {
            state.broken = true;
            tracing::warn!(path = %self.path.display(), %error, "build log is incomplete");
        }
    }
}

impl BuildLog for FileLog {
    fn line(&self, line: &str) {
        (self.live)(line);
        let mut state = self.lock();
        state.diagnoser.feed(line);
        let written = writeln!(state.file, "{line}");
        self.note(&mut state, written);
    }
}

impl Drop for FileLog {
    fn drop(&mut self) {
        self.finish();
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
        let log = FileLog::create(&path, move |line| live.lock().unwrap().push(line.to_owned())).unwrap();
        for line in ["CC a.o", "a.c:1:2: error: bad", "make: *** [a.o] Error 1"] {
            log.line(line);
        }
        let (diagnosis, tail) = log.finish();
        assert_eq!(diagnosis.unwrap().to_string(), "a.c:1:2: bad");
        assert_eq!(tail.len(), 3);
        assert_eq!(*seen.lock().unwrap(), tail);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), tail.join("\n") + "\n");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(FileLog::create(dir.path(), |_| {}), Err(EngineError::Io(_))));
    }
}
