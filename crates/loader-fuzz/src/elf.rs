//! Edits of relocatable ELF objects of 64 bits. A new or longer section is appended to the file, so that no other changes.

use std::ops::Range;

pub const ALLOC: u64 = 2;
pub const WRITE: u64 = 1;
pub const EXEC: u64 = 4;
pub const PROGBITS: u32 = 1;
pub const SYMTAB: u32 = 2;
pub const STRTAB: u32 = 3;
pub const RELA: u32 = 4;
pub const NOBITS: u32 = 8;
pub const REL: u32 = 9;

const HEADER: usize = 64;
const SYMBOL: usize = 24;
const RELOCATION: usize = 24;

/// Field of a section header: its offset and its size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field(pub usize, pub usize);

pub const NAME: Field = Field(0, 4);
pub const KIND: Field = Field(4, 4);
pub const FLAGS: Field = Field(8, 8);
pub const ADDRESS: Field = Field(16, 8);
pub const OFFSET: Field = Field(24, 8);
pub const SIZE: Field = Field(32, 8);
pub const LINK: Field = Field(40, 4);
pub const INFO: Field = Field(44, 4);
pub const ALIGN: Field = Field(48, 8);
pub const ENTRY: Field = Field(56, 8);

/// Fields of the file's header.
pub const TYPE: Field = Field(16, 2);
pub const MACHINE: Field = Field(18, 2);
pub const SECTIONS_AT: Field = Field(40, 8);
pub const SECTION_SIZE: Field = Field(58, 2);
pub const SECTION_COUNT: Field = Field(60, 2);
pub const NAMES_INDEX: Field = Field(62, 2);

/// Fields of a symbol.
pub const SYMBOL_NAME: Field = Field(0, 4);
pub const SYMBOL_INFO: Field = Field(4, 1);
pub const SYMBOL_SECTION: Field = Field(6, 2);
pub const SYMBOL_VALUE: Field = Field(8, 8);

/// Fields of a relocation.
pub const PLACE: Field = Field(0, 8);
pub const RELOCATION_KIND: Field = Field(8, 4);
pub const RELOCATION_SYMBOL: Field = Field(12, 4);

/// A well-formed object.
#[derive(Clone)]
pub struct Object {
    pub bytes: Vec<u8>,
}

impl Object {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Reads a field of a structure that begins at `at`.
    pub fn get(&self, at: usize, Field(offset, size): Field) -> u64 {
        let bytes = self.bytes.get(at + offset..at + offset + size).unwrap_or_default();
        bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    pub fn set(&mut self, at: usize, Field(offset, size): Field, value: u64) {
        let place = self.bytes.get_mut(at + offset..at + offset + size);
        for (byte, new) in place.into_iter().flatten().zip(value.to_le_bytes()) {
            *byte = new;
        }
    }

    fn number(&self, at: usize, field: Field) -> usize {
        usize::try_from(self.get(at, field)).unwrap_or(usize::MAX)
    }

    pub fn count(&self) -> usize {
        self.number(0, SECTION_COUNT)
    }

    /// Position of a section's header.
    pub fn header(&self, section: usize) -> usize {
        self.number(0, SECTIONS_AT) + section * HEADER
    }

    pub fn section(&self, section: usize, field: Field) -> u64 {
        self.get(self.header(section), field)
    }

    pub fn set_section(&mut self, section: usize, field: Field, value: u64) {
        self.set(self.header(section), field, value);
    }

    /// Position of a section's bytes in the file; empty for a section without.
    pub fn range(&self, section: usize) -> Range<usize> {
        if self.section(section, KIND) == u64::from(NOBITS) {
            return 0..0;
        }
        let start = self.number(self.header(section), OFFSET);
        start..start + self.number(self.header(section), SIZE)
    }

    pub fn content(&self, section: usize) -> &[u8] {
        self.bytes.get(self.range(section)).unwrap_or_default()
    }

    pub fn name(&self, section: usize) -> &[u8] {
        let names = self.content(self.number(0, NAMES_INDEX));
        let name = names.get(self.number(self.header(section), NAME)..).unwrap_or_default();
        name.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Finds the first section of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        (1..self.count()).find(|&section| self.name(section) == name.as_bytes())
    }

    fn append(&mut self, content: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(64), 0);
        let at = self.bytes.len() as u64;
        self.bytes.extend(content);
        at
    }

