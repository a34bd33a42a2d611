//! Reader of the kernel log, `/dev/kmsg`; the record format is in `Documentation/ABI/testing/dev-kmsg`.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
};

use rustix::fs::OFlags;

use crate::files::unescape;

/// Maximum number of messages kept per step, so that a module that logs endlessly does not fill the memory.
const MAX_MESSAGES: usize = 20_000;

/// Kernel log, read from the time it was opened.
pub(crate) struct KernelLog(File);

impl KernelLog {
    /// Opens the log at its end.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open("/dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self(file))
    }

    /// Returns the messages since the last call, oldest first.
    pub(crate) fn read(&mut self) -> Vec<String> {
        self.read_where(|_| true)
    }

    /// Returns the warnings and errors since the last call, oldest first.
    pub(crate) fn read_warnings(&mut self) -> Vec<String> {
        self.read_where(is_warning)
    }

    fn read_where(&mut self, is_wanted: impl Fn(&[u8]) -> bool) -> Vec<String> {
        let mut messages = Vec::new();
        // One read returns one record; the longest has about 9 KiB (`PRINTK_MESSAGE_MAX`).
        let mut record = [0; 16 << 10];
        while messages.len() < MAX_MESSAGES {
            match self.0.read(&mut record) {
                Ok(0) => break,
                Ok(length) => {
                    messages
                        .extend(record.get(..length).filter(|record| is_wanted(record)).and_then(message));
                }
                // EPIPE: older records were overwritten; the next read returns the oldest record left.
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::Interrupted) => {}
                Err(_) => break,
            }
        }
        messages
    }
}

/// Whether a record of the kernel is a warning or worse. The number before the first comma holds the level in its lower
/// three bits (4 is a warning) and the facility above (0 is the kernel).
fn is_warning(record: &[u8]) -> bool {
    let number =
        record.split(|&byte| byte == b',').next().and_then(|number| std::str::from_utf8(number).ok());
    number.and_then(|number| number.parse::<u32>().ok()).is_some_and(|number| number <= 4)
}

/// Extracts the text of a record: from the first `;` to the end of that line, with `\xNN` escapes decoded.
pub(crate) fn message(record: &[u8]) -> Option<String> {
    let start = record.iter().position(|&byte| byte == b';')? + 1;
    let text = record.get(start..)?.split(|&byte| byte == b'\n').next()?;
    Some(unescape(text, br"\x", 2, 16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_of_the_kernel_are_recognized() {
        let of = |record: &str| is_warning(record.as_bytes());
        assert!(of("3,12,345,-;mlx5_core 0000:08:00.0: probe failed") && of("4,1,2,-;tainted"));
        assert!(!of("6,12,345,-;info") && !of("12,1,2,-;a program's warning") && !of(";"));
    }

    #[test]
    fn the_text_of_a_record_is_decoded() {
        let text = |record: &str| message(record.as_bytes());
        assert_eq!(text("4,12,345,-;m: no symbol; x\n SUBSYSTEM=pci\n").as_deref(), Some("m: no symbol; x"));
        assert_eq!(text(r"6,1,2,-;a\x09b\x5cx\x").as_deref(), Some("a\tb\\x\\x"));
        assert_eq!(text("6,1,2,-"), None);
    }
}
