//! Unpacks untrusted archives. Entries cannot escape the destination directory, and limits bound what an archive may contain.

pub mod links;
mod makeself;
mod tree;

#[cfg(test)]
mod image_tests;
#[cfg(test)]
mod tests;

use std::{
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use fs_err::File;
use oci::{Extensions, LayerReader, MAX_NAME, NameError, Names, Whiteout};
use tar::EntryType;
use tree::Tree;
pub use tree::UnpackMode;

/// Limits on the content of an archive.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of entries, including directories that only occur in the names of others. Each 256 bytes of a name count as
    /// one more entry, because farrier keeps names in memory.
    pub entries: u64,
    /// Maximum total size of all files, unpacked, in bytes.
    pub bytes: u64,
    /// Maximum number of path components of an entry.
    pub depth: usize,
}

impl Default for Limits {
    /// 500,000 entries, 16 GiB, 64 levels: several times the largest driver tree.
    fn default() -> Self {
        Self { entries: 500_000, bytes: 16 << 30, depth: 64 }
    }
}

pub type Result<T, E = UnpackError> = std::result::Result<T, E>;

/// Reason why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The path leaves the destination, is absolute, or contains `..`.
    #[error("entry {0:?} is outside the archive's root")]
    Outside(String),
    /// The path leads through a symbolic link of the same archive.
    #[error("entry {0:?} would be written through a symbolic link")]
    ThroughLink(String),
    /// The entry is a device, socket or FIFO.
    #[error("entry {0:?} is a {1}, which sources and payloads cannot contain")]
    Kind(String, &'static str),
    /// The archive exceeds a limit.
    #[error("archive contains more than {0}")]
    Limit(String),
    /// The archive is truncated or damaged.
    #[error("archive is damaged or truncated")]
    Damaged(#[source] io::Error),
    /// The archive is shorter than its header states.
    #[error("archive is truncated: the header states {stated} bytes, the file has {found}")]
    Truncated { stated: u64, found: u64 },
    /// A checksum differs from the one in the archive's header.
    #[error("archive is damaged or truncated: its {kind} is {found}, its header states {stated}")]
    Checksum { kind: &'static str, found: String, stated: String },
    /// farrier does not unpack this form of archive.
    #[error("archive cannot be unpacked: {0}")]
    Unsupported(&'static str),
    /// The program that extracts the tar cannot be run.
    #[error("cannot start {0}")]
    Start(&'static str, #[source] io::Error),
    /// The archive cannot be opened, or one of its files cannot be written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Options for unpacking an archive.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// Limits on the content.
    pub limits: Limits,
    /// Selects entries by name. Skipped entries have a separate size limit: [`SKIPPED_FACTOR`] times [`Limits::bytes`].
    pub is_selected: &'a dyn Fn(&Path) -> bool,
    /// Treatment of files that already exist in the destination.
    pub mode: UnpackMode,
    /// Cancels the work: unpacking fails soon after this becomes true.
    pub stop: &'a AtomicBool,
}

impl Default for Options<'_> {
    /// Unpacks everything, within the default limits.
    fn default() -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self { limits: Limits::default(), is_selected: &|_| true, mode: UnpackMode::Standalone, stop: &NEVER }
    }
}

/// Archive formats that [`unpack_file`] supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// An uncompressed tar.
    Tar,
    /// A gzip-compressed tar of one or more members.
    Gzip,
    /// An xz-compressed tar.
    Xz,
    /// A Zstandard-compressed tar.
    Zstd,
    /// A Debian binary package; its files are unpacked.
    Deb,
    /// A binary or source RPM package; its files are unpacked.
    Rpm,
    /// A self-extracting archive made by `makeself` (`.run`); the tar after its script is unpacked.
    Makeself,
    /// An archive that farrier does not unpack, with advice.
    Unsupported(&'static str),
}

impl Format {
    /// Number of bytes needed to detect a format. In NVIDIA's installers the word `Makeself` is about 700 bytes from the start.
    const START: usize = 4096;

    /// Detects the format from a file's first bytes: 4 KiB, or all of a shorter file.
    pub fn detect(start: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Format); 9] = [
            (b"\x1f\x8b", Format::Gzip),
            (b"\xfd7zXZ\0", Format::Xz),
            (b"\x28\xb5\x2f\xfd", Format::Zstd),
            (b"!<arch>\n", Format::Deb),
            (b"\xed\xab\xee\xdb", Format::Rpm),
            (b"BZh", Format::Unsupported("it is compressed with bzip2: pack it again as .tar.xz")),
            (b"PK\x03\x04", Format::Unsupported("it is a zip archive: pack its content as .tar.xz")),
            (b"7z\xbc\xaf\x27\x1c", Format::Unsupported("it is a 7z archive: pack its content as .tar.xz")),
            (b"LZIP", Format::Unsupported("it is compressed with lzip: pack it again as .tar.xz")),
        ];
        let by_magic = MAGIC.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, format)| *format);
        if makeself::is_makeself(start.get(..Self::START).unwrap_or(start)) {
            return Some(Self::Makeself);
        }
        // POSIX and GNU tar both write this magic at offset 257 of an entry's header.
        let is_tar = || start.get(257..262) == Some(b"ustar") || is_v7(start);
        by_magic.or_else(|| is_tar().then_some(Self::Tar))
    }

    /// Detects the format of a file; returns `None` if the file is not an archive.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        let mut start = Vec::with_capacity(Self::START);
        File::open(path)?.take(Self::START as u64).read_to_end(&mut start)?;
        Ok(Self::detect(&start))
    }
}

