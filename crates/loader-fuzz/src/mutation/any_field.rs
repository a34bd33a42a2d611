//! Mutations of any field or byte, regardless of the rules.

use fastrand::Rng;

use super::{Context, hex};
use crate::elf::{
    Field, Object, R_SYM, R_TYPE, SH_ADDR, SH_ADDRALIGN, SH_ENTSIZE, SH_FLAGS, SH_INFO, SH_LINK, SH_NAME,
    SH_OFFSET, SH_SIZE, SH_TYPE, ST_INFO, ST_NAME, ST_SHNDX, ST_VALUE,
};

/// Returns 0, 1, the maximum, a value near the old one, or a random value.
fn interesting_value(random: &mut Rng, old: u64, Field(_, size): Field) -> u64 {
    let mask = if size == 8 { u64::MAX } else { (1 << (8 * size)) - 1 };
    let new = match random.u8(0..8) {
        0 => 0,
        1 => 1,
        2 => old.wrapping_add(1),
        3 => old.wrapping_sub(1),
        4 => mask,
        5 => old ^ 1 << random.u32(0..u32::try_from(8 * size).unwrap_or(8)),
        6 => random.u64(0..256),
        _ => random.u64(..),
    };
    new & mask
}

pub(super) fn any_header(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let offset = random.usize(4..64);
    let value = random.u8(..);
    object.set(offset, Field(0, 1), value.into());
    Some(format!("byte {offset} of the header = {value}"))
}

pub(super) fn any_section(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let fields =
        [SH_NAME, SH_TYPE, SH_FLAGS, SH_ADDR, SH_OFFSET, SH_SIZE, SH_LINK, SH_INFO, SH_ADDRALIGN, SH_ENTSIZE];
    let field = random.choice(fields)?;
    let section = random.usize(0..object.count());
    let name = object.section_label(section);
    let old = object.section(section, field);
    let new = interesting_value(random, old, field);
    object.set_section(section, field, new);
    Some(format!("field at {} of section {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

pub(super) fn any_symbol(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let field = random.choice([ST_NAME, ST_INFO, ST_SHNDX, ST_VALUE])?;
    let symbol = random.choice(object.symbols())?;
    let name = object.symbol_label(symbol);
    let old = object.get(symbol, field);
    let new = interesting_value(random, old, field);
    object.set(symbol, field, new);
    Some(format!("field at {} of symbol {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

/// Changes the type or the symbol of a relocation. Leaves the offset alone: the kernel does not check it, so a wrong offset
/// overwrites other memory of the machine.
pub(super) fn any_relocation(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (entry, target) = random.choice(object.relocations())?;
    let field = random.choice([R_TYPE, R_SYM])?;
    let old = object.get(entry, field);
    let count = object.symbols().len() as u64;
    let new = if field == R_SYM { random.u64(0..=count) } else { interesting_value(random, old, field) };
    object.set(entry, field, new);
    let name = object.section_label(target);
    Some(format!("field at {} of a relocation of {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

/// Changes a byte of a section with metadata.
pub(super) fn any_byte(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let names = [
        ".modinfo",
        "__versions",
        "__ksymtab_strings",
        ".BTF",
        ".strtab",
        ".shstrtab",
        "__param",
        "__kcrctab",
    ];
    let name = random.choice(names)?;
    let range = object.range(object.find(name)?);
    let offset = random.usize(0..range.len().max(1));
    let value = random.u8(..);
    object.set(range.start + offset, Field(0, 1), value.into());
    Some(format!("byte {offset} of {name} = {value}"))
}

pub(super) fn any_length(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let length = object.bytes.len();
    let new = match random.u8(0..4) {
        0 => random.usize(0..65),
        1 => length - random.usize(1..65),
        2 => length + random.usize(1..65),
        _ => random.usize(0..length),
    };
    object.bytes.resize(new, 0);
    Some(format!("{new} bytes instead of {length}"))
}