    /// Replaces a section's content.
    pub fn replace(&mut self, section: usize, content: &[u8]) {
        let at = self.append(content);
        self.set_section(section, OFFSET, at);
        self.set_section(section, SIZE, content.len() as u64);
    }

    /// Adds a section, and returns its number.
    pub fn add(&mut self, name: &str, kind: u32, flags: u64, content: &[u8]) -> usize {
        let (count, names) = (self.count(), self.number(0, NAMES_INDEX));
        let mut texts = self.content(names).to_vec();
        let name_at = texts.len() as u64;
        texts.extend([name.as_bytes(), b"\0"].concat());
        self.replace(names, &texts);
        let at = self.append(content);
        let start = self.header(0);
        let headers = self.bytes.get(start..start + count * HEADER).unwrap_or_default().to_vec();
        let table = self.append(&[headers, vec![0; HEADER]].concat());
        self.set(0, SECTIONS_AT, table);
        self.set(0, SECTION_COUNT, count as u64 + 1);
        let size = content.len() as u64;
        let values =
            [(NAME, name_at), (KIND, kind.into()), (FLAGS, flags), (OFFSET, at), (SIZE, size), (ALIGN, 8)];
        for (field, value) in values {
            self.set_section(count, field, value);
        }
        count
    }

    /// Renames a section. The old name may be part of another section's, so the new one is appended.
    pub fn rename(&mut self, section: usize, name: &str) {
        let names = self.number(0, NAMES_INDEX);
        let mut texts = self.content(names).to_vec();
        let at = texts.len() as u64;
        texts.extend([name.as_bytes(), b"\0"].concat());
        self.replace(names, &texts);
        self.set_section(section, NAME, at);
    }

    /// The number of the symbol table.
    pub fn symbol_table(&self) -> usize {
        (1..self.count())
            .find(|&section| self.section(section, KIND) == u64::from(SYMTAB))
            .unwrap_or_default()
    }

    /// The number of the table with the symbols' names.
    pub fn symbol_names(&self) -> usize {
        self.number(self.header(self.symbol_table()), LINK)
    }

    /// Positions of all symbols but the first.
    pub fn symbols(&self) -> Vec<usize> {
        self.range(self.symbol_table()).step_by(SYMBOL).skip(1).collect()
    }

    pub fn symbol_name(&self, symbol: usize) -> &[u8] {
        let names = self.content(self.symbol_names());
        let name = names.get(self.number(symbol, SYMBOL_NAME)..).unwrap_or_default();
        name.split(|&byte| byte == 0).next().unwrap_or_default()
    }

    /// Gives a symbol another name.
    pub fn rename_symbol(&mut self, symbol: usize, name: &[u8]) {
        let table = self.symbol_names();
        let mut texts = self.content(table).to_vec();
        let at = texts.len() as u64;
        texts.extend([name, b"\0"].concat());
        self.replace(table, &texts);
        self.set(symbol, SYMBOL_NAME, at);
    }

    /// Positions of the relocations of loaded sections, with the number of the section that they change.
    pub fn relocations(&self) -> Vec<(usize, usize)> {
        let is_applied = |&section: &usize| {
            let target = self.number(self.header(section), INFO);
            self.section(section, KIND) == u64::from(RELA) && self.section(target, FLAGS) & ALLOC != 0
        };
        let tables = (1..self.count()).filter(is_applied);
        tables
            .flat_map(|section| {
                let target = self.number(self.header(section), INFO);
                self.range(section).step_by(RELOCATION).map(move |at| (at, target))
            })
            .collect()
    }

    /// Takes the pointers to the init and exit functions out of `struct module`, so that the kernel runs no code of the module.
    pub fn set_no_functions(&mut self) {
        let Some(section) = self.find(".rela.gnu.linkonce.this_module") else { return };
        for at in self.range(section).step_by(RELOCATION) {
            self.set(at, RELOCATION_KIND, 0);
        }
    }
}
