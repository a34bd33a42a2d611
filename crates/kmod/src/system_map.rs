//! Finds the exports of a kernel image in `System.map` or `/proc/kallsyms`.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, Read},
};

/// Lines of this length in bytes, or longer, are refused. A line has an address, a letter, a name of at most 511 bytes
/// ([`MAX_NAME`]), and a module.
const MAX_LINE: u64 = 4096;
/// Maximum number of symbols that an image exports. Distribution kernels export about 12,000.
pub(super) const MAX_EXPORTS: usize = 200_000;
/// Maximum total length of the names in bytes.
const MAX_TOTAL_LENGTH: usize = 16 << 20;
/// Maximum length of a name in bytes, including the terminating NUL (`KSYM_NAME_LEN`).
pub(super) const MAX_NAME: usize = 512;
/// Prefix of a symbol's entry in the table of exports, as `EXPORT_SYMBOL` names it (`include/linux/export.h`, and since
/// Linux 6.4 `scripts/mod/modpost.c`).
const ENTRY_PREFIX: &str = "__ksymtab_";

/// Names of exports, limited to the number and length that a kernel can have.
#[derive(Default)]
pub(super) struct ExportNames {
    pub names: BTreeSet<String>,
    bytes: usize,
}

impl ExportNames {
    /// Adds a name. Returns `false` if a limit is exceeded.
    pub fn add(&mut self, name: &str) -> bool {
        if !self.names.contains(name) {
            self.bytes = self.bytes.saturating_add(name.len());
            self.names.insert(name.to_owned());
        }
        name.len() < MAX_NAME && self.bytes <= MAX_TOTAL_LENGTH && self.names.len() <= MAX_EXPORTS
    }
}

/// Reads the names that the kernel image exports, by their entries in the table of exports. Lines are read one at a
/// time. Exports of modules, which `/proc/kallsyms` marks with `[name]`, are skipped. The result is empty for the
/// placeholder file in Debian's image packages, and for kernels that omit these entries.
///
/// Memory: the names' lengths and about 80 bytes for each name. The limits of 16 MiB and 200,000 names keep the sum below
/// 32 MiB; larger input is an error.
pub fn exported_names(mut lines: impl BufRead) -> io::Result<BTreeSet<String>> {
    let mut exports = ExportNames::default();
    let mut line = Vec::new();
    loop {
        line.clear();
        let count = (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(exports.names);
        }
        if count as u64 == MAX_LINE {
            let message = format!("a line is too long; the limit is {} bytes", MAX_LINE - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        if parse_export(&line).is_some_and(|name| !exports.add(name)) {
            let message = "more exports, or longer ones, than any kernel has";
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
    }
}

/// Parses a line such as `ffffffff826e7d60 r __ksymtab_name`.
fn parse_export(line: &[u8]) -> Option<&str> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (address, kind, symbol) = (words.next()?, words.next()?, words.next()?);
    let is_line = address.bytes().all(|b| b.is_ascii_hexdigit()) && kind.len() == 1;
    let name = symbol.strip_prefix(ENTRY_PREFIX).filter(|name| !name.is_empty())?;
    (is_line && words.next().is_none()).then_some(name)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(text: &[u8]) -> Vec<String> {
        exported_names(text).unwrap().into_iter().collect()
    }

    #[test]
    fn entries_of_the_table_are_exports() {
        let text = "ffffffff81000000 T _stext\n\
                    ffffffff826e7d60 r __ksymtab_kfree\n\
                    ffffffff826e7d6c R __ksymtab___kmalloc\n\
                    ffffffff826e7d70 r __kstrtab_kfree\n\
                    ffffffff826e7d74 R __start___ksymtab\n\
                    ffffffff826e7d78 r __ksymtab_\n\
                    00000000a1b2c3d4 A __crc_kfree\n\
                    0000000000000000 r __ksymtab_usb_disabled\t[usbcore]\n\
                    ffffffff826e7d80 r __ksymtab_last";
        assert_eq!(names(text.as_bytes()), ["__kmalloc", "kfree", "last"]);
    }

    #[test]
    fn debians_placeholder_exports_nothing() {
        let text = b"ffffffffffffffff B The real System.map is in the linux-image-<version>-dbg package\n";
        assert!(names(text).is_empty());
    }

    #[test]
    fn a_line_without_end_is_refused() {
        assert!(exported_names(io::BufReader::new(io::repeat(b'a').take(1 << 20))).is_err());
    }

    #[test]
    fn names_and_their_number_are_limited() {
        let line = |name: &str| format!("ffffffff826e7d60 r __ksymtab_{name}\n");
        assert_eq!(names(line(&"a".repeat(511)).as_bytes()).len(), 1);
        assert!(exported_names(line(&"a".repeat(512)).as_bytes()).is_err());
        let many: String = (0..=MAX_EXPORTS).map(|number| line(&number.to_string())).collect();
        assert!(exported_names(many.as_bytes()).is_err());
        let long: String =
            (0..=MAX_TOTAL_LENGTH / 511).map(|number| line(&format!("{number:0>511}"))).collect();
        assert!(exported_names(long.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn never_panics(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = exported_names(&text[..]);
        }

        #[test]
        fn finds_what_was_written(wanted in prop::collection::btree_set("[a-z_]{1,12}", 0..30)) {
            let lines: Vec<String> =
                wanted.iter().map(|name| format!("ffffffff826e7d60 r __ksymtab_{name}\n")).collect();
            prop_assert_eq!(exported_names(lines.concat().as_bytes()).unwrap(), wanted);
        }
    }
}