/// Whether a file begins like a pre-POSIX (v7) tar, which has no magic: the first header has a name and the right checksum.
fn is_v7(start: &[u8]) -> bool {
    let Some(block) = start.get(..512) else { return false };
    let header = tar::Header::from_byte_slice(block);
    // The checksum is computed with eight spaces in its own field.
    let sum = block
        .iter()
        .enumerate()
        .map(|(offset, byte)| if (148..156).contains(&offset) { 32 } else { u32::from(*byte) });
    block.first() != Some(&0) && header.cksum().is_ok_and(|stated| stated == sum.sum::<u32>())
}

/// Unpacks an uncompressed tar stream into the existing directory `dest`.
///
/// Accepts regular files, directories, hard links and symbolic links. Modes are kept without set-id bits, modification times are
/// kept, owners are not. A symbolic link may point anywhere, but nothing is ever written through one. On an error, entries
/// unpacked so far remain: pass a directory that the caller discards on failure.
pub fn unpack_tar(reader: impl Read, dest: &Path, limits: &Limits) -> Result<()> {
    unpack_stream(reader, dest, &Options { limits: *limits, ..Options::default() })
}

/// Unpacks an uncompressed tar stream with the given options; see [`unpack_tar`].
pub fn unpack_stream(reader: impl Read, dest: &Path, options: &Options<'_>) -> Result<()> {
    unpack_within_limits(reader, dest, options).map(drop)
}

