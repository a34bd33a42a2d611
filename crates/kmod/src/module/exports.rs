//! Exports of a module: the symbols that describe them in the file's symbol table.

use std::collections::BTreeMap;

use super::{ModuleExport, ParseBudget, check_name_length, over_limit, u32_le};
use crate::{
    elf::{Elf, MAX_NAME, Symbol, SymbolLocation, string_at},
    error::Result,
    file::ModuleBytes,
};

/// Maximum number of exports of a file. Debian's drm.ko has 482.
const MAX_EXPORTS: usize = 16_384;
/// `KSYM_FLAG_GPL_ONLY` (`include/linux/module_symbol.h`).
const GPL_ONLY: u8 = 1;

/// Symbols that describe exports, by exported name.
#[derive(Default)]
pub(super) struct ExportSymbols<'d> {
    tables: BTreeMap<&'d [u8], Symbol<'d>>,
    crcs: BTreeMap<&'d [u8], Symbol<'d>>,
    namespaces: BTreeMap<&'d [u8], Symbol<'d>>,
    flags: BTreeMap<&'d [u8], Symbol<'d>>,
}

impl<'d> ExportSymbols<'d> {
    /// Adds a symbol, if it describes an export.
    pub(super) fn add(&mut self, symbol: Symbol<'d>) -> Result<()> {
        if !symbol.name.starts_with(b"__") {
            return Ok(());
        }
        let (symbols, name) = if let Some(name) = symbol.name.strip_prefix(b"__ksymtab_") {
            (&mut self.tables, name)
        } else if let Some(name) = symbol.name.strip_prefix(b"__crc_") {
            (&mut self.crcs, name)
        } else if let Some(name) = symbol.name.strip_prefix(b"__kstrtabns_") {
            (&mut self.namespaces, name)
        } else if let Some(name) = symbol.name.strip_prefix(b"__flags_") {
            (&mut self.flags, name)
        } else {
            return Ok(());
        };
        check_name_length(symbol.name)?;
        symbols.insert(name, symbol);
        if symbols.len() > MAX_EXPORTS { Err(over_limit()) } else { Ok(()) }
    }

    /// Reads the exports that the collected symbols describe.
    pub(super) fn exports<R: ModuleBytes<'d>>(
        self,
        elf: &Elf<'d, R>,
        budget: &mut ParseBudget,
    ) -> Result<Vec<ModuleExport>> {
        let Self { tables, crcs, namespaces, flags } = self;
        let mut exports = Vec::with_capacity(tables.len());
        for (name, table) in tables {
            let SymbolLocation::Section(section) = table.location else { continue };
            let section = elf.name(section);
            if !section.starts_with(b"__ksymtab") && !section.starts_with(b"___ksymtab") {
                continue;
            }
            let namespace = match namespaces.get(name) {
                Some(symbol) => string_at(bytes_at(elf, symbol, MAX_NAME as u64)?, 0),
                None => None,
            };
            let namespace = namespace.filter(|namespace| !namespace.is_empty());
            exports.push(ModuleExport {
                name: budget.name(name)?,
                crc: crcs.get(name).map(|symbol| crc_of(elf, symbol)).transpose()?.flatten(),
                gpl_only: section == b"__ksymtab_gpl"
                    || section.starts_with(b"___ksymtab_gpl+")
                    || flags.get(name).map_or(Ok(false), |symbol| flagged_gpl_only(elf, symbol))?,
                namespace: namespace.map(|namespace| budget.name(namespace)).transpose()?,
            });
        }
        Ok(exports)
    }
}

/// Reads the version of an export. The version is the symbol's own value (until Linux 5.18 on most machines), or is stored at
/// the symbol's address: in `__kcrctab` since Linux 5.19, before in `.rodata` with `CONFIG_MODULE_REL_CRCS`.
fn crc_of<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, symbol: &Symbol<'d>) -> Result<Option<u32>> {
    if symbol.location == SymbolLocation::Absolute {
        return Ok(u32::try_from(symbol.value).ok());
    }
    Ok(bytes_at(elf, symbol, 4)?.get(..4).map(u32_le))
}

/// Whether the flags of an export mark it as GPL only. Linux 7.2 and later have one table for all exports, and a separate
/// section with a byte of flags for each.
fn flagged_gpl_only<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, symbol: &Symbol<'d>) -> Result<bool> {
    let SymbolLocation::Section(index) = symbol.location else { return Ok(false) };
    let section = elf.name(index);
    if section != b"__kflagstab" && !section.starts_with(b"___kflagstab+") {
        return Ok(false);
    }
    Ok(bytes_at(elf, symbol, 1)?.first().is_some_and(|flags| flags & GPL_ONLY != 0))
}

/// Returns the bytes that a symbol points to, up to a size.
fn bytes_at<'d, R: ModuleBytes<'d>>(elf: &Elf<'d, R>, symbol: &Symbol<'d>, size: u64) -> Result<&'d [u8]> {
    match symbol.location {
        SymbolLocation::Section(index) => elf.read_at(index, symbol.value, size),
        _ => Ok(&[]),
    }
}
