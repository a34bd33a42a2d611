//! Memory use on hostile files. nextest runs each test in a separate process, so the process's peak is the test's peak.

use std::{fs, io::Cursor};

use super::*;
use crate::{
    CachedFile, CheckRequest, Verdict, check,
    testing::{ModuleFile, SH_OFFSET, SH_SIZE, SH_TYPE, kernel, patch, section_header},
};

/// Peak memory of this process (`VmHWM`), in bytes.
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Parses the file and checks that memory use stays within the documented bound.
#[track_caller]
fn parse(file: &[u8]) -> Result<Module> {
    let before = peak();
    let module = Module::parse(&CachedFile::new(Cursor::new(file)));
    let taken = peak() - before;
    let bound = (2 * file.len()).min(64 << 20) + (32 << 20);
    assert!(taken <= bound, "{} MiB for a file of {} KiB", taken >> 20, file.len() >> 10);
    module
}

#[track_caller]
fn too_much(file: &[u8]) -> String {
    let error = parse(file).unwrap_err();
    assert_eq!(error.verdict(), Verdict::Unknown);
    error.to_string()
}

fn count(file: &[u8]) -> usize {
    usize::from(u16::from_le_bytes([file[60], file[61]]))
}

/// Replaces a section's contents with bytes that are appended to the file.
fn replace(file: &mut Vec<u8>, index: usize, bytes: &[u8]) {
    file.resize(file.len().next_multiple_of(8), 0);
    let (header, at) = (section_header(file, index), file.len() as u64);
    file.extend(bytes);
    patch(file, header + SH_OFFSET, &at.to_le_bytes());
    patch(file, header + SH_SIZE, &(bytes.len() as u64).to_le_bytes());
}

/// Builds a module with these symbols, each given by the offset of its name and by its section.
fn with_symbols(names: &[u8], symbols: impl Iterator<Item = (usize, u16)>) -> Vec<u8> {
    let mut file = ModuleFile::named("m").build();
    let mut table = vec![0; 24];
    for (name, section) in symbols {
        table.extend(u32::try_from(name).unwrap().to_le_bytes());
        table.extend([0x10, 0]);
        table.extend(section.to_le_bytes());
        table.extend([0; 16]);
    }
    let last = count(&file);
    replace(&mut file, last - 3, &table);
    replace(&mut file, last - 2, names);
    file
}

/// Builds a module with names that share suffixes: a name starts at each byte of a run.
fn sharing(runs: usize, length: usize) -> Vec<u8> {
    let run = |number| format!("{number:a>length$}\0");
    let names: String = std::iter::once("\0".to_owned()).chain((0..runs).map(run)).collect();
    let starts = 1..names.len();
    with_symbols(names.as_bytes(), starts.map(|start| (start, 0)))
}

#[test]
fn names_may_share_their_bytes() {
    // 8 MB of symbols, which xz compresses to 90 KB.
    assert_eq!(
        too_much(&sharing(80, 4000)),
        "a symbol's name has more than 511 bytes, the limit of every kernel"
    );
    assert_eq!(too_much(&sharing(700, 500)), "the module has more names and fields than farrier reads");
    assert!(parse(&sharing(20, 500)).unwrap().undefined.len() > 9000);
}

/// Relocations of arm64 that a missing weak symbol makes impossible.
#[test]
fn names_of_weak_symbols_may_share_their_bytes() {
    let mut module = ModuleFile::named("m");
    module.machine = 183;
    module.more.push((".text", 1, 6, "", vec![0; 8]));
    module.more.push((".rela.text", 4, 0, ".text", Vec::new()));
    let mut file = module.build();
    let run = |number| format!("{number:a>500}\0");
    let names: Vec<String> = std::iter::once("\0".to_owned()).chain((0..1500).map(run)).collect();
    let names = names.concat();
    let (mut symbols, mut relocations) = (vec![0; 24], Vec::new());
    for start in 1..u32::try_from(names.len()).unwrap() {
        symbols.extend(start.to_le_bytes());
        // Weak and undefined.
        symbols.extend([0x20, 0, 0, 0]);
        symbols.extend([0; 16]);
        relocations.extend([0; 8]);
        // `R_AARCH64_ADR_PREL_PG_HI21`.
        relocations.extend(275_u32.to_le_bytes());
        relocations.extend(start.to_le_bytes());
        relocations.extend([0; 8]);
    }
    let last = count(&file);
    replace(&mut file, last - 5, &symbols);
    replace(&mut file, last - 4, names.as_bytes());
    replace(&mut file, last - 2, &relocations);
    assert_eq!(too_much(&file), "the module has more names and fields than farrier reads");
}

