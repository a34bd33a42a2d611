use std::io::Cursor;

use proptest::prelude::*;

use super::*;

/// Address of sections in memory.
const BASE: u64 = 0xffff_ffff_8200_0000;

/// Builds an ELF file of these sections. The address of each section is [`BASE`] plus its offset in the file.
fn elf(sections: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut names = vec![0];
    let mut headers = vec![[0_u64; 8]];
    let mut file = vec![0; 64];
    let all = sections.iter().cloned().chain([(".shstrtab", Vec::new())]);
    for (name, content) in all {
        let start = names.len() as u64;
        names.extend(name.as_bytes());
        names.push(0);
        let content = if name == ".shstrtab" { names.clone() } else { content };
        // Name and type share the first word.
        let (offset, size) = (file.len() as u64, content.len() as u64);
        headers.push([start | 1 << 32, 2, BASE + offset, offset, size, 0, 1, 0]);
        file.extend(content);
    }
    let table = file.len() as u64;
    for header in &headers {
        file.extend(header.iter().flat_map(|word| word.to_le_bytes()));
    }
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[40..48].copy_from_slice(&table.to_le_bytes());
    file[58..60].copy_from_slice(&64_u16.to_le_bytes());
    file[60..62].copy_from_slice(&u16::try_from(headers.len()).unwrap().to_le_bytes());
    file[62..64].copy_from_slice(&u16::try_from(headers.len() - 1).unwrap().to_le_bytes());
    file
}

/// Names of exports, with an empty string for "no namespace" at the start.
const STRINGS: &[u8] = b"\0kfree\0usb_disabled\0USB\0";

/// Builds a kernel that exports `kfree` and `usb_disabled` in a table of this format.
fn exporting(size: usize, relative: bool) -> Vec<u8> {
    let (strings, first) = (64, 64 + STRINGS.len());
    let tables = [(first, 1_usize), (first + size, 7)].map(|(place, name)| {
        let mut entry = vec![0; size];
        if relative {
            let offset = i32::try_from(strings + name).unwrap() - i32::try_from(place + 4).unwrap();
            entry[4..8].copy_from_slice(&offset.to_le_bytes());
        } else {
            entry[8..16].copy_from_slice(&(BASE + (strings + name) as u64).to_le_bytes());
        }
        entry
    });
    let [plain, gpl] = tables;
    elf(&[("__ksymtab_strings", STRINGS.to_vec()), ("__ksymtab", plain), ("__ksymtab_gpl", gpl)])
}

fn btf() -> Vec<u8> {
    let mut bytes = vec![0x9f, 0xeb, 1, 0];
    for field in [24_u32, 0, 24, 24, 8, 1, 4 << 24 | 1, 896, 0, 0, 0] {
        bytes.extend(field.to_le_bytes());
    }
    bytes.resize(48, 0);
    bytes.extend(b"\0module\0");
    bytes
}

fn open(bytes: &[u8]) -> Vmlinux<Cursor<&[u8]>> {
    Vmlinux::open(Cursor::new(bytes)).unwrap()
}

fn module_size(section: &[u8]) -> Option<u64> {
    Btf::parse(section).unwrap().size_of_struct("module")
}

#[test]
fn the_sections_of_an_elf_file() {
    let rodata = b"Linux version %s\0\0Linux version 6.1.0-56-amd64 (debian-kernel@lists) #1\0".to_vec();
    let file = elf(&[(".rodata", rodata), (".BTF", btf())]);
    let mut vmlinux = open(&file);
    assert_eq!(vmlinux.release().unwrap().as_deref(), Some("6.1.0-56-amd64"));
    assert_eq!(module_size(&vmlinux.btf().unwrap().unwrap()), Some(896));
    assert_eq!(vmlinux.exports().unwrap(), None);
    assert_eq!(open(&elf(&[])).btf().unwrap(), None);
}