/// Unpacks a stream and returns the remaining limits.
fn unpack_within_limits(reader: impl Read, dest: &Path, options: &Options<'_>) -> Result<Limits> {
    let Options { limits, is_selected, mode, stop: _ } = options;
    let mut archive = tar::Archive::new(Counted { inner: reader, bytes: 0 });
    let mut tree = Tree::new(dest, limits.depth, *mode);
    let mut extensions = Extensions::default();
    let (mut entries, mut bytes, mut entries_end) = (0, 0, 0);
    // Raw mode, because the crate reads long names into memory without a limit.
    for entry in archive.entries().map_err(UnpackError::Damaged)?.raw(true) {
        let mut entry = entry.map_err(UnpackError::Damaged)?;
        entries_end = entry.raw_file_position().saturating_add(entry.size()).next_multiple_of(BLOCK);
        entries += 1;
        check_entries(limits, entries)?;
        if extensions.record(&mut entry)? {
            continue;
        }
        if entries_end > limits.bytes.saturating_mul(SKIPPED_FACTOR) {
            return Err(UnpackError::Limit(format!(
                "{} bytes, including skipped content",
                limits.bytes.saturating_mul(SKIPPED_FACTOR)
            )));
        }
        let names = std::mem::take(&mut extensions).names(&entry)?;
        if !is_selected(Path::new(&names.path)) {
            continue;
        }
        if entry.header().entry_type().is_file() {
            bytes = add_bytes(limits, bytes, entry.size())?;
        }
        let linked_bytes = unpack_entry(&mut tree, &names, &mut entry)?;
        entries += tree.take_implied_directories() + names.path.len() as u64 / 256;
        check_entries(limits, entries)?;
        bytes = add_bytes(limits, bytes, linked_bytes)?;
    }
    if !extensions.is_empty() {
        return Err(truncated());
    }
    let mut stream = archive.into_inner();
    // The crate accepts an end of file between two entries. A complete archive ends with a block of zeros.
    if stream.bytes < entries_end.saturating_add(BLOCK) {
        return Err(truncated());
    }
    // Read to the end: the checksums of a compressed stream come last, and a program that writes into a pipe must be able to
    // finish.
    let trailing_bytes = io::copy(&mut stream.by_ref().take(limits.bytes), &mut io::sink());
    if trailing_bytes.map_err(UnpackError::Damaged)? >= limits.bytes {
        return Err(too_big(limits));
    }
    Ok(Limits { entries: limits.entries - entries, bytes: limits.bytes - bytes, ..*limits })
}

fn check_entries(limits: &Limits, entries: u64) -> Result<()> {
    if entries > limits.entries {
        return Err(UnpackError::Limit(format!("{} entries", limits.entries)));
    }
    Ok(())
}

/// Adds `more` to `bytes`, or fails if the sum exceeds the limit.
fn add_bytes(limits: &Limits, bytes: u64, more: u64) -> Result<u64> {
    bytes.checked_add(more).filter(|sum| *sum <= limits.bytes).ok_or_else(|| too_big(limits))
}

/// Unpacks one entry. For a hard link, returns the size of the linked file: programs that read the tree read these bytes again.
fn unpack_entry(tree: &mut Tree<'_>, names: &Names, entry: &mut tar::Entry<'_, impl Read>) -> Result<u64> {
    let mode = entry.header().mode().map_err(UnpackError::Damaged)?;
    if tree.unpack_mode() == UnpackMode::Layer
        && let Some(whiteout) = Path::new(&names.path).file_name().and_then(Whiteout::of)
    {
        tree.white_out(&names.path, whiteout)?;
        return Ok(0);
    }
    match entry.header().entry_type() {
        // Before POSIX, a directory was a regular file whose name ends in a slash.
        EntryType::Regular if names.path.as_encoded_bytes().ends_with(b"/") => {
            tree.directory(&names.path, mode)?;
        }
        EntryType::Regular | EntryType::Continuous => {
            let (size, modified) = (entry.size(), entry.header().mtime().unwrap_or(0));
            tree.file(&names.path, mode, modified, entry, size)?;
        }
        EntryType::Directory => tree.directory(&names.path, mode)?,
        EntryType::Symlink => tree.symlink(&names.path, &names.link)?,
        EntryType::Link => {
            let linked_bytes = tree.hard_link(&names.path, &names.link)?;
            // Packages and layers contain many hard links, and farrier neither packs nor sends their unpacked trees as a whole.
            return Ok(if tree.unpack_mode() == UnpackMode::Standalone { linked_bytes } else { 0 });
        }
        EntryType::Char | EntryType::Block | EntryType::Fifo if tree.unpack_mode() == UnpackMode::Layer => {
            tree.omit(&names.path)?;
        }
        other => {
            return Err(UnpackError::Kind(names.path.to_string_lossy().into_owned(), kind(other)));
        }
    }
    Ok(0)
}

