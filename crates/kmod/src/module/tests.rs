use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::{
    CachedFile, Verdict,
    testing::{ModuleFile, SH_OFFSET, SH_SIZE, SH_TYPE, patch, section_header},
};

fn parse(file: &[u8]) -> Result<Module, ModuleError> {
    Module::parse(file)
}

/// Returns why the kernel refuses the file.
fn refusal(file: &[u8]) -> String {
    let error = parse(file).unwrap_err();
    assert_eq!(error.verdict(), Verdict::Refused);
    error.to_string()
}

fn sample() -> ModuleFile {
    let mut file = ModuleFile::named("nvidia_uvm").needs("printk", 0x1234_5678).info("import_ns", "CXL");
    file.undefined.push(("optional", true));
    file.undefined.push(("_GLOBAL_OFFSET_TABLE_", false));
    file.exports = vec![
        ("plain", Some(0xffff_ffff), false, ""),
        ("for_gpl", Some(1), true, "MY_NS"),
        ("unversioned", None, false, ""),
    ];
    file
}

#[test]
fn reads_the_facts_alike_from_memory_and_from_a_file() {
    let bytes = sample().build();
    let module = parse(&bytes).unwrap();
    assert_eq!(Module::parse(&CachedFile::new(Cursor::new(&bytes))).as_ref(), Ok(&module));
    assert_eq!(module.name, "nvidia_uvm");
    assert_eq!(module.vermagic(), Some("6.1.0-9-amd64 SMP preempt mod_unload modversions "));
    assert_eq!(module.fields("import_ns").collect::<Vec<_>>(), ["CXL"]);
    assert_eq!(module.versions.as_ref().unwrap()["printk"], 0x1234_5678);
    let undefined: Vec<_> = module.undefined.iter().map(|u| (u.name.as_str(), u.weak)).collect();
    assert_eq!(undefined, [("optional", true), ("printk", false)]);
    let exports: Vec<_> =
        module.exports.iter().map(|e| (e.name.as_str(), e.crc, e.gpl_only, e.namespace.as_deref())).collect();
    assert_eq!(
        exports,
        [
            ("for_gpl", Some(1), true, Some("MY_NS")),
            ("plain", Some(0xffff_ffff), false, None),
            ("unversioned", None, false, None)
        ]
    );
    assert_eq!(
        (module.this_module_size, module.debug_info, &module.signature),
        (896, false, &Signature::None)
    );
}

#[test]
fn gpl_only_exports_are_read_from_tables_and_flags() {
    let mut file = sample();
    let by_table = file.module().exports;
    // The last name is used in objects before the final link.
    for section in ["__kflagstab", "___kflagstab+for_gpl"] {
        file.flags = Some(section);
        assert_eq!(file.module().exports, by_table, "{section}");
    }
    file.flags = Some(".rodata");
    assert!(file.module().exports.iter().all(|export| !export.gpl_only));
}

#[test]
fn a_name_that_the_kernel_cannot_store_is_skipped() {
    assert_eq!(ModuleFile::named(&"a".repeat(55)).module().name.len(), 55);
    assert_eq!(ModuleFile::named(&"a".repeat(56)).module().name, "from_struct");
}

#[test]
fn a_signature_does_not_hide_the_module() {
    let mut bytes = sample().build();
    bytes.extend([0; 40]);
    bytes.extend(b"~Module signature appended~\n");
    let signature = parse(&bytes).unwrap().signature;
    assert_eq!(signature, Signature::Unsupported(0));
}

#[test]
fn the_name_of_an_old_module_comes_from_its_structure() {
    let mut file = sample();
    file.info.retain(|(key, _)| *key != "name");
    assert_eq!(parse(&file.build()).unwrap().name, "from_struct");
}

#[test]
fn extended_versions_have_long_names() {
    let mut file = sample();
    let names = b"printk\0a_name_of_more_than_fifty_five_bytes_that_fits_in_no_basic_entry\0";
    file.extended = Some((vec![7, 8], names.to_vec()));
    let module = parse(&file.build()).unwrap();
    assert_eq!(module.versions.unwrap()["printk"], 0x1234_5678);
    let Some(ExtendedVersions::Complete(versions)) = module.extended_versions else { panic!() };
    assert_eq!((versions["printk"], versions.len()), (7, 2));
    for names in [&b"printk\0"[..], b"printk\0unterminated"] {
        file.extended = Some((vec![7, 8], names.to_vec()));
        let broken = ExtendedVersions::Broken("has fewer names than versions");
        assert_eq!(parse(&file.build()).unwrap().extended_versions, Some(broken));
    }
}

#[test]
fn a_symbol_of_a_section_that_does_not_exist_is_refused() {
    let mut module = sample();
    module.defined.push("here");
    let mut file = module.build();
    let count = usize::from(u16::from_le_bytes([file[60], file[61]]));
    let sections = (0..count).map(|index| section_header(&file, index));
    let table = sections.into_iter().find(|&header| file[header + SH_TYPE] == 2).unwrap();
    let start = u64::from_le_bytes(file[table + SH_OFFSET..][..8].try_into().unwrap());
    // The symbols that the module defines follow the undefined ones.
    let section = usize::try_from(start).unwrap() + 24 * (1 + module.undefined.len()) + 6;
    assert_eq!(file[section], 1);
    for index in [u16::try_from(count).unwrap(), 0xff00] {
        patch(&mut file, section, &index.to_le_bytes());
        assert_eq!(refusal(&file), format!("symbol here has an invalid section index {index}"));
    }
    patch(&mut file, section, &0xff20_u16.to_le_bytes());
    assert!(parse(&file).is_ok(), "livepatch resolves it");
}

