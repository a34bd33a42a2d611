//! Authenticated report lines: the reader detects forged and missing lines.
//!
//! A line is `<number> <body> <code>` in ASCII, followed by a newline. The number counts records from 0. The body is
//! the record in postcard's encoding as hexadecimal digits. The code is HMAC-SHA256 (RFC 2104) over number and record,
//! keyed with a secret that only farrier and the init process know. So neither a kernel message nor a repeated line
//! passes for a record.

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// Version of the records and work lists; both sides must use the same.
pub const VERSION: &str = "2";

/// Maximum length of a line in bytes, for writer and reader.
pub const MAX_LINE: usize = 128 << 10;

/// Maximum number of kernel messages in a record.
const MAX_MESSAGES: usize = 64;
/// Maximum length of a kernel message in bytes.
const MAX_MESSAGE: usize = 512;

/// Beginnings of the kernel's report of an oops or panic, on all architectures.
const OOPS_SIGNS: [&str; 6] =
    ["BUG: ", "Oops", "Kernel panic", "Unable to handle", "general protection fault", "kernel BUG at"];

/// Whether a kernel message reports an oops or panic. The trace that follows it has no fixed length.
pub fn reports_oops(message: &str) -> bool {
    OOPS_SIGNS.iter().any(|sign| message.contains(sign))
}

/// Secret of one virtual machine: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key(pub [u8; 16]);

/// Hides the key, so that it cannot get into a log.
impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Result of a system call that loads or unloads a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyscallResult {
    /// The call succeeded.
    Success,
    /// The call failed with this `errno`.
    Errno(i32),
    /// The calling process was killed by this signal, as the kernel does after an oops.
    Killed(i32),
}

/// State of a loaded module as user space sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadBack {
    /// Whether `/proc/modules` lists the module.
    pub listed: bool,
    /// `/sys/module/<name>/initstate`, for example `live`.
    pub state: String,
    /// `/sys/module/<name>/srcversion`; empty if the module has none.
    pub source_version: String,
    /// `/sys/module/<name>/taint`, for example `OE`.
    pub taint: String,
}

/// Record of init's report. Steps are numbered from 0 in the order of the work list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Init has started.
    Hello {
        /// [`VERSION`] of the sender.
        version: String,
        /// Release of the running kernel.
        kernel: String,
    },
    /// The module of this step is about to be loaded.
    Loading(usize),
    /// The attempt to load the step's module has ended.
    Loaded {
        /// Number of the step.
        step: usize,
        /// Result of the load.
        result: SyscallResult,
        /// Whether the kernel called the module's initialization, which means that the loader itself had accepted the
        /// module.
        initialized: bool,
        /// Whether the kernel oopsed during the load.
        oops: bool,
        /// State of the module afterwards.
        read_back: ReadBack,
        /// Kernel messages during the load, oldest first.
        messages: Vec<String>,
    },
    /// The module of this step is about to be unloaded.
    Unloading(usize),
    /// The attempt to unload the step's module has ended.
    Unloaded {
        /// Number of the step.
        step: usize,
        /// Result of the unload.
        result: SyscallResult,
        /// Whether the kernel oopsed during the unload.
        oops: bool,
        /// Kernel messages during the unload, oldest first.
        messages: Vec<String>,
    },
    /// Init failed, with the reason.
    Failed(String),
    /// Last record, with the number of records before it.
    End(u64),
}

impl Record {
    /// Formats the record as a line, with the newline.
    pub fn line(&self, key: &Key, number: u64) -> String {
        // Writing to memory does not fail.
        let body = postcard::to_allocvec(&self.clone().bounded()).unwrap_or_default();
        let code = mac(key, number, &body).finalize().into_bytes();
        format!("{number} {} {}\n", hex::encode(body), hex::encode(code))
    }

    /// Parses a line without its newline to its number and record; `None` if the line was not written with the key.
    pub fn parse(line: &[u8], key: &Key) -> Option<(u64, Self)> {
        let line = std::str::from_utf8(line).ok()?.trim_end_matches('\r');
        let mut words = line.split(' ');
        let (number, body, code) = (words.next()?, words.next()?, words.next()?);
        if words.next().is_some() || !number.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let (number, body, code) = (number.parse().ok()?, hex::decode(body).ok()?, hex::decode(code).ok()?);
        mac(key, number, &body).verify_slice(&code).ok()?;
        let (record, rest) = postcard::take_from_bytes(&body).ok()?;
        rest.is_empty().then_some((number, record))
    }

    /// Limits the size of the record: bounds the number and length of kernel messages, and removes NUL characters.
    fn bounded(mut self) -> Self {
        if let Self::Loaded { oops, messages, .. } | Self::Unloaded { oops, messages, .. } = &mut self {
            // After an oops keep its beginning, otherwise the last messages.
            let last = messages.len().saturating_sub(MAX_MESSAGES);
            let oops_start = messages.iter().position(|message| *oops && reports_oops(message));
            messages.drain(..oops_start.map_or(last, |oops_start| oops_start.min(last)));
            messages.truncate(MAX_MESSAGES);
        }
        let texts = match &mut self {
            Self::Hello { version, kernel } => vec![version, kernel],
            Self::Loaded { read_back, messages, .. } => {
                let ReadBack { listed: _, state, source_version, taint } = read_back;
                messages.iter_mut().chain([state, source_version, taint]).collect()
            }
            Self::Unloaded { messages, .. } => messages.iter_mut().collect(),
            Self::Failed(message) => vec![message],
            Self::Loading(_) | Self::Unloading(_) | Self::End(_) => vec![],
        };
        for text in texts {
            text.retain(|letter| letter != '\0');
            text.truncate(text.floor_char_boundary(MAX_MESSAGE));
        }
        self
    }
}

