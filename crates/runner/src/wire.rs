//! Pure: the forms on the pipes between farrier and the runner.
//!
//! farrier writes to the runner's standard input: a frame with a [`Sandbox`], one byte when the user namespace has its maps, a
//! frame with a [`Plan`], and the build context as tar, to the end. The runner writes [`Message`]s to its standard output.
//! A frame is four bytes of length, the most significant first, and that many bytes.

use std::io::{self, Read, Write};

use crate::plan::{Action, Limits, Plan, Run, Source, Step};

/// Largest frame: plans hold the text of a Dockerfile, and payloads are cut.
const MAX_FRAME: usize = 16 << 20;

/// Where a sandbox is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sandbox {
    /// Root file systems, the uppermost first: directories that are only read.
    pub lowers: Vec<String>,
    /// An empty directory, for what the build writes.
    pub scratch: String,
}

/// What the runner says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The user namespace is there and has no maps yet: they and one byte are waited for.
    Unshared,
    /// What the canary was refused, before the first step.
    Canary(Vec<String>),
    /// A step begins: its place in the plan, from 0.
    Step(u32),
    /// What a step prints, as it comes: lines may be cut anywhere.
    Output(Vec<u8>),
    /// Bytes of a tar archive of `/out`.
    Payload(Vec<u8>),
    /// The end. Nothing follows.
    End(Outcome),
}

/// How a build ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum Outcome {
    /// All steps did what they should, and `/out` was handed out: bytes of the archive, and their SHA-256.
    Done { size: u64, sha256: [u8; 32] },
    /// A step, by its place in the plan, failed. In words: `exit code 2`.
    Failed { step: u32, why: String },
    /// A step, by its place in the plan, went over a limit: which, and by how much.
    Limit { step: u32, why: String },
    /// There is no sandbox here, or it broke: what was tried, and what the kernel said. It is no fault of the build.
    Broken(String),
}

/// Writes a frame.
pub fn write_frame(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_be_bytes())?;
    out.write_all(bytes)
}

/// Reads a frame; nothing beyond it.
pub fn read_frame(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut bytes = vec![0; checked_length(length)?];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The length that stands before a frame, unless no frame is that long.
pub fn checked_length(length: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME { Err(damaged()) } else { Ok(length) }
}

fn damaged() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message between farrier and its runner is damaged")
}

impl Sandbox {
    /// The bytes of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let Self { lowers, scratch } = self;
        let mut out = Writer::default();
        out.list(lowers, |out, lower| out.text(lower));
        out.text(scratch);
        out.0
    }

    /// From the bytes of a frame.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        Reader(bytes).whole(|from| Ok(Self { lowers: from.list(Reader::text)?, scratch: from.text()? }))
    }
}

impl Plan {
    /// The bytes of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let Self { steps, limits: Limits { memory, processes, disk } } = self;
        let mut out = Writer::default();
        for limit in [memory, processes, disk] {
            out.option(limit.as_ref(), |out, limit| out.number(*limit));
        }
        out.list(steps, |out, Step { line, text, action }| {
            out.number(u64::from(*line));
            out.text(text);
            out.action(action);
        });
        out.0
    }

    /// From the bytes of a frame.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        Reader(bytes).whole(|from| {
            let mut limit = || from.option(Reader::number);
            let limits = Limits { memory: limit()?, processes: limit()?, disk: limit()? };
            let steps = from
                .list(|from| Ok(Step { line: from.small()?, text: from.text()?, action: from.action()? }))?;
            Ok(Self { steps, limits })
        })
    }
}

impl Message {
    /// The bytes of a frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        match self {
            Self::Unshared => out.tag(b'u'),
            Self::Canary(refused) => {
                out.tag(b'c');
                out.list(refused, |out, what| out.text(what));
            }
            Self::Step(step) => {
                out.tag(b's');
                out.number(u64::from(*step));
            }
            Self::Output(bytes) => {
                out.tag(b'l');
                out.0.extend(bytes);
            }
            Self::Payload(bytes) => {
                out.tag(b'o');
                out.0.extend(bytes);
            }
            Self::End(Outcome::Done { size, sha256 }) => {
                out.tag(b'd');
                out.number(*size);
                out.0.extend(sha256);
            }
            Self::End(Outcome::Failed { step, why }) => out.ended(b'f', *step, why),
            Self::End(Outcome::Limit { step, why }) => out.ended(b'x', *step, why),
            Self::End(Outcome::Broken(why)) => {
                out.tag(b'b');
                out.text(why);
            }
        }
        out.0
    }

    /// From the bytes of a frame.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let (tag, rest) = bytes.split_first().ok_or_else(damaged)?;
        Reader(rest).whole(|from| {
            Ok(match tag {
                b'u' => Self::Unshared,
                b'c' => Self::Canary(from.list(Reader::text)?),
                b's' => Self::Step(from.small()?),
                b'l' => Self::Output(from.rest()),
                b'o' => Self::Payload(from.rest()),
                b'd' => Self::End(Outcome::Done {
                    size: from.number()?,
                    sha256: from.rest().try_into().map_err(|_| damaged())?,
                }),
                b'f' => Self::End(Outcome::Failed { step: from.small()?, why: from.text()? }),
                b'x' => Self::End(Outcome::Limit { step: from.small()?, why: from.text()? }),
                b'b' => Self::End(Outcome::Broken(from.text()?)),
                _ => return Err(damaged()),
            })
        })
    }
}

