//! Decompresses module files, within a budget of bytes and time shared by all modules of one check.

use std::{
    fs::File,
    io::{self, Read, Seek as _, Write},
    path::Path,
    time::{Duration, Instant},
};

use farrier_core::image::Period;
use kmod::{Compression, ModuleError};
use parking_lot::Mutex;

use super::error::{PayloadError, Result};

/// Maximum size of all decompressed modules of one check, in bytes. Each read of a module counts, up to four times with signing
/// and a boot check. The largest known payload with debug information has 600 MB.
const MAX_BYTES: u64 = 4 << 30;
/// Maximum size of one module in bytes, decompressed. Signing reads the module into memory. The largest known one has 185 MB with
/// debug information.
const MAX_MODULE: u64 = 1 << 30;
/// Time limit of a check without a definition, and thus without `build.deadline`.
const WITHOUT_BUILD: Period = Period::seconds(600);

/// Budget of bytes and time for decompressing modules, shared by all readers of one check.
#[derive(Debug)]
pub struct DecompressionBudget {
    limits: Limits,
    spent: Mutex<Spent>,
}

#[derive(Clone, Copy, Debug)]
struct Limits {
    bytes: u64,
    bytes_per_module: u64,
    deadline: Period,
}

#[derive(Debug, Default)]
struct Spent {
    bytes: u64,
    time: Duration,
}

impl DecompressionBudget {
    /// Creates the budget of a build that has already used the time `used` of its deadline.
    pub fn of_build(deadline: Period, used: Duration) -> Self {
        Self::new(Limits { bytes: MAX_BYTES, bytes_per_module: MAX_MODULE, deadline }, used)
    }

    /// Creates the budget of a check without a build.
    pub fn without_build() -> Self {
        Self::of_build(WITHOUT_BUILD, Duration::ZERO)
    }

    #[cfg(any(test, feature = "testing"))]
    pub fn of_bytes(bytes: u64) -> Self {
        Self::new(Limits { bytes, bytes_per_module: bytes, deadline: WITHOUT_BUILD }, Duration::ZERO)
    }

    fn new(limits: Limits, time: Duration) -> Self {
        Self { limits, spent: Mutex::new(Spent { bytes: 0, time }) }
    }

    /// Opens a module file. Decompresses a compressed module into an unnamed temporary file. `module` is the file's name in
    /// messages. The outer error concerns the disk or the budget, the inner error the compressed data, or the size of the module.
    pub(super) fn open(
        &self,
        path: &Path,
        module: &Path,
        compression: Compression,
    ) -> Result<Result<File, ModuleError>> {
        let file = fs_err::File::open(path)?;
        if compression == Compression::None {
            let limit = self.limits.bytes_per_module;
            let is_too_large = file.metadata()?.len() > limit;
            return Ok(if is_too_large {
                Err(ModuleError::too_large(limit))
            } else {
                Ok(file.into_parts().0)
            });
        }
        let mut reader = compression.reader(file)?;
        // Decompress into a file, not into memory: a module with debug information can be larger than all other data of farrier.
        let mut decompressed = tempfile::tempfile()?;
        if let Err(error) = self.copy(module, &mut reader, &mut decompressed)? {
            return Ok(Err(error));
        }
        decompressed.rewind()?;
        Ok(Ok(decompressed))
    }

    /// Copies a decoder's output, charging each chunk before it is written.
    fn copy(
        &self,
        module: &Path,
        reader: &mut dyn Read,
        writer: &mut dyn Write,
    ) -> Result<Result<(), ModuleError>> {
        let mut buffer = vec![0; 128 << 10];
        let mut meter = self.meter(module);
        loop {
            let read = reader.read(&mut buffer);
            meter.charge(*read.as_ref().unwrap_or(&0) as u64)?;
            let count = match read {
                Ok(0) => return Ok(Ok(())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Ok(Err(ModuleError::decompress(error))),
            };
            let limit = self.limits.bytes_per_module;
            if meter.bytes > limit {
                let reason = format_args!("it holds more than {} MiB", limit >> 20);
                return Ok(Err(ModuleError::decompress(reason)));
            }
            writer.write_all(buffer.get(..count).unwrap_or_default())?;
        }
    }

    /// Returns a meter that charges the work on one module.
    pub(super) fn meter<'a>(&'a self, module: &'a Path) -> Meter<'a> {
        Meter { budget: self, module, bytes: 0, since: Instant::now() }
    }
}

/// Charges the work on one module to a budget.
pub(super) struct Meter<'a> {
    budget: &'a DecompressionBudget,
    module: &'a Path,
    bytes: u64,
    since: Instant,
}