fn mac(key: &Key, number: u64, body: &[u8]) -> Hmac<Sha256> {
    // A block of SHA-256 is 64 bytes: RFC 2104 pads a shorter key with zeros.
    let mut block = [0; 64];
    block[..16].copy_from_slice(&key.0);
    let mut mac = Hmac::<Sha256>::new(&block.into());
    mac.update(&number.to_be_bytes());
    mac.update(body);
    mac
}

impl Key {
    /// Formats the key as in the initramfs: 32 hexadecimal digits.
    pub fn to_text(&self) -> String {
        hex::encode(self.0)
    }

    /// Parses the output of [`Key::to_text`].
    pub fn from_text(text: &str) -> Option<Self> {
        Some(Self(hex::decode(text.trim()).ok()?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key(*b"0123456789abcdef");

    fn records() -> Vec<Record> {
        let messages = vec!["m: disagrees".to_owned(), String::new(), "a b\tc \u{fe}".to_owned()];
        let read_back = ReadBack {
            listed: true,
            state: "live".into(),
            source_version: "ABC".into(),
            taint: String::new(),
        };
        vec![
            Record::Hello { version: VERSION.into(), kernel: "6.1.0-56-amd64".into() },
            Record::Loading(0),
            Record::Loaded {
                step: 0,
                result: SyscallResult::Success,
                initialized: true,
                oops: false,
                read_back,
                messages: messages.clone(),
            },
            Record::Loaded {
                step: 1,
                result: SyscallResult::Errno(8),
                initialized: false,
                oops: true,
                read_back: ReadBack::default(),
                messages: vec![],
            },
            Record::Unloading(0),
            Record::Unloaded { step: 0, result: SyscallResult::Killed(9), oops: true, messages },
            Record::Failed("mount /proc".into()),
            Record::End(7),
        ]
    }

    #[test]
    fn records_round_trip() {
        for (number, record) in (0..).zip(records()) {
            let line = record.line(&KEY, number);
            assert_eq!(line.lines().count(), 1);
            assert_eq!(Record::parse(line.trim_end().as_bytes(), &KEY), Some((number, record)));
        }
    }

    /// Compares the HMAC-SHA256 (RFC 2104) with OpenSSL's value:
    /// `printf '\0\0\0\0\0\0\0\7\6\3' | openssl dgst -sha256 -hmac 0123456789abcdef`.
    #[test]
    fn the_code_matches_openssl() {
        assert_eq!(
            Record::End(3).line(&KEY, 7),
            "7 0603 b54b93060ea499baf20bac11bb8d2ff37cf870fe344b2fc1c38c1758e8895c7a\n"
        );
    }

    #[test]
    fn a_changed_line_is_rejected() {
        let line = records().swap_remove(2).line(&KEY, 2);
        let line = line.trim_end().as_bytes();
        for at in 0..line.len() {
            let mut changed = line.to_vec();
            changed[at] ^= 1;
            assert_eq!(Record::parse(&changed, &KEY), None, "byte {at}");
            assert_eq!(Record::parse(&line[..at], &KEY), None, "cut at {at}");
        }
        assert_eq!(Record::parse(line, &Key([0; 16])), None);
    }

    #[test]
    fn written_records_are_limited() {
        let messages = vec!["x\0".repeat(10_000); 1000];
        let record = Record::Unloaded { step: 0, result: SyscallResult::Success, oops: false, messages };
        let line = record.line(&KEY, u64::MAX);
        assert!(line.len() <= MAX_LINE, "{}", line.len());
        let Some((_, Record::Unloaded { messages, .. })) = Record::parse(line.trim_end().as_bytes(), &KEY)
        else {
            panic!("{line}");
        };
        assert_eq!((messages.len(), messages[0].len()), (MAX_MESSAGES, MAX_MESSAGE));
    }

    #[test]
    fn a_long_trace_keeps_the_beginning_of_the_oops() {
        let trace = (0..3 * MAX_MESSAGES).map(|frame| format!(" ? frame {frame}"));
        let oops_start = "BUG: kernel NULL pointer dereference, address: 0".to_owned();
        let messages = ["m: hello".to_owned(), oops_start.clone()].into_iter().chain(trace).collect();
        let record = Record::Unloaded { step: 0, result: SyscallResult::Killed(9), oops: true, messages };
        let line = record.line(&KEY, 0);
        let Some((_, Record::Unloaded { messages, .. })) = Record::parse(line.trim_end().as_bytes(), &KEY)
        else {
            panic!("{line}");
        };
        assert_eq!((messages.len(), &messages[0]), (MAX_MESSAGES, &oops_start));
    }

    #[test]
    fn a_key_is_text_and_is_not_printed() {
        assert_eq!(Key::from_text(&KEY.to_text()), Some(KEY));
        assert_eq!(Key::from_text("12"), None);
        assert_eq!(format!("{KEY:?}"), "Key(..)");
    }
}