#[test]
fn files_that_are_not_modules_are_rejected() {
    assert_eq!(refusal(b""), "the file is not an ELF object");
    assert_eq!(refusal(b"\x7fELF"), "the file is not an ELF object");
    assert_eq!(refusal(b"#!/bin/sh\nexit\n"), "the file is not an ELF object");
    let mut file = sample();
    file.machine = 8;
    assert_eq!(
        refusal(&file.build()),
        "the object is for ELF machine 8, which is neither x86-64 (62) nor arm64 (183)"
    );
    let mut file = sample();
    file.this_module = false;
    assert_eq!(
        refusal(&file.build()),
        "the object has no .gnu.linkonce.this_module, so it is not a kernel module"
    );
    let mut file = sample();
    file.common = Some("shared");
    assert_eq!(refusal(&file.build()), "symbol shared is a common symbol, which the loader refuses");
    file.common = Some("__gnu_lto_slim");
    assert!(parse(&file.build()).is_ok());

    let broken = |at: usize, bytes: &[u8]| {
        let mut file = sample().build();
        patch(&mut file, at, bytes);
        refusal(&file)
    };
    // The loader looks at the machine only.
    let mut other = sample().build();
    patch(&mut other, 4, &[1]);
    assert!(parse(&other).is_ok());
    patch(&mut other, 18, &3_u16.to_le_bytes());
    assert_eq!(refusal(&other), "the object is not 64-bit little-endian");
    assert_eq!(broken(16, &3_u16.to_le_bytes()), "the object has ELF type 3, not relocatable (1)");
    assert!(broken(40, &u64::MAX.to_le_bytes()).starts_with("the ELF header is damaged: "));
    assert!(broken(58, &40_u16.to_le_bytes()).starts_with("the ELF header is damaged: "));
    assert!(broken(60, &u16::MAX.to_le_bytes()).starts_with("the ELF header is damaged: "));
    assert!(broken(60, &0_u16.to_le_bytes()).starts_with("the ELF header is damaged: "));
    assert!(broken(62, &0_u16.to_le_bytes()).starts_with("the ELF header is damaged: "));
}

#[test]
fn every_truncation_is_rejected() {
    let bytes = sample().build();
    for length in 0..bytes.len() {
        assert!(parse(&bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
    }
}

#[test]
fn errors_name_a_section_outside_the_file() {
    let bytes = sample().build();
    for (offset, size) in [
        (64, 4_u64 << 30),
        (64, u64::MAX),
        (u64::MAX, 64),
        (bytes.len() as u64, 1),
        (u64::from(u32::MAX), 1),
        ((1 << 32) + 64, 16),
    ] {
        let mut file = bytes.clone();
        let header = section_header(&file, 2);
        patch(&mut file, header + SH_OFFSET, &offset.to_le_bytes());
        patch(&mut file, header + SH_SIZE, &size.to_le_bytes());
        let length = bytes.len();
        assert_eq!(
            refusal(&file),
            format!(
                "section .modinfo lies outside the file: {size} bytes at {offset}, and the file has {length}"
            )
        );
    }
}

#[test]
fn a_section_without_bytes_may_have_any_size() {
    let mut file = sample().build();
    let header = section_header(&file, 4);
    patch(&mut file, header + SH_TYPE, &8_u32.to_le_bytes());
    patch(&mut file, header + SH_SIZE, &(16_u64 << 30).to_le_bytes());
    assert!(parse(&file).is_ok());
}

#[test]
fn without_symbols_or_versions() {
    let mut file = sample().build();
    let count = usize::from(u16::from_le_bytes(file[60..62].try_into().unwrap()));
    let symtab = section_header(&file, count - 3);
    patch(&mut file, symtab + SH_TYPE, &1_u32.to_le_bytes());
    assert_eq!(refusal(&file), "the module has no symbols");
    let mut file = sample();
    file.versions = None;
    assert_eq!(parse(&file.build()).unwrap().versions, None);
}

#[test]
fn licenses_are_the_kernels_list() {
    let compatible = |license: &str| sample().info("license", license).module().is_gpl_compatible();
    for license in
        ["GPL", "GPL v2", "Dual BSD/GPL", "Dual MIT/GPL", "Dual MPL/GPL", "GPL and additional rights"]
    {
        assert!(compatible(license), "{license}");
    }
    for license in ["NVIDIA", "Proprietary", "MIT", "GPL ", "gpl", "BSD"] {
        assert!(!compatible(license), "{license}");
    }
    let mut file = sample();
    file.info.retain(|(key, _)| *key != "license");
    assert!(!file.module().is_gpl_compatible());
}

#[test]
fn names_come_from_paths_as_lsmod_shows_them() {
    for (path, name) in [
        ("lib/modules/extra/nvidia-uvm.ko.xz", "nvidia_uvm"),
        ("a.ko", "a"),
        ("drivers/infiniband/core/ib_core", "ib_core"),
        ("nvidia-peermem", "nvidia_peermem"),
        ("x.koala.ko.zst", "x.koala"),
    ] {
        assert_eq!(module_name(path), name);
    }
}

proptest! {
    #[test]
    fn never_panics_on_changed_bytes(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12)) {
        let mut file = sample().build();
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        let from_memory = parse(&file);
        let from_file = Module::parse(&CachedFile::new(Cursor::new(&file)));
        // Only bytes in memory can be misaligned.
        if from_memory.is_ok() {
            prop_assert_eq!(from_memory, from_file);
        }
    }

    #[test]
    fn never_panics_on_changed_headers(section in 0_usize..11, field in 0_usize..8, value in any::<u64>()) {
        let mut file = sample().build();
        let at = section_header(&file, section) + field * 8;
        patch(&mut file, at, &value.to_le_bytes());
        let _ = parse(&file);
    }
}
