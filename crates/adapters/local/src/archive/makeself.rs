//! Parses the header of a self-extracting archive: a shell script made by `makeself`, followed by a tar. farrier never runs the
//! script.
//!
//! The parser reads the script's assignments (<https://makeself.io>): `skip` is the number of header lines and `totalsize` the
//! archive's size in bytes. `CRCsum` (as computed by `cksum`), `MD5` and `SHA` (SHA-256) are checksums of the archive; a checksum
//! of zeros means none. NVIDIA builds its installers with a modified makeself ("1.6.0-nv"). That version states no size, and its
//! `skip` includes the line in which the archive begins.

use crc::{CRC_32_CKSUM, Crc, Digest as CrcDigest, Table};
use md5::Md5;
use sha2::{Digest as _, Sha256};

use super::Format;

/// Maximum length of a header in bytes. NVIDIA's headers are below 100 KiB; a license text adds little.
pub(super) const MAX_HEADER_SIZE: usize = 4 << 20;

static CKSUM: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_CKSUM);

/// Whether a file that begins with `start` has a makeself header.
pub(super) fn is_makeself(start: &[u8]) -> bool {
    start.starts_with(b"#!") && start.windows(8).any(|window| window.eq_ignore_ascii_case(b"makeself"))
}

/// A parsed header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Offset of the archive in the file, in bytes.
    pub(super) offset: usize,
    /// Format of the archive.
    pub(super) format: Format,
    pub(super) stated: Stated,
}

/// Size and checksums of the archive, as stated by the header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stated {
    /// Size in bytes.
    pub(super) size: Option<u64>,
    /// Checksums as written in the header.
    crc: Option<String>,
    md5: Option<String>,
    sha256: Option<String>,
}

/// Reason why a header cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HeaderError {
    /// The file ends inside the header.
    Short,
    /// The header does not state where the archive begins.
    NoSkip,
    /// No archive of a known format follows the header.
    UnknownFormat,
}

impl Header {
    /// Parses a header from the file's first [`MAX_HEADER_SIZE`] bytes, or from all of a shorter file.
    pub(super) fn parse(start: &[u8]) -> Result<Self, HeaderError> {
        let mut stated = Stated::default();
        let skip = start
            .split(|byte| *byte == b'\n')
            .find_map(|line| stated.parse_line(line))
            .ok_or(if start.len() < MAX_HEADER_SIZE { HeaderError::Short } else { HeaderError::NoSkip })?;
        let skip = usize::try_from(skip).map_err(|_| HeaderError::NoSkip)?;
        // Try upstream makeself's count first. With NVIDIA's makeself, the archive begins in the last counted line.
        let mut line_ends =
            start.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(index, _)| index + 1);
        let end_of_previous_line =
            line_ends.by_ref().nth(skip.saturating_sub(2)).ok_or(HeaderError::Short)?;
        let candidates = [line_ends.next(), Some(end_of_previous_line)];
        let detected = candidates.into_iter().flatten().find_map(|offset| {
            let format = Format::detect(&start[offset..])?;
            (!matches!(format, Format::Deb | Format::Rpm | Format::Makeself | Format::Unsupported(_)))
                .then_some((offset, format))
        });
        let (offset, format) = detected.ok_or(match candidates[0] {
            Some(offset) if offset < start.len() => HeaderError::UnknownFormat,
            _ => HeaderError::Short,
        })?;
        // makeself writes `skip` last, NVIDIA's version first. The other assignments can be anywhere in the header.
        for line in start[..offset].split(|byte| *byte == b'\n') {
            stated.parse_line(line);
        }
        Ok(Self { offset, format, stated })
    }

    /// Returns an accumulator for the archive's checksums.
    pub(super) fn checksums(&self) -> Checksums {
        Checksums {
            stated: self.stated.clone(),
            crc: CKSUM.digest(),
            md5: Md5::new(),
            sha256: Sha256::new(),
            bytes: 0,
        }
    }
}

impl Stated {
    /// Parses one line; returns the value if the line assigns `skip`.
    fn parse_line(&mut self, line: &[u8]) -> Option<u64> {
        let (name, value) = assignment(line)?;
        match name {
            "skip" => return value.parse().ok().filter(|lines| (2..1_000_000).contains(lines)),
            "totalsize" | "filesizes" if self.size.is_none() => self.size = value.parse().ok(),
            "CRCsum" if self.crc.is_none() => self.crc = parse_checksum(value, 10),
            "MD5" if self.md5.is_none() => self.md5 = parse_checksum(value, 32),
            "SHA" if self.sha256.is_none() => self.sha256 = parse_checksum(value, 64),
            _ => {}
        }
        None
    }
}

/// Splits `name=value`. The value is bare or in double quotes.
fn assignment(line: &[u8]) -> Option<(&str, &str)> {
    if line.len() > 200 {
        return None;
    }
    let (name, value) = std::str::from_utf8(line).ok()?.split_once('=')?;
    let value = value.trim_end();
    Some((name, value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value)))
}

