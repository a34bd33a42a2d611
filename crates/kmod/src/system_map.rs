//! Pure: `System.map` and `/proc/kallsyms`: what a kernel image exports.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, Read},
};

/// Bytes of one line: an address, a letter, a name of at most `KSYM_NAME_LEN` (512) bytes and a module.
const MAX_LINE: u64 = 4096;
/// Symbols of one image. Distribution kernels export about 12,000.
const MAX_EXPORTS: usize = 1_000_000;
/// What `EXPORT_SYMBOL` calls a symbol's entry in the table of exports (`include/linux/export.h`, and since
/// Linux 6.4 `scripts/mod/modpost.c`).
const ENTRY: &str = "__ksymtab_";

/// Names that the kernel image exports, told by their table entries. The lines are read one by one; those of
/// modules, which `/proc/kallsyms` marks with `[name]`, do not count. Empty for the placeholder that Debian's
/// image packages hold, and for kernels that leave these entries out.
pub fn exported_names(mut lines: impl BufRead) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        let count = (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(names);
        }
        if count as u64 == MAX_LINE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line is longer than any symbol's"));
        }
        if let Some(name) = exported(&line) {
            names.insert(name.to_owned());
            if names.len() > MAX_EXPORTS {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "more exports than any kernel has"));
            }
        }
    }
}

/// `ffffffff826e7d60 r __ksymtab_name`.
fn exported(line: &[u8]) -> Option<&str> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let (address, kind, symbol) = (words.next()?, words.next()?, words.next()?);
    let is_line = address.bytes().all(|b| b.is_ascii_hexdigit()) && kind.len() == 1;
    let name = symbol.strip_prefix(ENTRY).filter(|name| !name.is_empty())?;
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

    proptest! {
        #[test]
        fn never_panics(text in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = exported_names(&text[..]);
        }

        #[test]
        fn finds_what_was_written(wanted in prop::collection::btree_set("[a-z_]{1,12}", 0..30)) {
            let lines: Vec<String> =
                wanted.iter().map(|name| format!("ffffffff826e7d60 r __ksymtab_{name}
    ")).collect();
            prop_assert_eq!(exported_names(lines.concat().as_bytes()).unwrap(), wanted);
        }
    }
}
