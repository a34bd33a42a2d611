//! Edits 64-bit relocatable ELF objects. New and longer sections are appended to the file, so that no other section moves.

use std::ops::Range;

pub const SHF_ALLOC: u64 = 2;
pub const SHF_WRITE: u64 = 1;
pub const SHF_EXECINSTR: u64 = 4;
pub const SHT_PROGBITS: u32 = 1;
pub const SHT_SYMTAB: u32 = 2;
pub const SHT_STRTAB: u32 = 3;
pub const SHT_RELA: u32 = 4;
pub const SHT_NOBITS: u32 = 8;
pub const SHT_REL: u32 = 9;

const SECTION_HEADER_SIZE: usize = 64;
const SYMBOL_SIZE: usize = 24;
const RELOCATION_SIZE: usize = 24;

/// Offset and size in bytes of a field within its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field(pub usize, pub usize);

pub const SH_NAME: Field = Field(0, 4);
pub const SH_TYPE: Field = Field(4, 4);
pub const SH_FLAGS: Field = Field(8, 8);
pub const SH_ADDR: Field = Field(16, 8);
pub const SH_OFFSET: Field = Field(24, 8);
pub const SH_SIZE: Field = Field(32, 8);
pub const SH_LINK: Field = Field(40, 4);
pub const SH_INFO: Field = Field(44, 4);
pub const SH_ADDRALIGN: Field = Field(48, 8);
pub const SH_ENTSIZE: Field = Field(56, 8);

/// Fields of the file's header.
pub const E_TYPE: Field = Field(16, 2);
pub const E_MACHINE: Field = Field(18, 2);
pub const E_SHOFF: Field = Field(40, 8);
pub const E_SHENTSIZE: Field = Field(58, 2);
pub const E_SHNUM: Field = Field(60, 2);
pub const E_SHSTRNDX: Field = Field(62, 2);

/// Fields of a symbol.
pub const ST_NAME: Field = Field(0, 4);
pub const ST_INFO: Field = Field(4, 1);
pub const ST_SHNDX: Field = Field(6, 2);
pub const ST_VALUE: Field = Field(8, 8);

/// Fields of a relocation.
pub const R_OFFSET: Field = Field(0, 8);
pub const R_TYPE: Field = Field(8, 4);
pub const R_SYM: Field = Field(12, 4);

/// A well-formed object.
#[derive(Clone)]
pub struct Object {
    pub bytes: Vec<u8>,
}

