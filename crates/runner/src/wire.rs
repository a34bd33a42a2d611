//! Pure: the forms on the pipes between farrier and the runner.
//!
//! farrier writes to the runner's standard input: a frame with a [`Sandbox`], one byte when the user namespace has its maps, a
//! frame with a [`Plan`](crate::plan::Plan), and the build context as tar, to the end. The runner writes [`Message`]s to its
//! standard output: [`Unshared`](Message::Unshared) in a sandbox, one [`Canary`](Message::Canary), and then for each step a
//! [`Step`](Message::Step) with its [`Output`](Message::Output). After the last step come the [`Payload`](Message::Payload)s.
//! [`End`](Message::End) may follow at any point, and nothing follows it.
//!
//! A frame is four bytes of length, the most significant first, and that many bytes, in postcard's form: both programs are of one
//! release.

use std::io::{self, Read};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Largest frame: plans hold the text of a Dockerfile, and payloads are cut.
const MAX_FRAME: usize = 16 << 20;

/// Where a sandbox is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Root file systems, the uppermost first: directories that are only read.
    pub lowers: Vec<String>,
    /// An empty directory, for what the build writes.
    pub scratch: String,
    /// Whether the trees belong to farrier's user, and are mapped to the sandbox's by idmapped mounts. Else they belong to the
    /// sandbox's user.
    pub maps_owners: bool,
}

/// What confines a build, as its process 1 found it before the first step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Canary {
    /// What process 1 tried, as a hostile step would, and was refused.
    pub refused: Vec<String>,
    /// Landlock ABI in force; 0 where the kernel has none that can be used.
    pub landlock: u32,
}

/// What the runner says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The user namespace is there and has no maps yet: they and one byte are waited for.
    Unshared,
    /// What confines the build. Once, before the first step.
    Canary(Canary),
    /// A step begins: its place in the plan, from 0.
    Step(u32),
    /// What a step prints, as it comes: lines may be cut anywhere.
    Output(#[serde(with = "serde_bytes")] Vec<u8>),
    /// Bytes of a tar archive of `/out`.
    Payload(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The end. Nothing follows.
    End(Outcome),
}

/// How a build ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum Outcome {
    /// All steps did what they should, and `/out` was handed out: bytes of the archive, and their SHA-256.
    Done { size: u64, sha256: [u8; 32] },
    /// A step, by its place in the plan, failed. In words: `exit code 2`.
    Failed { step: u32, why: String },
    /// A step, by its place in the plan, went over a limit: which, and by how much.
    Limit { step: u32, why: String },
    /// The disk that a step, by its place in the plan, writes to is full: how full. It is no fault of the build.
    DiskFull { step: u32, why: String },
    /// There is no sandbox here, or it broke: what was tried, and what the kernel said. It is no fault of the build.
    Broken(String),
}

/// The bytes of a message, without their length.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    postcard::to_allocvec(message).map_err(io::Error::other)
}

/// Reads [`encode`], with nothing behind it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    let (message, rest) = postcard::take_from_bytes(bytes).map_err(|_| damaged())?;
    if rest.is_empty() { Ok(message) } else { Err(damaged()) }
}

/// A message as a frame.
pub fn frame(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let bytes = encode(message)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    Ok([&length.to_be_bytes(), bytes.as_slice()].concat())
}

/// Reads the message of a frame; nothing beyond it.
pub fn read_frame<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut bytes = vec![0; checked_length(length)?];
    from.read_exact(&mut bytes)?;
    decode(&bytes)
}

/// The length that stands before a frame, unless no frame is that long.
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
            Message::End(Outcome::Limit { step: 2, why: why() }),
            Message::End(Outcome::DiskFull { step: 2, why: why() }),
            Message::End(Outcome::Broken(why())),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
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
    fn what_is_cut_or_too_long_is_damaged() {
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