#[test]
fn exports_in_every_form_of_the_table() {
    for (size, relative) in [(12, true), (8, true), (24, false), (16, false)] {
        let exports = open(&exporting(size, relative)).exports().unwrap().unwrap();
        assert_eq!(exports.into_iter().collect::<Vec<_>>(), ["kfree", "usb_disabled"], "{size}");
    }
    // An unknown format.
    assert_eq!(open(&exporting(20, true)).exports().unwrap(), None);
}

#[test]
fn overlapping_export_tables_are_refused() {
    let tables = (0..100).map(|_| ("__ksymtab", Vec::new()));
    let strings = ("__ksymtab_strings", vec![b'a'; 256 << 10]);
    let mut file = elf(&std::iter::once(strings).chain(tables).collect::<Vec<_>>());
    let headers = file.len() - 103 * 64;
    for table in 2..102 {
        file[headers + table * 64 + 24..][..8].copy_from_slice(&0_u64.to_le_bytes());
        file[headers + table * 64 + 32..][..8].copy_from_slice(&(256_u64 << 10).to_le_bytes());
    }
    assert!(matches!(open(&file).exports(), Err(VmlinuzError::Damaged(_))));
}

#[test]
fn exports_are_found_in_a_raw_image() {
    // Data that only looks like BTF, also truncated at the end, and BTF across a chunk boundary.
    let mut image = vec![0; CHUNK - 30];
    image[100..108].copy_from_slice(&btf()[..8]);
    image.extend(btf());
    image.extend(b"Linux version 6.12.117+deb12-arm64 (x)");
    image.extend(&btf()[..20]);
    let mut vmlinux = open(&image);
    assert_eq!(vmlinux.btf().unwrap(), Some(btf()));
    assert_eq!(vmlinux.release().unwrap().as_deref(), Some("6.12.117+deb12-arm64"));
    assert_eq!(vmlinux.exports().unwrap(), None);
    let mut empty = open(b"");
    assert_eq!((empty.btf().unwrap(), empty.release().unwrap()), (None, None));
}

/// Takes minutes if each of the overlapping sections is read.
#[test]
fn some_of_many_headers_of_type_information_are_tried() {
    let mut header = btf()[..12].to_vec();
    for size in [1_u32 << 20, 1 << 20, 4 << 20] {
        header.extend(size.to_le_bytes());
    }
    assert_eq!(open(&header.repeat(350_000)).btf().unwrap(), None);
}

#[test]
fn sections_outside_the_file_are_refused() {
    let file = elf(&[(".BTF", btf())]);
    let headers = file.len() - 3 * 64;
    for (field, value) in [(24, u64::MAX), (32, 4 << 30), (32, 60 << 20)] {
        let mut bytes = file.clone();
        bytes[headers + 64 + field..][..8].copy_from_slice(&u64::to_le_bytes(value));
        assert!(open(&bytes).btf().is_err(), "{field} {value}");
    }
    assert!(Vmlinux::open(Cursor::new(&file[..file.len() - 1])).is_err());
    assert!(Vmlinux::open(Cursor::new(&file[..50])).is_err());
    let mut module = file.clone();
    module[16] = 1;
    assert!(matches!(Vmlinux::open(Cursor::new(&module)), Err(VmlinuzError::UnknownFormat)));
}

proptest! {
    #[test]
    fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut vmlinux = open(&bytes);
        let _ = (vmlinux.btf(), vmlinux.release(), vmlinux.exports());
    }

    #[test]
    fn never_panics_when_flipped(at in 0_usize..600, value: u8) {
        for mut bytes in [exporting(12, true), exporting(16, false), elf(&[(".rodata", BANNER.to_vec()), (".BTF", btf())])] {
            let at = at % bytes.len();
            bytes[at] = value;
            if let Ok(mut vmlinux) = Vmlinux::open(Cursor::new(&bytes[..])) {
                let _ = (vmlinux.btf(), vmlinux.release(), vmlinux.exports());
            }
        }
    }
}
