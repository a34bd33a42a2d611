//! Mutations of `.modinfo`.

use fastrand::Rng;

use super::Context;
use crate::elf::Object;

/// Returns the number of the section `.modinfo`, and its `key=value` fields.
fn fields(object: &Object) -> Option<(usize, Vec<Vec<u8>>)> {
    let section = object.find(".modinfo")?;
    let fields = object.content(section).split(|&byte| byte == 0).filter(|field| !field.is_empty());
    Some((section, fields.map(<[u8]>::to_vec).collect()))
}

fn write_fields(object: &mut Object, section: usize, fields: &[Vec<u8>]) {
    let texts: Vec<u8> = fields.iter().flat_map(|field| [field, &b"\0"[..]].concat()).collect();
    object.replace(section, &texts);
}

/// Replaces all values of a key; an empty list removes the key.
pub(super) fn set_field(object: &mut Object, name: &str, values: &[&str]) -> Option<()> {
    let (section, mut fields) = fields(object)?;
    let start = format!("{name}=");
    fields.retain(|field| !field.starts_with(start.as_bytes()));
    fields.extend(values.iter().map(|value| format!("{start}{value}").into_bytes()));
    write_fields(object, section, &fields);
    Some(())
}

pub(super) fn modinfo(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = object.find(".modinfo")?;
    match random.u8(0..4) {
        0 => {
            object.replace(section, b"");
            Some("empty .modinfo".to_owned())
        }
        1 => {
            let content = object.content(section);
            let content = content.strip_suffix(b"\0").unwrap_or(content).to_vec();
            object.replace(section, &content);
            Some(".modinfo without an end".to_owned())
        }
        2 => {
            object.rename(section, ".farrier");
            Some("no .modinfo".to_owned())
        }
        _ => {
            set_field(object, "name", &["farrier_other"])?;
            Some("another name".to_owned())
        }
    }
}

pub(super) fn vermagic(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let original = context.base.module.vermagic()?;
    let words: Vec<&str> = original.split(' ').collect();
    let (first, rest) = original.split_once(' ')?;
    let removed = random.usize(1..words.len());
    let without: Vec<&str> =
        words.iter().enumerate().filter(|(index, _)| *index != removed).map(|(_, word)| *word).collect();
    let values = [
        original.to_owned(),
        format!("{first}x {rest}"),
        format!("5.10.0 {rest}"),
        format!(" {original}"),
        format!("{original} "),
        original.trim_end().to_owned(),
        format!("{original}retpoline "),
        without.join(" "),
        format!("{first}  {rest}"),
        rest.to_owned(),
        original.to_uppercase(),
        String::new(),
        first.to_owned(),
        format!("{first}-{first} {rest}"),
    ];
    let value = random.choice(values)?;
    if random.u8(0..12) == 0 {
        set_field(object, "vermagic", &[])?;
        return Some("no vermagic".to_owned());
    }
    if random.u8(0..6) == 0 {
        // The kernel uses the first value.
        set_field(object, "vermagic", &[original, &value])?;
        return Some(format!("a second vermagic {value:?}"));
    }
    set_field(object, "vermagic", &[&value])?;
    Some(format!("vermagic {value:?}"))
}

pub(super) fn license(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let texts = [
        "GPL",
        "GPL v2",
        "GPL and additional rights",
        "Dual BSD/GPL",
        "Dual MIT/GPL",
        "Dual MPL/GPL",
        "Proprietary",
        "gpl",
        "GPL ",
        " GPL",
        "GPLv2",
        "MIT",
        "BSD",
        "Apache-2.0",
        "GPL\tv2",
        "",
    ];
    let text = random.choice(texts)?;
    match random.u8(0..6) {
        0 => set_field(object, "license", &[])?,
        1 => set_field(object, "license", &["GPL", text])?,
        2 => set_field(object, "license", &[text, "GPL"])?,
        _ => set_field(object, "license", &[text])?,
    }
    let (_, fields) = fields(object)?;
    let licenses = fields.iter().filter(|field| field.starts_with(b"license="));
    Some(licenses.map(|field| String::from_utf8_lossy(field).into_owned()).collect::<Vec<_>>().join(", "))
}

pub(super) fn flag_field(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (name, value) = random.choice([
        ("livepatch", "Y"),
        ("livepatch", ""),
        ("livepatc", "Y"),
        ("staging", "Y"),
        ("intree", "N"),
    ])?;
    set_field(object, name, &[value])?;
    Some(format!("{name}={value}"))
}