/// Parses a checksum of at most `digits` digits. Returns `None` for zeros, and for several checksums (of an archive in parts).
fn parse_checksum(value: &str, digits: usize) -> Option<String> {
    let is_hex = !value.is_empty() && value.len() <= digits && value.bytes().all(|b| b.is_ascii_hexdigit());
    (is_hex && value.bytes().any(|b| b != b'0')).then(|| value.to_ascii_lowercase())
}

/// Running checksums of the archive.
pub(super) struct Checksums {
    stated: Stated,
    crc: CrcDigest<'static, u32, Table<16>>,
    md5: Md5,
    sha256: Sha256,
    bytes: u64,
}

/// A checksum that differs from the stated one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ChecksumMismatch {
    pub(super) kind: &'static str,
    pub(super) stated: String,
    pub(super) found: String,
}

impl Checksums {
    /// Adds a chunk of the archive.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        let Self { stated, crc, md5, sha256, bytes: total } = self;
        *total += bytes.len() as u64;
        if stated.crc.is_some() {
            crc.update(bytes);
        }
        if stated.md5.is_some() {
            md5.update(bytes);
        }
        if stated.sha256.is_some() {
            sha256.update(bytes);
        }
    }

    /// Compares the checksums; call it after the last chunk.
    pub(super) fn verify(self) -> Result<(), ChecksumMismatch> {
        let Self { stated, mut crc, md5, sha256, bytes } = self;
        // cksum appends the length, lowest byte first, without leading zero bytes.
        let length = bytes.to_le_bytes();
        let used = length.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        crc.update(&length[..used]);
        let found = [
            ("CRC", crc.finalize().to_string()),
            ("MD5", hex::encode(md5.finalize())),
            ("SHA-256", hex::encode(sha256.finalize())),
        ];
        for (stated, (kind, found)) in [stated.crc, stated.md5, stated.sha256].into_iter().zip(found) {
            if let Some(stated) = stated.filter(|stated| *stated != found) {
                return Err(ChecksumMismatch { kind, stated, found });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GZIP: &[u8] = b"\x1f\x8b\x08\x00";

    fn file(header: &str, archive: &[u8]) -> Vec<u8> {
        [header.as_bytes(), archive].concat()
    }

    #[test]
    fn nvidia_counts_the_line_that_the_archive_begins_in() {
        let header = "#! /bin/sh\nskip=6\nCRCsum=3232997086\nMD5=1cb347a27c40e73f2d12b16bdf961a1e\n\
                      # Generated by Makeself 1.6.0-nv\n";
        let bytes = file(header, GZIP);
        assert!(is_makeself(&bytes));
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!((parsed.offset, parsed.format, parsed.stated.size), (header.len(), Format::Gzip, None));
        assert_eq!(parsed.stated.crc.as_deref(), Some("3232997086"));
        assert_eq!(parsed.stated.md5.as_deref(), Some("1cb347a27c40e73f2d12b16bdf961a1e"));
    }

    #[test]
    fn zeros_are_no_sum_and_sums_of_several_parts_are_not_compared() {
        let header = "#!/bin/sh\n# Makeself\nMD5=\"00000000000000000000000000000000\"\nCRCsum=\"1 2\"\n\
                      totalsize=\"4\"\nskip=\"6\"\n";
        let parsed = Header::parse(&file(header, GZIP)).unwrap();
        assert_eq!(
            (parsed.offset, parsed.stated),
            (header.len(), Stated { size: Some(4), ..Stated::default() })
        );
    }

    #[test]
    fn headers_without_an_archive() {
        let parse = |text: &str| Header::parse(text.as_bytes());
        assert_eq!(parse("#!/bin/sh\n# Makeself\n"), Err(HeaderError::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=9\n"), Err(HeaderError::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=3\n"), Err(HeaderError::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=3\nBZh9"), Err(HeaderError::UnknownFormat));
        assert!(!is_makeself(b"#!/bin/sh\necho no archive\n"));
        assert!(!is_makeself(b"makeself"));
    }

    #[test]
    fn sums_are_those_of_cksum_and_md5sum() {
        // Expected values from `printf abc | cksum` and `md5sum`.
        let stated = Stated {
            crc: Some("1219131554".to_owned()),
            md5: Some("900150983cd24fb0d6963f7d28e17f72".to_owned()),
            ..Stated::default()
        };
        let header = Header { offset: 0, format: Format::Gzip, stated };
        let mut checksums = header.checksums();
        checksums.update(b"a");
        checksums.update(b"bc");
        assert_eq!(checksums.verify(), Ok(()));
        let mut checksums = header.checksums();
        checksums.update(b"abd");
        assert_eq!(checksums.verify().unwrap_err().kind, "CRC");
    }

    proptest! {
        #[test]
        fn no_header_is_too_strange(skip in any::<u64>(), tail in prop::collection::vec(any::<u8>(), 0..600)) {
            let bytes = file(&format!("#!/bin/sh\n# Makeself\nskip={skip}\n"), &tail);
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert!(header.offset <= bytes.len());
            }
        }
    }
}