#[test]
fn fields_of_two_bytes() {
    let mut file = ModuleFile::named("m").build();
    replace(&mut file, 2, &b"=\0".repeat(4 << 20));
    assert_eq!(too_much(&file), "the module has more names and fields than farrier reads");
    // Each byte of invalid UTF-8 becomes three bytes of text.
    replace(&mut file, 2, &[&b"name=m\0a="[..], &b"\xff".repeat(8 << 20)[..], b"\0"].concat());
    assert_eq!(too_much(&file), "the module has more names and fields than farrier reads");
}

/// Overlapping sections, each with the version of one export.
#[test]
fn overlapping_sections_are_read() {
    const EXPORTS: u16 = 400;
    let plain = count(&ModuleFile::named("m").build());
    let first = u16::try_from(plain).unwrap();
    let name = |number: u16| (format!("__ksymtab_x{number:03}\0"), format!("__crc_x{number:03}\0"));
    let (mut names, mut symbols) = (vec![0], Vec::new());
    for number in 0..EXPORTS {
        let (table, crc) = name(number);
        symbols.push((names.len(), first - 7));
        names.extend(table.as_bytes());
        symbols.push((names.len(), first + number));
        names.extend(crc.as_bytes());
    }
    let mut file = with_symbols(&names, symbols.into_iter());
    file.resize(4 << 20, 0);
    let start = section_header(&file, 0);
    let mut headers = file[start..start + 64 * plain].to_vec();
    for number in 0..u64::from(EXPORTS) {
        let mut header = [0; 64];
        patch(&mut header, 4, &1_u32.to_le_bytes());
        patch(&mut header, SH_OFFSET, &(64 + number).to_le_bytes());
        patch(&mut header, SH_SIZE, &(3_u64 << 20).to_le_bytes());
        headers.extend(header);
    }
    let table = file.len() as u64;
    file.extend(headers);
    patch(&mut file, 40, &table.to_le_bytes());
    patch(&mut file, 60, &(first + EXPORTS).to_le_bytes());
    let exports = parse(&file).unwrap().exports;
    assert_eq!(exports.len(), usize::from(EXPORTS));
    assert!(exports.iter().all(|export| export.crc.is_some()));
}

#[test]
fn overlapping_tables_are_refused() {
    let mut file = ModuleFile::named("m").build();
    file.resize(1 << 20, 0);
    for section in [2, 3, count(&file) - 3] {
        let header = section_header(&file, section);
        patch(&mut file, header + SH_OFFSET, &0_u64.to_le_bytes());
        patch(&mut file, header + SH_SIZE, &(1_u64 << 20).to_le_bytes());
    }
    let error = too_much(&file);
    assert!(error.ends_with("has 1048576 bytes, more than farrier reads of a module"), "{error}");
}

/// Findings about each symbol have the module's license and the namespaces that it imports.
#[test]
fn long_fields_are_not_repeated_for_each_symbol() {
    let names: Vec<&str> = (0..1000).map(|number| &*format!("symbol_{number}").leak()).collect();
    let row = |name: &&str| format!("0x00000001\t{name}\tvmlinux\tEXPORT_SYMBOL_GPL\tNS\n");
    let table: Vec<String> = names.iter().map(row).collect();
    let long = "a".repeat(1 << 20);
    let file = ModuleFile::named("m").info("license", &long).info("import_ns", &long);
    let file = names.into_iter().fold(file, |file, name| file.needs(name, 1));
    let (facts, modules) = (kernel(&[], &table.concat()), [file.payload()]);
    let before = peak();
    let report = check(&CheckRequest::new(&facts, &modules));
    let taken = peak() - before;
    assert!(taken < 32 << 20, "{} MiB", taken >> 20);
    assert_eq!(report.modules[0].findings.len(), 2000, "{report}");
}

/// The loader ignores the type of such sections when it copies them.
#[test]
fn sections_without_a_type_have_the_size_that_they_claim() {
    let mut module = ModuleFile::named("m");
    module.more.push((".text", 0, 6, "", Vec::new()));
    module.more.push((".rela.text", 4, 0, ".text", vec![0; 24]));
    let file = module.build();
    assert!(parse(&file).is_ok());
    for (section, flags, offset, size) in
        [(count(&file) - 3, 6_u64, 0, 1 << 50), (count(&file) - 3, 6, u64::MAX - 3, 8), (2, 2, 0, u64::MAX)]
    {
        let mut file = file.clone();
        let header = section_header(&file, section);
        patch(&mut file, header + SH_TYPE, &[0; 4]);
        patch(&mut file, header + 8, &flags.to_le_bytes());
        patch(&mut file, header + SH_OFFSET, &offset.to_le_bytes());
        patch(&mut file, header + SH_SIZE, &size.to_le_bytes());
        let error = parse(&file).unwrap_err();
        assert_eq!(error.verdict(), Verdict::Refused);
        assert!(error.to_string().contains(" lies outside the file: "), "{error}");
        // Without a flag, the loader does not copy the section.
        patch(&mut file, header + 8, &[0; 8]);
        let _ = parse(&file);
    }
}
