//! Mutations of the tables with symbol versions.

use fastrand::Rng;

use super::Context;
use crate::elf::{Field, Object, SH_FLAGS, SH_SIZE, SHF_ALLOC, SHT_PROGBITS};

/// Picks an entry of `__versions`. Returns its offset in the file, and its symbol.
fn random_version(object: &Object, random: &mut Rng) -> Option<(usize, String)> {
    let section = object.find("__versions")?;
    let entries: Vec<usize> = object.range(section).step_by(64).collect();
    let entry = random.choice(entries)?;
    let name = object.bytes.get(entry + 8..entry + 64)?.split(|&byte| byte == 0).next()?;
    Some((entry, String::from_utf8_lossy(name).into_owned()))
}

pub(super) fn symbol_crc(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    const CRC: Field = Field(0, 8);
    let (entry, name) = random_version(object, random)?;
    let old = object.get(entry, CRC);
    match random.u8(0..7) {
        0 => {
            let bit = random.u32(0..32);
            object.set(entry, CRC, old ^ 1 << bit);
            Some(format!("bit {bit} of the version of {name}"))
        }
        1 => {
            object.set(entry, CRC, 0);
            Some(format!("version 0 of {name}"))
        }
        2 => {
            object.set(entry, CRC, old | 1 << 40);
            Some(format!("bit 40 of the version of {name}"))
        }
        3 => {
            // The new name belongs to no symbol that the module uses.
            object.set(entry + 8, Field(0, 1), b'~'.into());
            Some(format!("the version of ~ instead of {name}"))
        }
        4 => {
            let section = object.find("__versions")?;
            let mut content = object.content(section).to_vec();
            content
                .extend([&0x1234_u64.to_le_bytes()[..], name.as_bytes(), &vec![0; 56 - name.len()]].concat());
            object.replace(section, &content);
            Some(format!("a second, wrong version of {name}"))
        }
        5 => {
            let section = object.find("__versions")?;
            let mut content = object.content(section).to_vec();
            content.extend([&0x1234_u64.to_le_bytes()[..], b"farrier_unused", &[0; 42]].concat());
            object.replace(section, &content);
            Some("the version of a symbol that is not used".to_owned())
        }
        _ => {
            let section = object.find("__versions")?;
            let size = object.section(section, SH_SIZE);
            let less = random.choice([1, 8, 63, 64])?;
            object.set_section(section, SH_SIZE, size.checked_sub(less)?);
            Some(format!("__versions {less} bytes shorter"))
        }
    }
}

pub(super) fn missing_versions(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = object.find("__versions")?;
    match random.u8(0..3) {
        0 => object.rename(section, ".farrier"),
        1 => object.replace(section, b""),
        _ => object.set_section(section, SH_FLAGS, 0),
    }
    Some("no versions".to_owned())
}

pub(super) fn extended_versions(
    context: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    let versions = context.base.module.versions.clone()?;
    let wrong = random.u8(0..4) == 0;
    let missing = random.u8(0..4) == 0;
    let values = versions.values().map(|crc| if wrong { !crc } else { *crc });
    let crcs: Vec<u8> = values.flat_map(u32::to_le_bytes).collect();
    let names: Vec<u8> = versions
        .keys()
        .skip(usize::from(missing))
        .flat_map(|name| [name.as_bytes(), b"\0"].concat())
        .collect();
    // Variants above 3 are complete.
    let variant = random.u8(0..6);
    if variant != 1 {
        object.add("__version_ext_crcs", SHT_PROGBITS, SHF_ALLOC, &crcs);
    }
    if variant != 2 {
        object.add("__version_ext_names", SHT_PROGBITS, SHF_ALLOC, &names);
    }
    if variant == 3 {
        let section = object.find("__versions")?;
        object.rename(section, ".farrier");
    }
    let difference = match variant {
        1 => ", names only",
        2 => ", versions only",
        3 => ", without __versions",
        _ => "",
    };
    Some(format!("extended versions{difference}, wrong {wrong}, one name missing {missing}"))
}

/// Appends an entry to `__versions`, unless the name is too long.
pub(super) fn append_version(object: &mut Object, name: &str, crc: u32) {
    let Some(section) = object.find("__versions").filter(|_| name.len() < 56) else { return };
    let entry = [&u64::from(crc).to_le_bytes()[..], name.as_bytes(), &vec![0; 56 - name.len()]].concat();
    let content = [object.content(section), &entry].concat();
    object.replace(section, &content);
}