impl Object {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Reads a field of a structure that begins at `start`.
    pub fn get(&self, start: usize, Field(offset, size): Field) -> u64 {
        let bytes = self.bytes.get(start + offset..start + offset + size).unwrap_or_default();
        bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    pub fn set(&mut self, start: usize, Field(offset, size): Field, value: u64) {
        let field = self.bytes.get_mut(start + offset..start + offset + size);
        for (byte, new) in field.into_iter().flatten().zip(value.to_le_bytes()) {
            *byte = new;
        }
    }

    fn number(&self, start: usize, field: Field) -> usize {
        usize::try_from(self.get(start, field)).unwrap_or(usize::MAX)
    }

    /// Number of sections.
    pub fn count(&self) -> usize {
        self.number(0, E_SHNUM)
    }

    /// File offset of a section's header.
    pub fn header(&self, section: usize) -> usize {
        self.number(0, E_SHOFF) + section * SECTION_HEADER_SIZE
    }

    pub fn section(&self, section: usize, field: Field) -> u64 {
        self.get(self.header(section), field)
    }

    pub fn set_section(&mut self, section: usize, field: Field, value: u64) {
        self.set(self.header(section), field, value);
    }

    /// Range of a section's bytes in the file; empty for a section without bytes.
    pub fn range(&self, section: usize) -> Range<usize> {
        if self.section(section, SH_TYPE) == u64::from(SHT_NOBITS) {
            return 0..0;
        }
        let start = self.number(self.header(section), SH_OFFSET);
        start..start + self.number(self.header(section), SH_SIZE)
    }

    pub fn content(&self, section: usize) -> &[u8] {
        self.bytes.get(self.range(section)).unwrap_or_default()
    }

    pub fn name(&self, section: usize) -> &[u8] {
        let names = self.content(self.number(0, E_SHSTRNDX));
        let name = names.get(self.number(self.header(section), SH_NAME)..).unwrap_or_default();
        name.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Name of a section, for descriptions.
    pub fn section_label(&self, section: usize) -> String {
        String::from_utf8_lossy(self.name(section)).into_owned()
    }

    /// Finds the first section of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        (1..self.count()).find(|&section| self.name(section) == name.as_bytes())
    }

    /// Appends bytes to the file, aligned to 64 bytes. Returns their offset.
    fn append(&mut self, content: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        let offset = self.bytes.len() as u64;
        self.bytes.extend(content);
        offset
    }

    /// Appends a string to a string table. Returns its offset in the table.
    fn append_string(&mut self, table: usize, text: &[u8]) -> u64 {
        let strings = self.content(table).to_vec();
        let offset = strings.len() as u64;
        self.replace(table, &[&strings, text, b"\0"].concat());
        offset
    }

    /// Replaces a section's content.
    pub fn replace(&mut self, section: usize, content: &[u8]) {
        let offset = self.append(content);
        self.set_section(section, SH_OFFSET, offset);
        self.set_section(section, SH_SIZE, content.len() as u64);
    }

    /// Adds a section, and returns its number.
    pub fn add(&mut self, name: &str, kind: u32, flags: u64, content: &[u8]) -> usize {
        let count = self.count();
        let name_offset = self.append_string(self.number(0, E_SHSTRNDX), name.as_bytes());
        let offset = self.append(content);
        let start = self.header(0);
        let headers = self.bytes.get(start..start + count * SECTION_HEADER_SIZE).unwrap_or_default().to_vec();
        let table = self.append(&[headers, vec![0; SECTION_HEADER_SIZE]].concat());
        self.set(0, E_SHOFF, table);
        self.set(0, E_SHNUM, count as u64 + 1);
        let size = content.len() as u64;
        let values = [
            (SH_NAME, name_offset),
            (SH_TYPE, kind.into()),
            (SH_FLAGS, flags),
            (SH_OFFSET, offset),
            (SH_SIZE, size),
            (SH_ADDRALIGN, 8),
        ];
        for (field, value) in values {
            self.set_section(count, field, value);
        }
        count
    }

    /// Renames a section. Appends the new name, because another section's name may share the bytes of the old one.
    pub fn rename(&mut self, section: usize, name: &str) {
        let offset = self.append_string(self.number(0, E_SHSTRNDX), name.as_bytes());
        self.set_section(section, SH_NAME, offset);
    }

    /// Number of the symbol table's section.
    pub fn symbol_table(&self) -> usize {
        (1..self.count())
            .find(|&section| self.section(section, SH_TYPE) == u64::from(SHT_SYMTAB))
            .unwrap_or_default()
    }

    /// Number of the section with the symbols' names.
    pub fn symbol_names(&self) -> usize {
        self.number(self.header(self.symbol_table()), SH_LINK)
    }

    /// File offsets of all symbols except the null symbol.
    pub fn symbols(&self) -> Vec<usize> {
        self.range(self.symbol_table()).step_by(SYMBOL_SIZE).skip(1).collect()
    }

    pub fn symbol_name(&self, symbol: usize) -> &[u8] {
        let names = self.content(self.symbol_names());
        let name = names.get(self.number(symbol, ST_NAME)..).unwrap_or_default();
        name.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Name of a symbol, for descriptions.
    pub fn symbol_label(&self, symbol: usize) -> String {
        String::from_utf8_lossy(self.symbol_name(symbol)).into_owned()
    }

    /// Renames a symbol. Appends the new name, because another symbol's name may share the bytes of the old one.
    pub fn rename_symbol(&mut self, symbol: usize, name: &[u8]) {
        let offset = self.append_string(self.symbol_names(), name);
        self.set(symbol, ST_NAME, offset);
    }

    /// File offsets of the relocations of loaded sections, each with the number of the section that it changes.
    pub fn relocations(&self) -> Vec<(usize, usize)> {
        let is_applied = |&section: &usize| {
            let target = self.number(self.header(section), SH_INFO);
            self.section(section, SH_TYPE) == u64::from(SHT_RELA)
                && self.section(target, SH_FLAGS) & SHF_ALLOC != 0
        };
        let tables = (1..self.count()).filter(is_applied);
        tables
            .flat_map(|section| {
                let target = self.number(self.header(section), SH_INFO);
                self.range(section).step_by(RELOCATION_SIZE).map(move |entry| (entry, target))
            })
            .collect()
    }

    /// Removes the pointers to the init and exit functions from `struct module`, so that the kernel runs no code of the module.
    pub fn remove_init_and_exit(&mut self) {
        let Some(section) = self.find(".rela.gnu.linkonce.this_module") else { return };
        for entry in self.range(section).step_by(RELOCATION_SIZE) {
            self.set(entry, R_TYPE, 0);
        }
    }
}