/// Unpacks a file in one of the supported [formats](Format), detected from its first bytes. Entries are treated as in
/// [`unpack_tar`].
pub fn unpack_file(archive: &Path, dest: &Path, options: &Options<'_>) -> Result<()> {
    let file = || File::open(archive).map(|inner| Stoppable { inner, stop: options.stop });
    match Format::of(archive)? {
        Some(Format::Deb) => {
            let mut command = Command::new("dpkg-deb");
            command.arg("--fsys-tarfile").arg(archive).stdin(Stdio::null());
            unpack_output(command, "dpkg-deb", dest, options)
        }
        Some(Format::Rpm) => {
            // rpm2archive reads every form of package and compression, and only converts one archive into another. libarchive's
            // bsdtar writes empty files for hard-linked names: RPM stores their content with the last name.
            let mut command = Command::new("rpm2archive");
            let (package, _) = File::open(archive)?.into_parts();
            // Keeps RPM from reading the user's configuration.
            command.args(["--nocompression", "-"]).stdin(package).env("HOME", "/");
            unpack_output(command, "rpm2archive", dest, options)
        }
        Some(Format::Makeself) => unpack_makeself(file()?, dest, options),
        Some(Format::Unsupported(why)) => Err(UnpackError::Unsupported(why)),
        Some(format) => unpack_stream(decoder(format, file()?)?, dest, options),
        None => Err(UnpackError::Damaged(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is not a tar, gzip, xz, zstd, makeself, Debian or RPM archive",
        ))),
    }
}

/// Unpacks an image layer (uncompressed, gzip or Zstandard). Entries are treated as in [`unpack_tar`].
pub fn unpack_layer(layer: &Path, dest: &Path, options: &Options<'_>) -> Result<()> {
    let tar = LayerReader::new(File::open(layer)?).map_err(UnpackError::Damaged)?;
    unpack_stream(tar, dest, options)
}

/// Unpacks an image's layers into a root file system, lowest layer first, within one shared limit. All files are owned by the
/// caller; set-id bits and devices are omitted.
pub fn unpack_image(layers: &[PathBuf], dest: &Path, options: &Options<'_>) -> Result<()> {
    let mut options = Options { mode: UnpackMode::Layer, ..*options };
    for layer in layers {
        let file = Stoppable { inner: File::open(layer)?, stop: options.stop };
        let tar = LayerReader::new(file).map_err(UnpackError::Damaged)?;
        options.limits = unpack_within_limits(tar, dest, &options)?;
    }
    Ok(())
}

/// Returns a reader of a file's content, decompressed if the file is in gzip, xz or Zstandard.
pub fn decompressed<'a>(path: &Path, stop: &'a AtomicBool) -> Result<Box<dyn BufRead + 'a>> {
    let file = Stoppable { inner: File::open(path)?, stop };
    let format = Format::of(path)?.filter(|format| [Format::Gzip, Format::Xz, Format::Zstd].contains(format));
    let decoder = decoder(format.unwrap_or(Format::Tar), file)?;
    Ok(Box::new(BufReader::with_capacity(64 << 10, decoder)))
}

fn decoder<'a>(format: Format, file: impl Read + 'a) -> Result<Box<dyn Read + 'a>> {
    let file = BufReader::with_capacity(128 << 10, file);
    Ok(match format {
        Format::Tar => Box::new(file),
        Format::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Format::Xz => {
            let stream =
                liblzma::stream::Stream::new_stream_decoder(XZ_MEMORY, liblzma::stream::CONCATENATED)
                    .map_err(|e| UnpackError::Damaged(e.into()))?;
            Box::new(liblzma::bufread::XzDecoder::new_stream(file, stream))
        }
        Format::Zstd => Box::new(zstd::Decoder::with_buffer(file).map_err(UnpackError::Damaged)?),
        Format::Deb | Format::Rpm | Format::Makeself => {
            return Err(UnpackError::Unsupported("it is a package inside another archive"));
        }
        Format::Unsupported(why) => return Err(UnpackError::Unsupported(why)),
    })
}

