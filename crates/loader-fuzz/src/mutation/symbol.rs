//! Mutations of undefined and exported symbols.

use fastrand::Rng;

use super::{Context, module_info::set_field, symbol_version::append_version};
use crate::elf::{Object, ST_INFO, ST_NAME, ST_SHNDX};

pub(super) fn missing_export_table(
    context: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    if context.base.module.exports.is_empty() {
        return None;
    }
    let name = random.choice(["__kcrctab", "__kcrctab_gpl", "__ksymtab", "__ksymtab_gpl", "__kflagstab"])?;
    let section = object.find(name)?;
    object.rename(section, ".farrier");
    Some(format!("no {name}"))
}

/// File offsets of the undefined symbols.
fn undefined_symbols(object: &Object) -> Vec<usize> {
    let is_import = |&symbol: &usize| object.get(symbol, ST_SHNDX) == 0 && object.get(symbol, ST_NAME) != 0;
    object.symbols().into_iter().filter(is_import).collect()
}

pub(super) fn undefined_symbol(
    context: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    let symbol = random.choice(undefined_symbols(object))?;
    let old = object.symbol_label(symbol);
    let weak = random.u8(0..3) == 0;
    let binding = if weak { 2 } else { 1 };
    object.set(symbol, ST_INFO, binding << 4);
    let new = match random.u8(0..5) {
        0 => return Some(format!("{old} is {}", if weak { "weak" } else { "strong" })),
        1 | 2 => format!("{old}_of_farrier"),
        3 => String::new(),
        _ => {
            let same_length = context.exports.values().nth(random.usize(0..context.exports.len()))?;
            random.choice(same_length)?.clone()
        }
    };
    object.rename_symbol(symbol, new.as_bytes());
    Some(format!("{new:?} instead of {old}, weak {weak}"))
}

pub(super) fn namespace(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let imported: Vec<&str> = context.base.module.fields("import_ns").collect();
    match random.u8(0..6) {
        0..=2 => {
            // Uses a symbol of a namespace, and imports the namespace in a third of the cases.
            let table = context.kernel.symbols.as_ref()?;
            let inside: Vec<_> =
                table.iter().filter(|s| s.namespace.is_some() && s.module == "vmlinux").collect();
            let chosen = random.choice(inside)?;
            let symbol = random.choice(undefined_symbols(object))?;
            let namespace = chosen.namespace?.to_owned();
            object.rename_symbol(symbol, chosen.name.as_bytes());
            append_version(object, chosen.name, chosen.crc);
            let imports: Vec<&str> = if random.u8(0..3) == 0 { vec![&namespace] } else { vec![] };
            let all: Vec<&str> = imported.iter().chain(&imports).copied().collect();
            set_field(object, "import_ns", &all)?;
            Some(format!("{} of namespace {namespace}, imports {all:?}", chosen.name))
        }
        3 if !imported.is_empty() => {
            set_field(object, "import_ns", &imported[1..])?;
            Some(format!("no import of {}", imported[0]))
        }
        4 => {
            let name = random.choice(["module:kvm", "module:", "module", "MODULE:kvm"])?;
            set_field(object, "import_ns", &[&imported[..], &[name]].concat())?;
            Some(format!("import of {name}"))
        }
        _ => {
            set_field(object, "import_ns", &[&imported[..], &["FARRIER"]].concat())?;
            Some("import of FARRIER".to_owned())
        }
    }
}

pub(super) fn duplicate_export(
    context: &Context<'_>,
    object: &mut Object,
    random: &mut Rng,
) -> Option<String> {
    let exports = &context.base.module.exports;
    let old = &random.choice(exports)?.name;
    let new = if random.bool() {
        random.choice(context.exports.get(&old.len())?)?.clone()
    } else {
        format!("{}~", old.get(..old.len() - 1)?)
    };
    // The kernel reads the name from this section, and the check reads it from the symbol table.
    let strings = object.find("__ksymtab_strings")?;
    let range = object.range(strings);
    replace_string(object.bytes.get_mut(range)?, old, &new);
    for prefix in ["__ksymtab_", "__kstrtab_", "__kstrtabns_", "__crc_", "__flags_"] {
        let old_name = format!("{prefix}{old}");
        let symbols = object.symbols();
        for symbol in
            symbols.into_iter().filter(|&s| object.symbol_name(s) == old_name.as_bytes()).collect::<Vec<_>>()
        {
            object.rename_symbol(symbol, format!("{prefix}{new}").as_bytes());
        }
    }
    Some(format!("exports {new} instead of {old}"))
}

/// Replaces a zero-terminated string with another one of the same length.
fn replace_string(bytes: &mut [u8], old: &str, new: &str) {
    let start = bytes
        .windows(old.len() + 1)
        .enumerate()
        .find(|(at, window)| {
            window.strip_suffix(b"\0") == Some(old.as_bytes()) && (*at == 0 || bytes.get(at - 1) == Some(&0))
        })
        .map(|(at, _)| at);
    if let Some(range) = start.and_then(|start| bytes.get_mut(start..start + old.len())) {
        range.copy_from_slice(new.as_bytes());
    }
}
