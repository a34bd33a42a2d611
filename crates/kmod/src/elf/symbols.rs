//! The symbol table of a module, and the names of its symbols.

use std::collections::BTreeMap;

use object::{
    LittleEndian,
    elf::{self, Sym64},
    pod::slice_from_bytes,
};

use super::{Elf, LE, MAX_NAME, NOT_READ, no_symbols, string_at};
use crate::{ModuleError, error::Result, file::ModuleBytes};

/// Maximum number of symbols whose names are read outside of the string table.
const MAX_NAMES_BEYOND: usize = 4096;
/// Section number of symbols that livepatch resolves (`include/uapi/linux/elf.h`).
const SHN_LIVEPATCH: elf::SymbolSection = elf::SymbolSection(0xff20);

/// Symbol table of a module; a valid module has exactly one.
pub(crate) struct Symbols<'d> {
    entries: &'d [Sym64<LittleEndian>],
    names: &'d [u8],
    /// Offset after the last name that ends in `names`.
    end: usize,
    /// Names that do not end in `names`, by offset. Before Linux 6.14, the loader reads them up to the next zero byte of the file.
    names_beyond: BTreeMap<u32, &'d [u8]>,
}

/// Error in the string table of a module's symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StringTableError {
    /// The table does not begin with a zero byte.
    MissingLeadingNul,
    /// The table does not end with a zero byte.
    MissingTrailingNul,
    /// The name of a symbol lies outside of the table.
    OutOfBounds,
}

/// Location of a symbol's definition (`st_shndx`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SymbolLocation {
    Undefined,
    Absolute,
    Common,
    Section(usize),
    /// Resolved by livepatch (`SHN_LIVEPATCH`).
    Livepatch,
    /// Reserved section number without a meaning for the loader.
    Reserved(u16),
}

/// Entry of the symbol table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol<'d> {
    /// Name, truncated to [`MAX_NAME`] bytes; valid names are shorter. Empty if the name does not end in the file.
    pub name: &'d [u8],
    pub location: SymbolLocation,
    pub value: u64,
    pub weak: bool,
}

impl<'d, R: ModuleBytes<'d>> Elf<'d, R> {
    /// Index of the first symbol table.
    pub fn symbol_table(&self) -> Option<usize> {
        (1..self.headers.len()).find(|&index| self.is_of_type(index, elf::SHT_SYMTAB))
    }

    /// Index of the section with the symbols' names.
    pub(super) fn symbol_names_index(&self) -> Option<usize> {
        self.headers.get(self.symbol_table()?).map(|header| header.sh_link.get(LE) as usize)
    }

    /// Returns the module's symbols. The kernel accepts only modules with exactly one symbol table
    /// (`elf_validity_cache_index_sym`).
    pub fn symbols(&self) -> Result<Symbols<'d>> {
        let mut tables =
            self.headers.iter().enumerate().filter(|(_, h)| h.sh_type.get(LE) == elf::SHT_SYMTAB);
        let (index, header) = tables.next().ok_or_else(no_symbols)?;
        if tables.next().is_some() {
            return Err(self.malformed(index, "is not the only symbol table"));
        }
        let link = header.sh_link.get(LE) as usize;
        if link == 0 || link >= self.headers.len() {
            return Err(self.malformed(index, "has no table of names"));
        }
        let names = self.contents(link)?;
        let bytes = self.contents(index)?;
        let count = bytes.len() / size_of::<Sym64<LittleEndian>>();
        let (entries, _) = slice_from_bytes::<Sym64<LittleEndian>>(bytes, count)
            .map_err(|()| self.malformed(index, "is not aligned in the file"))?;
        let end = names.iter().rposition(|&byte| byte == 0).map_or(0, |last| last + 1);
        let offsets = entries.iter().map(|entry| entry.st_name.get(LE));
        let mut names_beyond = BTreeMap::new();
        for (count, offset) in offsets.filter(|&offset| offset as usize >= end).enumerate() {
            if count == MAX_NAMES_BEYOND {
                let message = "the module has many names outside of its string table";
                return Err(ModuleError::unknown(message, NOT_READ));
            }
            if let Some(name) = self.name_in_file(link, offset)? {
                names_beyond.insert(offset, name);
            }
        }
        Ok(Symbols { entries, names, end, names_beyond })
    }

    /// Returns the name at an offset from the begin of a section, inside or outside of the section. `None` if the name does not end
    /// in the file.
    fn name_in_file(&self, section: usize, offset: u32) -> Result<Option<&'d [u8]>> {
        let section_start = self.headers.get(section).map_or(0, |header| header.sh_offset.get(LE));
        let start = section_start.saturating_add(offset.into());
        let remaining = self.data.len().unwrap_or_default().saturating_sub(start);
        // Most names are short, and the budget allows few long ones.
        for size in [64, MAX_NAME as u64] {
            let name = match remaining.min(size) {
                0 => None,
                size => string_at(self.read_table(section, start, size)?, 0),
            };
            if name.is_some() {
                return Ok(name);
            }
        }
        Ok(None)
    }
}

