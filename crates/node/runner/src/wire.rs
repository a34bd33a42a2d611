//! The wire protocol between farrier and the runner.
//!
//! farrier writes to the runner's standard input:
//!
//! - a frame with a [`Sandbox`]
//! - one byte, as soon as the user namespace has its UID and GID maps
//! - a frame with a [`Plan`](crate::plan::Plan)
//! - the build context as tar, up to end of file
//!
//! The runner writes [`Message`]s to its standard output:
//!
//! - [`Unshared`](Message::Unshared), in a sandbox only
//! - one [`Canary`](Message::Canary), the result of the self-test before the first step
//! - for each step, a [`Step`](Message::Step) and its [`Output`](Message::Output)
//! - after the last step, the [`Payload`](Message::Payload)s
//! - [`End`](Message::End), which may come at any point and is the last message
//!
//! A frame is a 4-byte big-endian length and that many bytes of postcard. The encoding needs no version, because farrier and
//! its runner come from the same release.

use std::io::{self, Read};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Maximum frame size. Plans hold the text of a Dockerfile, and payloads are split into several frames.
const MAX_FRAME: usize = 16 << 20;

/// Directories of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Lower directories of the overlay, the uppermost first: trees that are only read.
    pub lowers: Vec<String>,
    /// An empty directory that receives everything the build writes.
    pub scratch: String,
    /// Whether the lower directories belong to farrier's user, so that the sandbox needs idmapped mounts. Otherwise the
    /// directories belong to the sandbox's user.
    pub maps_owners: bool,
}

/// Result of the self-test that process 1 makes before the first step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    /// Attempts of a hostile step that process 1 made and the kernel refused.
    pub refused: Vec<String>,
    /// Landlock ABI in force. 0 if the kernel has no usable Landlock.
    pub landlock: u32,
}

/// A message from the runner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The user namespace exists, and the runner waits for its maps and one byte.
    Unshared,
    /// Result of the self-test, sent once before the first step.
    Canary(Canary),
    /// Index of the step that begins, from 0.
    Step(u32),
    /// Output of a step as it arrives. A line may be split at any point.
    Output(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Bytes of a tar archive of `/out`.
    Payload(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Outcome of the build. This is the last message.
    End(Outcome),
}

/// Outcome of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All steps succeeded and `/out` was sent: size of the archive in bytes, and its SHA-256.
    Done { size: u64, sha256: [u8; 32] },
    /// A step failed: its index in the plan, and the reason in words, such as `exit code 2`.
    Failed { step: u32, why: String },
    /// A step exceeded the memory limit: its index in the plan, and by how much.
    MemoryLimit { step: u32, why: String },
    /// A step exceeded a limit of files or processes: its index in the plan, and which limit by how much.
    FixedLimit { step: u32, why: String },
    /// The disk ran full during a step: the step's index in the plan, and the free space. Not the build's fault.
    DiskFull { step: u32, why: String },
    /// The sandbox could not be created, or failed, or cannot tell whether the build exceeds a limit: the attempted action, and the
    /// kernel's error or the measurement. Not the build's fault.
    Broken(String),
}

/// Encodes a message without a length prefix.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    postcard::to_allocvec(message).map_err(io::Error::other)
}

/// Decodes the output of [`encode`]. Trailing bytes are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|_| damaged())?;
    if rest.is_empty() { Ok(message) } else { Err(damaged()) }
}

/// Encodes a message as a frame.
pub fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let bytes = encode(message)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    Ok([&length.to_be_bytes(), bytes.as_slice()].concat())
}

/// Reads one frame and decodes its message. Reads nothing beyond the frame.
pub fn read_frame<T: DeserializeOwned>(reader: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    reader.read_exact(&mut length)?;
    let mut bytes = vec![0; checked_length(length)?];
    reader.read_exact(&mut bytes)?;
    decode(&bytes)
}

/// Returns the length of a frame from its prefix. A length above the maximum is an error.
pub fn checked_length(length: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME { Err(damaged()) } else { Ok(length) }
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message between farrier and its runner is damaged")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Action, Limits, Plan, Run, Source, Step};

    fn plan() -> Plan {
        let step = |action| Step { line: 3, text: "X é".to_owned(), action };
        Plan {
            steps: vec![
                step(Action::Directory("/build".to_owned())),
                step(Action::Copy {
                    sources: vec![
                        Source::Context("sources/*".to_owned()),
                        Source::Document { name: "a".to_owned(), content: "text\n".to_owned() },
                    ],
                    dest: "/build/".to_owned(),
                    mode: Some(0o755),
                }),
                step(Action::Run(Run {
                    argv: vec!["/bin/sh".to_owned(), "-c".to_owned(), "make".to_owned()],
                    env: vec![("PATH".to_owned(), "/bin".to_owned())],
                    workdir: "/".to_owned(),
                    script: None,
                })),
            ],
            limits: Limits { memory: Some(1 << 33), processes: None, disk: Some(0), inodes: Some(9) },
        }
    }

    fn messages() -> Vec<Message> {
        let why = || "exit code 2".to_owned();
        vec![
            Message::Unshared,
            Message::Canary(Canary { refused: vec!["a mount".to_owned(), "a disk".to_owned()], landlock: 7 }),
            Message::Step(7),
            Message::Output(b"line\n".to_vec()),
            Message::Payload(vec![0; 70_000]),
            Message::End(Outcome::Done { size: 9, sha256: [7; 32] }),
            Message::End(Outcome::Failed { step: 1, why: why() }),
            Message::End(Outcome::MemoryLimit { step: 2, why: why() }),
            Message::End(Outcome::FixedLimit { step: 2, why: why() }),
            Message::End(Outcome::DiskFull { step: 2, why: why() }),
            Message::End(Outcome::Broken(why())),
        ]
    }

    #[test]
    fn messages_are_decoded_as_encoded() {
        let sandbox = Sandbox {
            lowers: vec!["/a:b".to_owned(), "/c".to_owned()],
            scratch: "/d".to_owned(),
            maps_owners: true,
        };
        assert_eq!(decode::<Sandbox>(&encode(&sandbox).unwrap()).unwrap(), sandbox);
        assert_eq!(decode::<Plan>(&encode(&plan()).unwrap()).unwrap(), plan());
        let mut stream = Vec::new();
        for message in messages() {
            stream.extend(frame(&message).unwrap());
        }
        let mut from = &stream[..];
        for message in messages() {
            assert_eq!(read_frame::<Message>(&mut from).unwrap(), message);
        }
        assert!(from.is_empty());
    }

    #[test]
    fn truncated_and_oversized_frames_are_damaged() {
        let bytes = encode(&plan()).unwrap();
        for length in 0..bytes.len() {
            assert!(decode::<Plan>(&bytes[..length]).is_err(), "{length}");
        }
        assert!(decode::<Plan>(&[bytes, vec![0]].concat()).is_err());
        assert!(read_frame::<Message>(&mut &[0xff; 8][..]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(0..4u8, 0..200)) {
            let _ = (decode::<Plan>(&bytes), decode::<Sandbox>(&bytes), decode::<Message>(&bytes));
        }
    }
}
