//! Pure: why a file is no kernel module.

use super::Verdict;

/// Why a file is no module that a kernel would take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModuleError {
    /// The bytes could not be had, though the file should hold them.
    #[error("read {what} of the module")]
    Read {
        /// Which bytes.
        what: &'static str,
    },
    /// It does not start as an ELF file does.
    #[error("the file is no ELF object")]
    NotElf,
    /// 32-bit or big-endian.
    #[error("the object is not 64-bit little-endian")]
    Class,
    /// A program or a shared library, for example.
    #[error("the object is of ELF type {0}, not relocatable (1)")]
    NotRelocatable(u16),
    /// For another processor than x86-64 and arm64.
    #[error("the object is for ELF machine {0}, which is neither x86-64 (62) nor arm64 (183)")]
    Machine(u16),
    /// The ELF header contradicts the file.
    #[error("the ELF header is damaged: {0}")]
    Header(&'static str),
    /// A section that does not lie within the file.
    #[error("section {section} lies outside the file: {size} bytes at {offset}, and the file has {length}")]
    Outside {
        /// Its name, or number.
        section: String,
        /// Where it starts.
        offset: u64,
        /// Its bytes.
        size: u64,
        /// The file's bytes.
        length: u64,
    },
    /// A table that is larger than any module's.
    #[error("section {section} has {size} bytes, more than any module's")]
    TooLarge {
        /// Its name, or number.
        section: String,
        /// Its bytes.
        size: u64,
    },
    /// A section whose contents make no sense.
    #[error("section {section} {reason}")]
    Malformed {
        /// Its name, or number.
        section: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// Stripped of its symbol table.
    #[error("the module has no symbols")]
    NoSymbols,
    /// An object file, but no module.
    #[error("the object has no .gnu.linkonce.this_module, so it is no kernel module")]
    NoModule,
    /// Compiled without `-fno-common`.
    #[error("symbol {0} is a common one, which the loader refuses")]
    Common(String),
    /// The file's compression is damaged, or hides too much.
    #[error("decompress the module: {0}")]
    Decompress(String),
}

impl ModuleError {
    /// Does the kernel refuse such a file, or is it only this reader that cannot tell?
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Read { .. } | Self::TooLarge { .. } => Verdict::Unknown,
            _ => Verdict::Refused,
        }
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Read { .. } => "look for a fault of the disk, and build again",
            Self::TooLarge { .. } => "look at the file with readelf; a module of this size is not read",
            Self::Class | Self::Machine(_) => "build for the node's architecture",
            Self::NoSymbols => "strip it with --strip-debug, never with --strip-all",
            Self::Common(_) => "compile with the kernel's own flags, which have -fno-common",
            _ => "build it again: the file is damaged, or is no kernel module",
        }
    }
}
