//! Mutations of BTF, relocations and per-CPU data.

use fastrand::Rng;
use kmod::Architecture;

use super::Context;
use crate::elf::{
    Field, Object, R_OFFSET, R_TYPE, SH_ADDRALIGN, SH_INFO, SH_SIZE, SH_TYPE, SHF_ALLOC, SHF_WRITE,
    SHT_NOBITS, SHT_PROGBITS, SHT_REL, SHT_RELA,
};

pub(super) fn btf(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = object.find(".BTF")?;
    let mut content = object.content(section).to_vec();
    match random.u8(0..7) {
        0 => {
            object.rename(section, ".farrier");
            return Some("no .BTF".to_owned());
        }
        1 => {
            object.replace(section, b"");
            return Some("empty .BTF".to_owned());
        }
        2 => {
            let index = random.usize(0..24.min(content.len()));
            let bit = random.u32(0..8);
            *content.get_mut(index)? ^= 1 << bit;
            object.replace(section, &content);
            return Some(format!("bit {bit} of byte {index} of the header of .BTF"));
        }
        3 => {
            let index = random.usize(24..content.len().max(25));
            let value = random.u8(..);
            *content.get_mut(index)? = value;
            object.replace(section, &content);
            return Some(format!("byte {index} of .BTF = {value}"));
        }
        4 => content.truncate(random.usize(0..content.len().max(1))),
        5 => content.extend([0; 4]),
        _ => {}
    }
    object.replace(section, &content);
    Some(format!(".BTF with {} bytes", content.len()))
}

pub(super) fn relocation_type(
    context: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    let (entry, target) = random.choice(object.relocations())?;
    let old = object.get(entry, R_TYPE);
    let kinds = match context.kernel.arch {
        Architecture::Amd64 => vec![0, 1, 2, 4, 9, 10, 11, 24, 25, 41, 42, 43, 255],
        Architecture::Arm64 => {
            vec![0, 256, 257, 258, 260, 261, 263, 274, 275, 277, 283, 299, 311, 312, 313, 314, 400, 1024]
        }
    };
    let kind = if random.u8(0..3) == 0 { old } else { random.choice(kinds)? };
    object.set(entry, R_TYPE, kind);
    let name = object.section_label(target);
    Some(format!("relocation of {name}+{:#x}, type {kind} instead of {old}", object.get(entry, R_OFFSET)))
}

pub(super) fn relocation_target(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (entry, target) = random.choice(object.relocations())?;
    let offset = usize::try_from(object.get(entry, R_OFFSET)).ok()?;
    let start = object.range(target).start;
    let distance = random.usize(0..10);
    let byte = (start + offset + distance).checked_sub(1)?;
    let bit = random.u32(0..8);
    let old = object.get(byte, Field(0, 1));
    object.set(byte, Field(0, 1), old ^ 1 << bit);
    let name = object.section_label(target);
    Some(format!("bit {bit} of byte {} of the target {name}+{offset:#x}", i64::try_from(distance).ok()? - 1))
}

pub(super) fn relocation_table(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let tables: Vec<usize> = (1..object.count())
        .filter(|&section| object.section(section, SH_TYPE) == u64::from(SHT_RELA))
        .collect();
    let table = random.choice(tables)?;
    let name = object.section_label(table);
    match random.u8(0..4) {
        0 => {
            object.set_section(table, SH_TYPE, SHT_REL.into());
            Some(format!("{name} of type SHT_REL"))
        }
        1 => {
            object.set_section(table, SH_TYPE, SHT_PROGBITS.into());
            Some(format!("{name} of type SHT_PROGBITS"))
        }
        2 => {
            let target = random.choice([0, object.count() as u64, u64::from(u32::MAX)])?;
            object.set_section(table, SH_INFO, target);
            Some(format!("{name} of section {target}"))
        }
        _ => {
            let size = object.section(table, SH_SIZE);
            object.set_section(table, SH_SIZE, size.checked_sub(random.choice([1, 8, 24])?)?);
            Some(format!("{name} with {} bytes", object.section(table, SH_SIZE)))
        }
    }
}

pub(super) fn per_cpu(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    // On arm64 the kernel's own variables may take up some of the last bytes of the reserve, for alignment.
    let limit = if context.kernel.arch == Architecture::Arm64 { 8128 } else { 8192 };
    let size = match random.u8(0..4) {
        0 => 8193 + random.usize(0..16),
        1 => limit - random.usize(0..16),
        2 => random.usize(0..16384),
        _ => random.choice([0, 1, limit, 8193, 32768, 32769, 65536])?,
    };
    let section = object.add(".data..percpu", SHT_PROGBITS, SHF_ALLOC | SHF_WRITE, &vec![0; size]);
    let align = random.choice([1, 8, 64])?;
    object.set_section(section, SH_ADDRALIGN, align);
    if random.bool() {
        object.set_section(section, SH_TYPE, SHT_NOBITS.into());
    }
    Some(format!("{size} bytes per processor, aligned to {align}"))
}
