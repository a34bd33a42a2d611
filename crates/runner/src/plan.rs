//! Pure: what the runner is given on start. It has no other configuration.

use serde::{Deserialize, Serialize};

/// A build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What it does, in order.
    pub steps: Vec<Step>,
    /// What it may use.
    pub limits: Limits,
}

/// Bytes that stay free on the disk whatever a build may write: others write there, too. A build that leaves less is stopped.
pub const LEAST_FREE: u64 = 512 << 20;

/// What a build may use. `None`: as much as there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory that all its processes use together.
    pub memory: Option<u64>,
    /// Processes at a time.
    pub processes: Option<u64>,
    /// Bytes that its files take on the disk.
    pub disk: Option<u64>,
    /// Files, links and directories that it makes.
    pub inodes: Option<u64>,
}

/// One instruction of the Dockerfile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The line of the Dockerfile on which it starts, from 1.
    pub line: u32,
    /// The instruction as it is shown to people: `RUN make modules`.
    pub text: String,
    /// What it does.
    pub action: Action,
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// `WORKDIR`: makes a directory (an absolute path), and those above it.
    Directory(String),
    /// `COPY`, out of the build context or out of here-documents.
    Copy {
        /// What is copied.
        sources: Vec<Source>,
        /// Absolute. With a `/` at its end it is a directory; so it is where there are several sources.
        dest: String,
        /// Permission bits of everything that is copied (`--chmod`); `None`: each keeps its own.
        mode: Option<u32>,
    },
    /// `RUN`.
    Run(Run),
}

/// What `COPY` copies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Places of the build context: relative, in Go's `filepath.Match` form (`*`, `?`, `[a-z]`, `\`). Of a directory its content is
    /// copied, not the directory itself.
    Context(String),
    /// A file that the Dockerfile itself holds.
    Document {
        /// Its name in the destination directory.
        name: String,
        /// Its content.
        content: String,
    },
}

/// A command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The program and its words. The shell form has the shell in front.
    pub argv: Vec<String>,
    /// The whole environment, names once.
    pub env: Vec<(String, String)>,
    /// The directory that it starts in: absolute.
    pub workdir: String,
    /// A script that stands in the Dockerfile and names its interpreter (`RUN <<EOF` whose first line is `#!`): it is written to
    /// a file, which is the program. `argv` is empty then.
    pub script: Option<String>,
}