impl<'d> Symbols<'d> {
    /// Returns a symbol by its index; `None` if there is no such symbol.
    pub fn get(&self, number: u32) -> Option<Symbol<'d>> {
        self.entries.get(usize::try_from(number).ok()?).map(|entry| self.symbol(entry))
    }

    /// Iterates over all symbols except the null symbol.
    pub fn iter(&self) -> impl Iterator<Item = Symbol<'d>> {
        self.entries.iter().skip(1).map(|entry| self.symbol(entry))
    }

    fn symbol(&self, entry: &Sym64<LittleEndian>) -> Symbol<'d> {
        let offset = entry.st_name.get(LE);
        let rest = self.names_beyond.get(&offset).copied();
        let rest = rest.or_else(|| self.names.get(offset as usize..)).unwrap_or_default();
        let name = rest.get(..MAX_NAME).unwrap_or(rest);
        let name = string_at(name, 0).unwrap_or(name);
        let weak = entry.st_info.st_bind() == elf::STB_WEAK;
        Symbol { name, location: symbol_location(entry), value: entry.st_value.get(LE), weak }
    }

    /// Locations of the symbols whose names do not end in the file, with the offsets of the names.
    pub fn unnamed(&self) -> impl Iterator<Item = (SymbolLocation, u32)> {
        let is_unnamed = |entry: &&Sym64<LittleEndian>| {
            let offset = entry.st_name.get(LE);
            offset as usize >= self.end && !self.names_beyond.contains_key(&offset)
        };
        let unnamed = self.entries.iter().skip(1).filter(is_unnamed);
        unnamed.map(|entry| (symbol_location(entry), entry.st_name.get(LE)))
    }

    /// Returns the error in the string table, if there is one (`elf_validity_cache_strtab`).
    pub fn string_table_error(&self) -> Option<StringTableError> {
        let is_outside = |entry: &Sym64<LittleEndian>| entry.st_name.get(LE) as usize >= self.names.len();
        match self.names {
            [] => Some(StringTableError::OutOfBounds),
            [.., last] if *last != 0 => Some(StringTableError::MissingTrailingNul),
            _ if self.entries.iter().any(is_outside) => Some(StringTableError::OutOfBounds),
            [first, ..] => (*first != 0).then_some(StringTableError::MissingLeadingNul),
        }
    }
}

fn symbol_location(entry: &Sym64<LittleEndian>) -> SymbolLocation {
    match entry.st_shndx.get(LE) {
        elf::SHN_UNDEF => SymbolLocation::Undefined,
        elf::SHN_ABS => SymbolLocation::Absolute,
        elf::SHN_COMMON => SymbolLocation::Common,
        SHN_LIVEPATCH => SymbolLocation::Livepatch,
        index if index.0 < elf::SHN_LORESERVE => SymbolLocation::Section(usize::from(index.0)),
        index => SymbolLocation::Reserved(index.0),
    }
}
