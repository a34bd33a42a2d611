//! The input of the runner. The runner has no other configuration.

use serde::{Deserialize, Serialize};

/// Steps and limits of a build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// The limits of the build.
    pub limits: Limits,
}

/// Bytes that must stay free on the disk, because other programs write to it too. A build is stopped if fewer bytes are free,
/// whatever its limits.
pub const MIN_FREE: u64 = 512 << 20;

/// Resource limits of a build. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory for all processes of the build together.
    pub memory: Option<u64>,
    /// Maximum number of concurrent processes.
    pub processes: Option<u64>,
    /// Bytes that the build's files may occupy on the disk.
    pub disk: Option<u64>,
    /// Number of files, links and directories that the build may create.
    pub inodes: Option<u64>,
}

/// One instruction of the Dockerfile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Line of the Dockerfile where the instruction starts, from 1.
    pub line: u32,
    /// The instruction as shown to users: `RUN make modules`.
    pub text: String,
    /// The action of the step.
    pub action: Action,
}

/// Action of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// `WORKDIR`: creates a directory (an absolute path) and its parents.
    Directory(String),
    /// `COPY`, from the build context or from here-documents.
    Copy {
        /// The sources, in order.
        sources: Vec<Source>,
        /// Absolute destination path. It is a directory if it ends in `/` or if there are several sources.
        dest: String,
        /// Permission bits of everything that is copied (`--chmod`); `None` keeps the bits of each source.
        mode: Option<u32>,
    },
    /// `RUN`: runs a command.
    Run(Run),
}

/// A source of `COPY`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Relative paths in the build context, in Go's `filepath.Match` syntax (`*`, `?`, `[a-z]`, `\`). For a directory, only
    /// its content is copied.
    Context(String),
    /// A file whose content is in the Dockerfile.
    Document {
        /// Name of the file in the destination directory.
        name: String,
        /// Content of the file.
        content: String,
    },
}

/// A command of `RUN`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The program and its arguments. In the shell form the shell comes first.
    pub argv: Vec<String>,
    /// The complete environment. Each name occurs once.
    pub env: Vec<(String, String)>,
    /// Absolute working directory of the command.
    pub workdir: String,
    /// A script in the Dockerfile that names its interpreter (`RUN <<EOF` whose first line is `#!`). The runner executes the
    /// script from a file. `argv` is empty.
    pub script: Option<String>,
}
