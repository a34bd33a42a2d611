//! Mutations of the ELF header, the section table and the symbol table.

use fastrand::Rng;
use kmod::Architecture;

use super::{Context, hex};
use crate::elf::{
    E_MACHINE, E_SHENTSIZE, E_SHNUM, E_SHOFF, E_SHSTRNDX, E_TYPE, Field, Object, SH_FLAGS, SH_LINK,
    SH_OFFSET, SH_SIZE, SH_TYPE, SHF_ALLOC, SHF_EXECINSTR, SHF_WRITE, SHT_NOBITS, SHT_PROGBITS, SHT_STRTAB,
    SHT_SYMTAB, ST_SHNDX,
};

pub(super) fn file_header(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let machine = object.get(0, E_MACHINE);
    let (field, name, values) = match random.u8(0..7) {
        0 => (E_TYPE, "e_type", vec![0, 1, 2, 3, 0xff00]),
        1 => (E_MACHINE, "e_machine", vec![machine, 3, 62, 183, 0, 243]),
        2 => (E_SHENTSIZE, "e_shentsize", vec![63, 64, 65, 0]),
        3 => (E_SHNUM, "e_shnum", vec![object.count() as u64, 0, object.count() as u64 + 1, 1]),
        4 => {
            let (offset, length) = (object.get(0, E_SHOFF), context.base.object.bytes.len() as u64);
            (E_SHOFF, "e_shoff", vec![offset, offset + 1, offset + 64, length, u64::MAX])
        }
        5 => (E_SHSTRNDX, "e_shstrndx", vec![0, object.count() as u64, object.get(0, E_SHSTRNDX), 1, 0xffff]),
        _ => {
            let index = random.usize(0..16);
            let value = random.u8(..);
            object.set(index, Field(0, 1), value.into());
            return Some(format!("e_ident[{index}] = {value}"));
        }
    };
    let value = random.choice(values)?;
    object.set(0, field, value);
    Some(format!("{name} = {}", hex(value)))
}

/// Moves a section so that it ends one byte before, at or after the end of the file.
pub(super) fn section_past_end(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = random.usize(1..object.count());
    let length = object.bytes.len() as u64;
    let size = object.section(section, SH_SIZE);
    let name = object.section_label(section);
    let distance = random.u64(0..3);
    let offset = (length + 1).checked_sub(size + distance)?;
    object.set_section(section, SH_OFFSET, offset);
    Some(format!("{name} ends {} bytes after the file", 1 - i64::try_from(distance).ok()?))
}

/// Adds a section, mostly with a name that exists already.
pub(super) fn additional_section(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let names: Vec<String> = (1..object.count())
        .filter(|&section| object.section(section, SH_FLAGS) & SHF_ALLOC != 0)
        .map(|section| object.section_label(section))
        .collect();
    let name = match random.u8(0..4) {
        0 => ".modinfo".to_owned(),
        1 => ".gnu.linkonce.this_module".to_owned(),
        2 => format!(".farrier.{}", random.u8(..)),
        _ => random.choice(names)?,
    };
    let flags = if random.bool() { SHF_ALLOC } else { 0 };
    let size = random.choice([0, 8])?;
    object.add(&name, SHT_PROGBITS, flags, &vec![0; size]);
    Some(format!("one more {name} of {size} bytes, flags {flags}"))
}

pub(super) fn symbol_table_structure(
    _: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    let (table, names) = (object.symbol_table(), object.symbol_names());
    match random.u8(0..7) {
        0 => {
            object.set_section(table, SH_TYPE, SHT_PROGBITS.into());
            Some("no symbol table".to_owned())
        }
        1 => {
            object.add(".symtab2", SHT_SYMTAB, 0, &[0; 24]);
            Some("two symbol tables".to_owned())
        }
        2 => {
            let link =
                random.choice([0, object.count() as u64 - 1, object.count() as u64, u64::from(u32::MAX)])?;
            object.set_section(table, SH_LINK, link);
            Some(format!("symbol names in section {link}"))
        }
        3 => {
            let texts = [object.content(names), b"x"].concat();
            object.replace(names, &texts);
            Some("symbol names without an end".to_owned())
        }
        4 => {
            let texts = [object.content(names), b"x\0"].concat();
            object.replace(names, &texts);
            Some("one more symbol name".to_owned())
        }
        5 => {
            let kind = random.choice([SHT_PROGBITS, SHT_STRTAB, SHT_NOBITS])?;
            object.set_section(names, SH_TYPE, kind.into());
            Some(format!("symbol names of type {kind}"))
        }
        _ => {
            let start = object.range(names).start;
            object.set(start, Field(0, 1), b'x'.into());
            Some("symbol names that begin with x".to_owned())
        }
    }
}

pub(super) fn section_flags(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let flags = random.choice([
        SHF_ALLOC,
        SHF_ALLOC | SHF_WRITE,
        SHF_ALLOC | SHF_EXECINSTR,
        SHF_WRITE | SHF_EXECINSTR,
        SHF_ALLOC | SHF_WRITE | SHF_EXECINSTR,
        SHF_EXECINSTR,
    ])?;
    if random.bool() {
        object.add(".farrier", SHT_PROGBITS, flags, &[0; 16]);
        return Some(format!("a section with flags {flags}"));
    }
    let code = object.find(".text").or_else(|| object.find(".init.text"))?;
    let name = object.section_label(code);
    object.set_section(code, SH_FLAGS, flags);
    Some(format!("{name} with flags {flags}"))
}

pub(super) fn symbol_section(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let symbols = object.symbols();
    let is_defined = |&symbol: &usize| (1..0xff00).contains(&object.get(symbol, ST_SHNDX));
    let symbol = random.choice(symbols.into_iter().filter(is_defined).collect::<Vec<_>>())?;
    let count = object.count() as u64;
    let section = random.choice([1, count - 1, count, count + 1, 0xfff1, 0xfff2, 0xff00, 0xff20, 0xfeff])?;
    let name = object.symbol_label(symbol);
    object.set(symbol, ST_SHNDX, section);
    Some(format!("{name} in section {}", hex(section)))
}

pub(super) fn missing_plt(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    if context.kernel.arch != Architecture::Arm64 {
        return None;
    }
    let name = random.choice([".plt", ".init.plt", ".note.gnu.build-id", ".comment"])?;
    let section = object.find(name)?;
    object.rename(section, ".farrier");
    Some(format!("no {name}"))
}

pub(super) fn module_size(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    // Before Linux 6.4 the kernel refuses no size, and the check reports another size as unknown.
    let version = context.kernel.release.version();
    if (version.major, version.minor) < (6, 4) && random.u8(0..8) > 0 {
        return None;
    }
    let section = object.find(".gnu.linkonce.this_module")?;
    let bytes = object.content(section).to_vec();
    // Never smaller: before Linux 6.4 the kernel would write beyond the section.
    let more = if random.bool() { 0 } else { random.choice([1, 8, 64, 1024])? };
    // Each place in the file gives another mutant.
    let place = random.u8(0..4);
    object.bytes.resize(object.bytes.len() + 64 * usize::from(place), 0);
    object.replace(section, &[bytes, vec![0; more]].concat());
    Some(format!("struct module with {more} more bytes, at place {place}"))
}
