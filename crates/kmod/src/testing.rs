//! Module files and kernels for tests, built byte by byte so that tests can corrupt each field.

pub mod btf;
pub mod signature;

use super::{ExtraKernelFacts, KernelConfig, KernelFacts, Module, PayloadModule, SymbolTable};
use crate::Architecture;

/// Offsets of fields in a section header (`Elf64_Shdr`).
pub const SH_TYPE: usize = 4;
pub const SH_OFFSET: usize = 24;
pub const SH_SIZE: usize = 32;

/// Builder of a module file. Sections have a fixed order, so that tests can find them.
#[derive(Clone)]
pub struct ModuleFile {
    pub machine: u16,
    pub info: Vec<(&'static str, String)>,
    pub versions: Option<Vec<(&'static str, u32)>>,
    pub extended: Option<(Vec<u32>, Vec<u8>)>,
    pub undefined: Vec<(&'static str, bool)>,
    /// Exports: name, version, GPL only, namespace.
    pub exports: Vec<(&'static str, Option<u32>, bool, &'static str)>,
    /// Section with the flags for GPL-only exports, as in Linux 7.2; `None` for a separate table of such exports.
    pub flags: Option<&'static str>,
    pub common: Option<&'static str>,
    pub this_module: bool,
    /// Size of `struct module` in bytes.
    pub size: usize,
    pub btf: Option<Vec<u8>>,
    /// Whether a second `.modinfo` follows the first.
    pub twice: bool,
    /// Whether the section with the versions of exports has another name.
    pub no_crcs: bool,
    /// Names of symbols that the module defines.
    pub defined: Vec<&'static str>,
    /// Sections after all others: name, type, flags, section that it refers to in `sh_info`, and contents.
    pub more: Vec<(&'static str, u32, u64, &'static str, Vec<u8>)>,
}

struct Section {
    name: &'static str,
    kind: u32,
    flags: u64,
    link: u32,
    info: u32,
    entry: u64,
    bytes: Vec<u8>,
}

impl Section {
    fn loaded(name: &'static str, bytes: Vec<u8>) -> Self {
        Self { name, kind: 1, flags: 2, link: 0, info: 0, entry: 0, bytes }
    }
}

impl ModuleFile {
    /// Creates a GPL module for [`kernel`], without symbols.
    pub fn named(name: &str) -> Self {
        Self {
            machine: 62,
            info: vec![
                ("license", "GPL".into()),
                ("name", name.into()),
                ("vermagic", "6.1.0-9-amd64 SMP preempt mod_unload modversions ".into()),
            ],
            versions: Some(vec![("module_layout", 0xaaaa)]),
            extended: None,
            undefined: Vec::new(),
            exports: Vec::new(),
            flags: None,
            common: None,
            this_module: true,
            size: 896,
            btf: None,
            twice: false,
            no_crcs: false,
            defined: Vec::new(),
            more: Vec::new(),
        }
    }

    /// Adds a needed symbol with this version.
    pub fn needs(mut self, symbol: &'static str, crc: u32) -> Self {
        self.undefined.push((symbol, false));
        if let Some(versions) = &mut self.versions {
            versions.push((symbol, crc));
        }
        self
    }

    pub fn exports(mut self, symbol: &'static str, crc: u32) -> Self {
        self.exports.push((symbol, Some(crc), false, ""));
        self
    }

    pub fn info(mut self, key: &'static str, value: &str) -> Self {
        self.info.retain(|(name, _)| *name != key);
        self.info.push((key, value.into()));
        self
    }

    pub fn module(&self) -> Module {
        Module::parse(&self.build()[..]).unwrap()
    }

    pub fn payload(&self) -> PayloadModule {
        let module = self.module();
        PayloadModule { path: format!("lib/{}.ko", module.name), module: Ok(module) }
    }

    pub fn build(&self) -> Vec<u8> {
        let mut sections =
            vec![Section { name: "", kind: 0, flags: 0, link: 0, info: 0, entry: 0, bytes: vec![] }];
        if self.this_module {
            let mut bytes = vec![0; 24];
            bytes.extend(b"from_struct\0");
            bytes.resize(self.size, 0);
            let section = Section::loaded(".gnu.linkonce.this_module", bytes);
            sections.push(Section { flags: 3, ..section });
        }
        let info: Vec<String> = self.info.iter().map(|(key, value)| format!("{key}={value}\0")).collect();
        sections.push(Section::loaded(".modinfo", info.concat().into_bytes()));
        if let Some(versions) = &self.versions {
            let entry = |(name, crc): &(&str, u32)| {
                let mut bytes = u64::from(*crc).to_le_bytes().to_vec();
                bytes.extend(name.as_bytes());
                bytes.resize(64, 0);
                bytes
            };
            sections.push(Section::loaded("__versions", versions.iter().flat_map(entry).collect()));
        }
        if let Some((crcs, names)) = &self.extended {
            let crcs = crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect();
            sections.push(Section::loaded("__version_ext_crcs", crcs));
            sections.push(Section::loaded("__version_ext_names", names.clone()));
        }
        if let Some(btf) = &self.btf {
            sections.push(Section::loaded(".BTF", btf.clone()));
        }
        if self.twice {
            sections.push(Section::loaded(".modinfo", b"license=GPL\0".to_vec()));
        }
        self.add_symbols(&mut sections);
        assemble(self.machine, sections)
    }

    fn add_symbols(&self, sections: &mut Vec<Section>) {
        let (mut names, mut symbols) = (vec![0], vec![0; 24]);
        let mut symbol = |name: &str, index: u16, value: u64, weak: bool| {
            symbols.extend(u32::try_from(names.len()).unwrap().to_le_bytes());
            symbols.extend([if weak { 0x20 } else { 0x10 }, 0]);
            symbols.extend(index.to_le_bytes());
            symbols.extend(value.to_le_bytes());
            symbols.extend([0; 8]);
            names.extend(name.as_bytes());
            names.push(0);
        };
        for (name, weak) in &self.undefined {
            symbol(name, 0, 0, *weak);
        }
        for name in &self.defined {
            symbol(name, 1, 0, false);
        }
        if let Some(name) = self.common {
            symbol(name, 0xfff2, 8, false);
        }
        let first = u16::try_from(sections.len()).unwrap();
        let (mut crcs, mut strings, mut flags) = (Vec::new(), vec![0], Vec::new());
        for (name, crc, gpl_only, namespace) in &self.exports {
            let table = if *gpl_only && self.flags.is_none() { first + 1 } else { first };
            symbol(&format!("__ksymtab_{name}"), table, 0, false);
            if self.flags.is_some() {
                symbol(&format!("__flags_{name}"), first + 1, flags.len() as u64, false);
                flags.push(u8::from(*gpl_only));
            }
            if let Some(crc) = crc {
                symbol(&format!("__crc_{name}"), first + 2, crcs.len() as u64, false);
                crcs.extend(crc.to_le_bytes());
            }
            symbol(&format!("__kstrtabns_{name}"), first + 3, strings.len() as u64, false);
            strings.extend(namespace.as_bytes());
            strings.push(0);
        }
        // An entry has 12 bytes.
        let gpl = self.exports.iter().filter(|(_, _, gpl_only, _)| *gpl_only && self.flags.is_none()).count();
        sections.push(Section::loaded("__ksymtab", vec![0; 12 * (self.exports.len() - gpl)]));
        sections.push(match self.flags {
            Some(name) => Section::loaded(name, flags),
            None => Section::loaded("__ksymtab_gpl", vec![0; 12 * gpl]),
        });
        sections.push(Section::loaded(if self.no_crcs { ".no_crcs" } else { "__kcrctab" }, crcs));
        sections.push(Section::loaded("__ksymtab_strings", strings));
        if gpl > 0 {
            sections.push(Section::loaded("__kcrctab_gpl", Vec::new()));
        }
        let strtab = u32::try_from(sections.len()).unwrap() + 1;
        sections.push(Section {
            name: ".symtab",
            kind: 2,
            flags: 0,
            link: strtab,
            info: 0,
            entry: 24,
            bytes: symbols,
        });
        sections.push(Section {
            name: ".strtab",
            kind: 3,
            flags: 0,
            link: 0,
            info: 0,
            entry: 0,
            bytes: names,
        });
        for (name, kind, flags, target, bytes) in self.more.clone() {
            let info = sections.iter().position(|section| section.name == target).unwrap_or_default();
            let info = u32::try_from(info).unwrap();
            sections.push(Section { name, kind, flags, link: strtab - 1, info, entry: 0, bytes });
        }
    }
}

fn assemble(machine: u16, mut sections: Vec<Section>) -> Vec<u8> {
    sections.push(Section {
        name: ".shstrtab",
        kind: 3,
        flags: 0,
        link: 0,
        info: 0,
        entry: 0,
        bytes: vec![],
    });
    let (mut names, mut starts) = (Vec::new(), Vec::new());
    for section in &sections {
        starts.push(u32::try_from(names.len()).unwrap());
        names.extend(section.name.as_bytes());
        names.push(0);
    }
    let count = u16::try_from(sections.len()).unwrap();
    sections.last_mut().unwrap().bytes = names;

    let mut file = vec![0; 64];
    let mut headers = Vec::new();
    for (section, start) in sections.iter().zip(starts) {
        file.resize(file.len().next_multiple_of(8), 0);
        let offset = if section.kind == 0 { 0 } else { file.len() as u64 };
        headers.extend(start.to_le_bytes());
        headers.extend(section.kind.to_le_bytes());
        for word in [section.flags, 0, offset, section.bytes.len() as u64] {
            headers.extend(word.to_le_bytes());
        }
        headers.extend(section.link.to_le_bytes());
        headers.extend(section.info.to_le_bytes());
        headers.extend(8_u64.to_le_bytes());
        headers.extend(section.entry.to_le_bytes());
        file.extend(&section.bytes);
    }
    file.resize(file.len().next_multiple_of(8), 0);
    let table = file.len() as u64;
    file.extend(headers);
    file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    file[16..18].copy_from_slice(&1_u16.to_le_bytes());
    file[18..20].copy_from_slice(&machine.to_le_bytes());
    file[20..24].copy_from_slice(&1_u32.to_le_bytes());
    file[40..48].copy_from_slice(&table.to_le_bytes());
    file[52..54].copy_from_slice(&64_u16.to_le_bytes());
    file[58..60].copy_from_slice(&64_u16.to_le_bytes());
    file[60..62].copy_from_slice(&count.to_le_bytes());
    file[62..64].copy_from_slice(&(count - 1).to_le_bytes());
    file
}

/// Offset of a section's header in a file of [`ModuleFile::build`].
pub fn section_header(file: &[u8], index: usize) -> usize {
    usize::try_from(u64::from_le_bytes(file[40..48].try_into().unwrap())).unwrap() + index * 64
}

/// Overwrites bytes of a file.
pub fn patch(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Creates 6.1.0-9-amd64 with these options in addition to the usual ones, and this symbol table in addition to
/// `module_layout`.
pub fn kernel(options: &[&str], table: &str) -> KernelFacts {
    let usual = ["MODULES", "SMP", "PREEMPT_BUILD", "MODULE_UNLOAD", "MODVERSIONS", "X86_64"];
    let config: Vec<String> = usual.iter().chain(options).map(|o| format!("CONFIG_{o}=y\n")).collect();
    let table = format!("0x0000aaaa\tmodule_layout\tvmlinux\tEXPORT_SYMBOL\t\n{table}");
    KernelFacts {
        release: "6.1.0-9-amd64".parse().unwrap(),
        arch: Architecture::Amd64,
        config: KernelConfig::parse(&config.concat()).unwrap(),
        symbols: Some(SymbolTable::parse(&table).unwrap()),
        vermagic_headers: None,
        beyond_headers: ExtraKernelFacts::default(),
    }
}