impl Meter<'_> {
    /// Charges bytes before they are written, and the time since the last charge.
    pub(super) fn charge(&mut self, bytes: u64) -> Result<()> {
        let Limits { bytes: limit, deadline, .. } = self.budget.limits;
        let now = Instant::now();
        let mut spent = self.budget.spent.lock();
        spent.time += now.duration_since(self.since);
        self.since = now;
        self.bytes += bytes;
        let module = || self.module.to_owned();
        if spent.time >= deadline.duration() {
            return Err(PayloadError::DecompressionTime { module: module(), bytes: self.bytes, deadline });
        }
        if bytes > limit - spent.bytes {
            return Err(PayloadError::DecompressionBytes { module: module(), bytes: self.bytes, limit });
        }
        spent.bytes += bytes;
        Ok(())
    }
}

/// A writer that charges the time spent on producing its data.
pub(super) struct Metered<'a, W> {
    pub(super) meter: Meter<'a>,
    pub(super) writer: W,
}

impl<W: Write> Write for Metered<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.meter.charge(0).map_err(io::Error::other)?;
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Period = Period::seconds(60);

    fn bomb(size: u64) -> Vec<u8> {
        zstd::encode_all(io::repeat(0).take(size), 1).unwrap()
    }

    fn copy(budget: &DecompressionBudget, bomb: &[u8]) -> (Result<Result<(), ModuleError>>, usize) {
        let mut out = Vec::new();
        let outcome = budget.copy(Path::new("m.ko.zst"), &mut zstd::Decoder::new(bomb).unwrap(), &mut out);
        (outcome, out.len())
    }

    #[test]
    fn a_bomb_stops_at_the_limit_of_one_module() {
        let limits = Limits { bytes: 4 << 20, bytes_per_module: 1 << 20, deadline: DEADLINE };
        let (outcome, written) = copy(&DecompressionBudget::new(limits, Duration::ZERO), &bomb(5 << 20));
        assert_eq!(outcome.unwrap(), Err(ModuleError::decompress("it holds more than 1 MiB")));
        assert!(written <= 1 << 20);
    }

    #[test]
    fn modules_share_the_bytes_of_a_check() {
        let budget = DecompressionBudget::of_bytes(4 << 20);
        let bomb = bomb(3 << 20);
        let (first, written) = copy(&budget, &bomb);
        assert_eq!((first.unwrap(), written), (Ok(()), 3 << 20));
        let (second, written) = copy(&budget, &bomb);
        let error = second.unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot decompress module m.ko.zst: stopped after 1179648 bytes: the limit for all modules of one \
             check is 4194304 bytes"
        );
        assert!(error.is_permanent() && !error.is_caused_by_deadline());
        assert!(error.hint().unwrap().contains("strip --strip-debug"));
        assert!(written <= 1 << 20, "{written}");
    }

    #[test]
    fn nothing_is_decompressed_after_the_deadline() {
        let budget = DecompressionBudget::of_build(DEADLINE, DEADLINE.duration());
        let (outcome, written) = copy(&budget, &bomb(1 << 20));
        let error = outcome.unwrap_err();
        assert_eq!(
            error.to_string(),
            "cannot decompress module m.ko.zst: stopped after 131072 bytes: the deadline of 1m has passed"
        );
        assert!(error.is_permanent() && error.is_caused_by_deadline());
        assert!(error.hint().unwrap().contains("build.deadline"));
        assert_eq!(written, 0);
    }
}
