//! Pure: the header of a self-extracting archive: a shell script made by `makeself`, with a tar behind it. The script
//! is never run.
//!
//! What it says is read from its assignments (<https://makeself.io>): `skip`, the header's lines; `totalsize`, the
//! archive's bytes; `CRCsum` (that of `cksum`), `MD5` and `SHA` (SHA-256) of the archive. A sum of zeros is none.
//! NVIDIA's installers come from a makeself of their own ("1.6.0-nv"), which names no size and counts in `skip`
//! the line that the archive begins in.

use crc::{CRC_32_CKSUM, Crc, Digest as CrcDigest, Table};
use md5::Md5;
use sha2::{Digest as _, Sha256};

use super::Format;

/// Longest header that is read: NVIDIA's are below 100 KiB, one with a licence text in it not much above.
pub(super) const LONGEST: usize = 4 << 20;

static CKSUM: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_CKSUM);

/// Does a file that starts so have such a header?
pub(super) fn is_one(start: &[u8]) -> bool {
    start.starts_with(b"#!") && start.windows(8).any(|window| window.eq_ignore_ascii_case(b"makeself"))
}

/// What the header says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes before the archive.
    pub(super) offset: usize,
    /// The archive's form.
    pub(super) format: Format,
    pub(super) stated: Stated,
}

/// What it states of the archive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Stated {
    /// Bytes.
    pub(super) size: Option<u64>,
    /// Sums, as it writes them.
    crc: Option<String>,
    md5: Option<String>,
    sha256: Option<String>,
}

/// Why a header is of no use.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// The file ends in it.
    Short,
    /// It does not say where the archive begins.
    NoSkip,
    /// What is behind it is no archive of a known form.
    Form,
}

impl Header {
    /// Reads the file's first [`LONGEST`] bytes, or all of it.
    pub(super) fn parse(start: &[u8]) -> Result<Self, Unreadable> {
        let mut stated = Stated::default();
        let skip = start
            .split(|byte| *byte == b'\n')
            .find_map(|line| stated.read(line))
            .ok_or(if start.len() < LONGEST { Unreadable::Short } else { Unreadable::NoSkip })?;
        let skip = usize::try_from(skip).map_err(|_| Unreadable::NoSkip)?;
        // makeself's own count first; in NVIDIA's the archive is in the last line that is counted.
        let mut ends =
            start.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(place, _)| place + 1);
        let one_less = ends.by_ref().nth(skip.saturating_sub(2)).ok_or(Unreadable::Short)?;
        let candidates = [ends.next(), Some(one_less)];
        let known = candidates.into_iter().flatten().find_map(|offset| {
            let format = Format::detect(&start[offset..])?;
            (!matches!(format, Format::Deb | Format::Rpm | Format::Makeself)).then_some((offset, format))
        });
        let (offset, format) = known.ok_or(match candidates[0] {
            Some(offset) if offset < start.len() => Unreadable::Form,
            _ => Unreadable::Short,
        })?;
        // makeself writes `skip` last, NVIDIA's first: what counts is anywhere in the header.
        for line in start[..offset].split(|byte| *byte == b'\n') {
            stated.read(line);
        }
        Ok(Self { offset, format, stated })
    }

    /// Something to feed the archive to.
    pub(super) fn sums(&self) -> Sums {
        Sums {
            stated: self.stated.clone(),
            crc: CKSUM.digest(),
            md5: Md5::new(),
            sha256: Sha256::new(),
            bytes: 0,
        }
    }
}

impl Stated {
    /// Takes in a line; the value of `skip` where it is that.
    fn read(&mut self, line: &[u8]) -> Option<u64> {
        let (name, value) = assignment(line)?;
        match name {
            "skip" => return value.parse().ok().filter(|lines| (2..1_000_000).contains(lines)),
            "totalsize" | "filesizes" if self.size.is_none() => self.size = value.parse().ok(),
            "CRCsum" if self.crc.is_none() => self.crc = sum(value, 10),
            "MD5" if self.md5.is_none() => self.md5 = sum(value, 32),
            "SHA" if self.sha256.is_none() => self.sha256 = sum(value, 64),
            _ => {}
        }
        None
    }
}

/// `name=value`, at the start of a line, the value bare or in double quotes.
fn assignment(line: &[u8]) -> Option<(&str, &str)> {
    if line.len() > 200 {
        return None;
    }
    let (name, value) = std::str::from_utf8(line).ok()?.split_once('=')?;
    let value = value.trim_end();
    Some((name, value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value)))
}

/// A checksum: at most so many digits; several (of an archive in parts) or zeros are none.
fn sum(value: &str, digits: usize) -> Option<String> {
    let plain = !value.is_empty() && value.len() <= digits && value.bytes().all(|b| b.is_ascii_hexdigit());
    (plain && value.bytes().any(|b| b != b'0')).then(|| value.to_ascii_lowercase())
}

/// The sums of an archive that is read.
pub(super) struct Sums {
    stated: Stated,
    crc: CrcDigest<'static, u32, Table<16>>,
    md5: Md5,
    sha256: Sha256,
    bytes: u64,
}

/// A sum that differs.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Differs {
    pub(super) kind: &'static str,
    pub(super) stated: String,
    pub(super) found: String,
}

impl Sums {
    /// Takes in a part of the archive.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        let Self { stated, crc, md5, sha256, bytes: count } = self;
        *count += bytes.len() as u64;
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

    /// Compares, once all of the archive was taken in.
    pub(super) fn verify(self) -> Result<(), Differs> {
        let Self { stated, mut crc, md5, sha256, bytes } = self;
        // cksum goes on with the length, the lowest byte first, as far as it is not 0.
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
                return Err(Differs { kind, stated, found });
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
        assert!(is_one(&bytes));
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
        assert_eq!(parse("#!/bin/sh\n# Makeself\n"), Err(Unreadable::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=9\n"), Err(Unreadable::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=3\n"), Err(Unreadable::Short));
        assert_eq!(parse("#!/bin/sh\n# Makeself\nskip=3\nBZh9"), Err(Unreadable::Form));
        assert!(!is_one(b"#!/bin/sh\necho no archive\n"));
        assert!(!is_one(b"makeself"));
    }

    #[test]
    fn sums_are_those_of_cksum_and_md5sum() {
        // `printf abc | cksum` and `md5sum`.
        let stated = Stated {
            crc: Some("1219131554".to_owned()),
            md5: Some("900150983cd24fb0d6963f7d28e17f72".to_owned()),
            ..Stated::default()
        };
        let header = Header { offset: 0, format: Format::Gzip, stated };
        let mut sums = header.sums();
        sums.update(b"a");
        sums.update(b"bc");
        assert_eq!(sums.verify(), Ok(()));
        let mut sums = header.sums();
        sums.update(b"abd");
        assert_eq!(sums.verify().unwrap_err().kind, "CRC");
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