/// Unpacks the tar after a makeself script, once its size and checksums match the script's header.
fn unpack_makeself(mut file: Stoppable<'_, File>, dest: &Path, options: &Options<'_>) -> Result<()> {
    let mut start = Vec::new();
    file.by_ref()
        .take(makeself::MAX_HEADER_SIZE as u64)
        .read_to_end(&mut start)
        .map_err(UnpackError::Damaged)?;
    let header = makeself::Header::parse(&start).map_err(|error| match error {
        makeself::HeaderError::Short => truncated(),
        makeself::HeaderError::NoSkip => UnpackError::Unsupported(
            "the header of the self-extracting archive does not state its own length",
        ),
        makeself::HeaderError::UnknownFormat => UnpackError::Unsupported(
            "the content after the header of the self-extracting archive is not a tar archive, plain or \
             compressed with gzip, xz or zstd",
        ),
    })?;
    drop(start);
    let offset = header.offset as u64;
    let length = file.inner.metadata().map_err(UnpackError::Damaged)?.len();
    let available = length.saturating_sub(offset);
    if let Some(stated) = header.stated.size.filter(|stated| *stated > available) {
        return Err(UnpackError::Truncated { stated, found: available });
    }
    let archive_size = header.stated.size.unwrap_or(available);
    file.inner.seek(SeekFrom::Start(offset)).map_err(UnpackError::Damaged)?;
    let (mut checksums, mut buffer) = (header.checksums(), vec![0; 256 << 10]);
    let mut archive_bytes = file.by_ref().take(archive_size);
    loop {
        match archive_bytes.read(&mut buffer).map_err(UnpackError::Damaged)? {
            0 => break,
            count => checksums.update(buffer.get(..count).unwrap_or_default()),
        }
    }
    checksums.verify().map_err(|makeself::ChecksumMismatch { kind, stated, found }| {
        UnpackError::Checksum { kind, found, stated }
    })?;
    file.inner.seek(SeekFrom::Start(offset)).map_err(UnpackError::Damaged)?;
    unpack_stream(decoder(header.format, file.take(archive_size))?, dest, options)
}

/// Unpacks the tar that a program writes to its standard output.
fn unpack_output(
    mut command: Command,
    program: &'static str,
    dest: &Path,
    options: &Options<'_>,
) -> Result<()> {
    let failed = |source| UnpackError::Start(program, source);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let result = match child.stdout.take() {
        Some(inner) => {
            let output = BufReader::new(Stoppable { inner, stop: options.stop });
            unpack_stream(output, dest, options)
        }
        None => Err(failed(io::ErrorKind::BrokenPipe.into())),
    };
    if result.is_err() {
        // The program may be waiting for a reader. A program that has already exited is not an error.
        let _ = child.kill();
    }
    let status = child.wait().map_err(failed)?;
    result?;
    if status.success() {
        Ok(())
    } else {
        Err(UnpackError::Damaged(io::Error::other(format!("{program} ended with {status}"))))
    }
}

/// Size limit of an archive with its skipped entries, in multiples of [`Limits::bytes`].
pub const SKIPPED_FACTOR: u64 = 8;

/// Size of a tar block in bytes.
const BLOCK: u64 = 512;

/// Twice the memory that `xz -9` needs; source archives do not need more.
const XZ_MEMORY: u64 = 128 << 20;

fn too_big(limits: &Limits) -> UnpackError {
    UnpackError::Limit(format!("{} bytes", limits.bytes))
}

impl From<NameError> for UnpackError {
    fn from(error: NameError) -> Self {
        match error {
            NameError::TooLong => Self::Limit(format!("{MAX_NAME} bytes in an entry's name")),
            NameError::Sparse(name) => Self::Kind(name, "sparse file"),
            NameError::Damaged(error) => Self::Damaged(error),
        }
    }
}

/// Returns the name of an unsupported entry type.
fn kind(entry_type: EntryType) -> &'static str {
    match entry_type {
        EntryType::Block | EntryType::Char => "device",
        EntryType::Fifo => "FIFO",
        EntryType::GNUSparse => "sparse file",
        _ => "special entry",
    }
}

fn truncated() -> UnpackError {
    UnpackError::Damaged(io::ErrorKind::UnexpectedEof.into())
}

/// A reader that counts the bytes read.
struct Counted<R> {
    inner: R,
    bytes: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.bytes += count as u64;
        Ok(count)
    }
}

/// A reader that fails once its flag is true.
pub struct Stoppable<'a, R> {
    /// The underlying reader.
    pub inner: R,
    /// The stop flag.
    pub stop: &'a AtomicBool,
}

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        self.inner.read(buffer)
    }
}