/// Numbers of eight bytes, texts and lists with their lengths before them.
#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn tag(&mut self, tag: u8) {
        self.0.push(tag);
    }

    fn number(&mut self, number: u64) {
        self.0.extend(number.to_be_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    fn list<T>(&mut self, items: &[T], each: impl Fn(&mut Self, &T)) {
        self.number(items.len() as u64);
        for item in items {
            each(self, item);
        }
    }

    fn option<T>(&mut self, value: Option<&T>, each: impl Fn(&mut Self, &T)) {
        self.tag(u8::from(value.is_some()));
        if let Some(value) = value {
            each(self, value);
        }
    }

    fn ended(&mut self, tag: u8, step: u32, why: &str) {
        self.tag(tag);
        self.number(u64::from(step));
        self.text(why);
    }

    fn action(&mut self, action: &Action) {
        match action {
            Action::Directory(path) => {
                self.tag(b'd');
                self.text(path);
            }
            Action::Copy { sources, dest, mode } => {
                self.tag(b'c');
                self.list(sources, |out, source| match source {
                    Source::Context(pattern) => {
                        out.tag(b'c');
                        out.text(pattern);
                    }
                    Source::Document { name, content } => {
                        out.tag(b'd');
                        out.text(name);
                        out.text(content);
                    }
                });
                self.text(dest);
                self.option(mode.as_ref(), |out, mode| out.number(u64::from(*mode)));
            }
            Action::Run(Run { argv, env, workdir, script }) => {
                self.tag(b'r');
                self.list(argv, |out, word| out.text(word));
                self.list(env, |out, (name, value)| {
                    out.text(name);
                    out.text(value);
                });
                self.text(workdir);
                self.option(script.as_ref(), |out, script| out.text(script));
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    /// Reads something that has nothing behind it.
    fn whole<T>(mut self, read: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
        let value = read(&mut self)?;
        if self.0.is_empty() { Ok(value) } else { Err(damaged()) }
    }

    fn take(&mut self, length: usize) -> io::Result<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or_else(damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }

    fn tag(&mut self) -> io::Result<u8> {
        Ok(self.take(1)?[0])
    }

    fn number(&mut self) -> io::Result<u64> {
        let bytes = self.take(8)?.try_into().map_err(|_| damaged())?;
        Ok(u64::from_be_bytes(bytes))
    }

    fn small(&mut self) -> io::Result<u32> {
        u32::try_from(self.number()?).map_err(|_| damaged())
    }

    fn text(&mut self) -> io::Result<String> {
        let length = usize::try_from(self.number()?).map_err(|_| damaged())?;
        String::from_utf8(self.take(length)?.to_vec()).map_err(|_| damaged())
    }

    fn list<T>(&mut self, each: impl Fn(&mut Self) -> io::Result<T>) -> io::Result<Vec<T>> {
        // An item has a byte at least: a length that lies reserves nothing.
        (0..self.number()?).map(|_| each(self)).collect()
    }

    fn option<T>(&mut self, each: impl Fn(&mut Self) -> io::Result<T>) -> io::Result<Option<T>> {
        match self.tag()? {
            0 => Ok(None),
            1 => each(self).map(Some),
            _ => Err(damaged()),
        }
    }

    fn action(&mut self) -> io::Result<Action> {
        Ok(match self.tag()? {
            b'd' => Action::Directory(self.text()?),
            b'c' => Action::Copy {
                sources: self.list(|from| match from.tag()? {
                    b'c' => Ok(Source::Context(from.text()?)),
                    b'd' => Ok(Source::Document { name: from.text()?, content: from.text()? }),
                    _ => Err(damaged()),
                })?,
                dest: self.text()?,
                mode: self.option(Reader::small)?,
            },
            b'r' => Action::Run(Run {
                argv: self.list(Reader::text)?,
                env: self.list(|from| Ok((from.text()?, from.text()?)))?,
                workdir: self.text()?,
                script: self.option(Reader::text)?,
            }),
            _ => return Err(damaged()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            limits: Limits { memory: Some(1 << 33), processes: None, disk: Some(0) },
        }
    }

    fn messages() -> Vec<Message> {
        let why = || "exit code 2".to_owned();
        vec![
            Message::Unshared,
            Message::Canary(vec!["a mount".to_owned(), "a disk".to_owned()]),
            Message::Step(7),
            Message::Output(b"line\n".to_vec()),
            Message::Payload(vec![0; 70_000]),
            Message::End(Outcome::Done { size: 9, sha256: [7; 32] }),
            Message::End(Outcome::Failed { step: 1, why: why() }),
            Message::End(Outcome::Limit { step: 2, why: why() }),
            Message::End(Outcome::Broken(why())),
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        let sandbox = Sandbox { lowers: vec!["/a:b".to_owned(), "/c".to_owned()], scratch: "/d".to_owned() };
        assert_eq!(Sandbox::decode(&sandbox.encode()).unwrap(), sandbox);
        assert_eq!(Plan::decode(&plan().encode()).unwrap(), plan());
        let mut stream = Vec::new();
        for message in messages() {
            write_frame(&mut stream, &message.encode()).unwrap();
        }
        let mut from = &stream[..];
        for message in messages() {
            assert_eq!(Message::decode(&read_frame(&mut from).unwrap()).unwrap(), message);
        }
        assert!(from.is_empty());
    }

    #[test]
    fn what_is_cut_or_too_long_is_damaged() {
        let bytes = plan().encode();
        for length in 0..bytes.len() {
            assert!(Plan::decode(&bytes[..length]).is_err(), "{length}");
        }
        assert!(Plan::decode(&[bytes, vec![0]].concat()).is_err());
        assert!(read_frame(&mut &[0xff; 8][..]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(0..4u8, 0..200)) {
            let _ = (Plan::decode(&bytes), Sandbox::decode(&bytes), Message::decode(&bytes));
        }
    }
}
