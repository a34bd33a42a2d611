//! Mutations of modules. Each is close to the limit of one rule, on either side of it, or changes any field of the file.

// All mutations have one type.
#![allow(clippy::unnecessary_wraps)]

use std::collections::BTreeMap;

use fastrand::Rng;
use kmod::{Architecture, KernelFacts, Signature};

use crate::{
    elf::{
        self, ALLOC, ENTRY, EXEC, FLAGS, Field, INFO, KIND, LINK, MACHINE, NAME, NAMES_INDEX, NOBITS, OFFSET,
        Object, PLACE, PROGBITS, REL, RELOCATION_KIND, RELOCATION_SYMBOL, SECTION_COUNT, SECTION_SIZE,
        SECTIONS_AT, SIZE, STRTAB, SYMBOL_INFO, SYMBOL_NAME, SYMBOL_SECTION, SYMBOL_VALUE, SYMTAB, TYPE,
        WRITE,
    },
    kernel::Base,
};

/// A changed module.
pub struct Mutant {
    /// The rule whose limit the change is near; `any` for a change of any field.
    pub rule: &'static str,
    /// The change.
    pub what: String,
    pub bytes: Vec<u8>,
}

/// What a mutation needs besides the random numbers.
pub struct Context<'a> {
    pub kernel: &'a KernelFacts,
    pub base: &'a Base,
    /// Symbols that the kernel image exports to every module, by length, so that one can replace another in place.
    pub exports: &'a BTreeMap<usize, Vec<String>>,
}

/// Changes the object, and describes the change; `None` if the object does not have what the mutation changes.
type Mutation = fn(&Context<'_>, &mut Object, &mut Rng) -> Option<String>;

/// The mutations of each rule. `any` comes last.
const RULES: [(&str, &[Mutation]); 14] = [
    (
        "elf",
        &[
            header,
            one_section,
            two_sections,
            symbol_tables,
            writable_code,
            symbol_places,
            information,
            trampolines,
        ],
    ),
    ("signature", &[]),
    ("module-size", &[module_size]),
    ("vermagic", &[vermagic]),
    ("symbol-version", &[version, version, versions_absent, extended_versions, export_versions]),
    ("undefined-symbol", &[undefined]),
    ("license", &[license]),
    ("namespace", &[namespace]),
    ("duplicate-export", &[duplicate_export]),
    ("btf", &[type_information]),
    ("kernel", &[livepatch]),
    ("relocation", &[relocation_type, relocation_type, relocation_target, relocation_table]),
    ("per-cpu", &[per_cpu]),
    ("any", &[any_header, any_section, any_section, any_symbol, any_relocation, any_byte, any_length]),
];

/// The names of all rules in the order of [`mutant`]'s argument.
pub fn rules() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|(name, _)| *name)
}

/// Makes a mutant; `None` if this mutation does not apply to the module.
pub fn mutant(context: &Context<'_>, rule: usize, random: &mut Rng) -> Option<Mutant> {
    let (name, mutations) = RULES.get(rule)?;
    if *name == "signature" {
        return signature(context, random);
    }
    let mutation = random.choice(mutations.iter())?;
    let mut object = context.base.object.clone();
    let what = mutation(context, &mut object, random)?;
    Some(Mutant { rule: name, what, bytes: object.bytes })
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}

/// A value near a limit, or any.
fn number(random: &mut Rng, old: u64, Field(_, size): Field) -> u64 {
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

fn header(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let machine = object.get(0, MACHINE);
    let (field, name, values) = match random.u8(0..7) {
        0 => (TYPE, "e_type", vec![0, 1, 2, 3, 0xff00]),
        1 => (MACHINE, "e_machine", vec![machine, 3, 62, 183, 0, 243]),
        2 => (SECTION_SIZE, "e_shentsize", vec![63, 64, 65, 0]),
        3 => (SECTION_COUNT, "e_shnum", vec![object.count() as u64, 0, object.count() as u64 + 1, 1]),
        4 => {
            let at = object.get(0, SECTIONS_AT);
            (
                SECTIONS_AT,
                "e_shoff",
                vec![at, at + 1, at + 64, context.base.object.bytes.len() as u64, u64::MAX],
            )
        }
        5 => {
            (NAMES_INDEX, "e_shstrndx", vec![0, object.count() as u64, object.get(0, NAMES_INDEX), 1, 0xffff])
        }
        _ => {
            let at = random.usize(0..16);
            let value = random.u8(..);
            object.set(at, Field(0, 1), value.into());
            return Some(format!("e_ident[{at}] = {value}"));
        }
    };
    let value = random.choice(values)?;
    object.set(0, field, value);
    Some(format!("{name} = {}", hex(value)))
}

/// A section that ends at, before or after the end of the file.
fn one_section(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = random.usize(1..object.count());
    let length = object.bytes.len() as u64;
    let size = object.section(section, SIZE);
    let name = String::from_utf8_lossy(object.name(section)).into_owned();
    let distance = random.u64(0..3);
    let offset = (length + 1).checked_sub(size + distance)?;
    object.set_section(section, OFFSET, offset);
    Some(format!("{name} ends {} bytes after the file", 1 - i64::try_from(distance).ok()?))
}

/// A further section of a name that exists.
fn two_sections(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let names: Vec<String> = (1..object.count())
        .filter(|&section| object.section(section, FLAGS) & ALLOC != 0)
        .map(|section| String::from_utf8_lossy(object.name(section)).into_owned())
        .collect();
    let name = match random.u8(0..4) {
        0 => ".modinfo".to_owned(),
        1 => ".gnu.linkonce.this_module".to_owned(),
        2 => format!(".farrier.{}", random.u8(..)),
        _ => random.choice(names)?,
    };
    let flags = if random.bool() { ALLOC } else { 0 };
    let size = random.choice([0, 8])?;
    object.add(&name, PROGBITS, flags, &vec![0; size]);
    Some(format!("one more {name} of {size} bytes, flags {flags}"))
}

fn symbol_tables(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (table, names) = (object.symbol_table(), object.symbol_names());
    match random.u8(0..7) {
        0 => {
            object.set_section(table, KIND, PROGBITS.into());
            Some("no symbol table".to_owned())
        }
        1 => {
            object.add(".symtab2", SYMTAB, 0, &[0; 24]);
            Some("two symbol tables".to_owned())
        }
        2 => {
            let link =
                random.choice([0, object.count() as u64 - 1, object.count() as u64, u64::from(u32::MAX)])?;
            object.set_section(table, LINK, link);
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
            let kind = random.choice([PROGBITS, STRTAB, NOBITS])?;
            object.set_section(names, KIND, kind.into());
            Some(format!("symbol names of type {kind}"))
        }
        _ => {
            let start = object.range(names).start;
            object.set(start, Field(0, 1), b'x'.into());
            Some("symbol names that begin with x".to_owned())
        }
    }
}

fn writable_code(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let flags =
        random.choice([ALLOC, ALLOC | WRITE, ALLOC | EXEC, WRITE | EXEC, ALLOC | WRITE | EXEC, EXEC])?;
    if random.bool() {
        object.add(".farrier", PROGBITS, flags, &[0; 16]);
        return Some(format!("a section with flags {flags}"));
    }
    let code = object.find(".text").or_else(|| object.find(".init.text"))?;
    let name = String::from_utf8_lossy(object.name(code)).into_owned();
    object.set_section(code, FLAGS, flags);
    Some(format!("{name} with flags {flags}"))
}

fn symbol_places(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let symbols = object.symbols();
    let is_defined = |&symbol: &usize| (1..0xff00).contains(&object.get(symbol, SYMBOL_SECTION));
    let symbol = random.choice(symbols.into_iter().filter(is_defined).collect::<Vec<_>>())?;
    let count = object.count() as u64;
    let section = random.choice([1, count - 1, count, count + 1, 0xfff1, 0xfff2, 0xff00, 0xff20, 0xfeff])?;
    let name = String::from_utf8_lossy(object.symbol_name(symbol)).into_owned();
    object.set(symbol, SYMBOL_SECTION, section);
    Some(format!("{name} in section {}", hex(section)))
}

fn trampolines(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    if context.kernel.arch != Architecture::Arm64 {
        return None;
    }
    let name = random.choice([".plt", ".init.plt", ".note.gnu.build-id", ".comment"])?;
    let section = object.find(name)?;
    object.rename(section, ".farrier");
    Some(format!("no {name}"))
}

/// Fields of `.modinfo` as they are.
fn fields(object: &Object) -> Option<(usize, Vec<Vec<u8>>)> {
    let section = object.find(".modinfo")?;
    let fields = object.content(section).split(|&byte| byte == 0).filter(|field| !field.is_empty());
    Some((section, fields.map(<[u8]>::to_vec).collect()))
}

fn set_fields(object: &mut Object, section: usize, fields: &[Vec<u8>]) {
    let texts: Vec<u8> = fields.iter().flat_map(|field| [field, &b"\0"[..]].concat()).collect();
    object.replace(section, &texts);
}

/// Replaces the values of a field; none to remove it.
fn set_field(object: &mut Object, name: &str, values: &[&str]) -> Option<()> {
    let (section, mut fields) = fields(object)?;
    let start = format!("{name}=");
    fields.retain(|field| !field.starts_with(start.as_bytes()));
    fields.extend(values.iter().map(|value| format!("{start}{value}").into_bytes()));
    set_fields(object, section, &fields);
    Some(())
}

fn information(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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

fn module_size(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    // Before Linux 6.4 no size is refused, and the check does not decide about another one.
    let version = context.kernel.release.version();
    if (version.major, version.minor) < (6, 4) && random.u8(0..8) > 0 {
        return None;
    }
    let section = object.find(".gnu.linkonce.this_module")?;
    let bytes = object.content(section).to_vec();
    // Not smaller: before Linux 6.4 the kernel writes beyond the section.
    let more = random.choice([0, 1, 8, 64, 1024])?;
    object.replace(section, &[bytes, vec![0; more]].concat());
    Some(format!("struct module with {more} more bytes"))
}

fn vermagic(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let own = context.base.module.vermagic()?;
    let words: Vec<&str> = own.split(' ').collect();
    let (first, rest) = own.split_once(' ')?;
    let at = random.usize(1..words.len());
    let without: Vec<&str> =
        words.iter().enumerate().filter(|(index, _)| *index != at).map(|(_, word)| *word).collect();
    let values = [
        own.to_owned(),
        format!("{first}x {rest}"),
        format!("5.10.0 {rest}"),
        format!(" {own}"),
        format!("{own} "),
        own.trim_end().to_owned(),
        format!("{own}retpoline "),
        without.join(" "),
        format!("{first}  {rest}"),
        rest.to_owned(),
        own.to_uppercase(),
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
        // The kernel uses the first.
        set_field(object, "vermagic", &[own, &value])?;
        return Some(format!("a second vermagic {value:?}"));
    }
    set_field(object, "vermagic", &[&value])?;
    Some(format!("vermagic {value:?}"))
}

/// Position of an entry of `__versions`, and the name in it.
fn version_entry(object: &Object, random: &mut Rng) -> Option<(usize, String)> {
    let section = object.find("__versions")?;
    let entries: Vec<usize> = object.range(section).step_by(64).collect();
    let at = random.choice(entries)?;
    let name = object.bytes.get(at + 8..at + 64)?.split(|&byte| byte == 0).next()?;
    Some((at, String::from_utf8_lossy(name).into_owned()))
}

fn version(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    const CRC: Field = Field(0, 8);
    let (at, name) = version_entry(object, random)?;
    let old = object.get(at, CRC);
    match random.u8(0..7) {
        0 => {
            let bit = random.u32(0..32);
            object.set(at, CRC, old ^ 1 << bit);
            Some(format!("bit {bit} of the version of {name}"))
        }
        1 => {
            object.set(at, CRC, 0);
            Some(format!("version 0 of {name}"))
        }
        2 => {
            object.set(at, CRC, old | 1 << 40);
            Some(format!("bit 40 of the version of {name}"))
        }
        3 => {
            // The entry belongs to a symbol that the module does not use.
            object.set(at + 8, Field(0, 1), b'~'.into());
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
            let size = object.section(section, SIZE);
            let less = random.choice([1, 8, 63, 64])?;
            object.set_section(section, SIZE, size.checked_sub(less)?);
            Some(format!("__versions {less} bytes shorter"))
        }
    }
}

fn versions_absent(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let section = object.find("__versions")?;
    match random.u8(0..3) {
        0 => object.rename(section, ".farrier"),
        1 => object.replace(section, b""),
        _ => object.set_section(section, FLAGS, 0),
    }
    Some("no versions".to_owned())
}

fn extended_versions(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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
    let which = random.u8(0..6);
    if which != 1 {
        object.add("__version_ext_crcs", PROGBITS, ALLOC, &crcs);
    }
    if which != 2 {
        object.add("__version_ext_names", PROGBITS, ALLOC, &names);
    }
    if which == 3 {
        let section = object.find("__versions")?;
        object.rename(section, ".farrier");
    }
    let part = match which {
        1 => ", names only",
        2 => ", versions only",
        3 => ", without __versions",
        _ => "",
    };
    Some(format!("extended versions{part}, wrong {wrong}, one name missing {missing}"))
}

fn export_versions(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    if context.base.module.exports.is_empty() {
        return None;
    }
    let name = random.choice(["__kcrctab", "__kcrctab_gpl", "__ksymtab", "__ksymtab_gpl", "__kflagstab"])?;
    let section = object.find(name)?;
    object.rename(section, ".farrier");
    Some(format!("no {name}"))
}

/// Undefined symbols, as positions.
fn imports(object: &Object) -> Vec<usize> {
    let is_import =
        |&symbol: &usize| object.get(symbol, SYMBOL_SECTION) == 0 && object.get(symbol, SYMBOL_NAME) != 0;
    object.symbols().into_iter().filter(is_import).collect()
}

fn undefined(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let symbol = random.choice(imports(object))?;
    let old = String::from_utf8_lossy(object.symbol_name(symbol)).into_owned();
    let weak = random.bool();
    let binding = if weak { 2 } else { 1 };
    object.set(symbol, SYMBOL_INFO, binding << 4);
    let new = match random.u8(0..4) {
        0 => return Some(format!("{old} is {}", if weak { "weak" } else { "strong" })),
        1 => format!("{old}_of_farrier"),
        2 => String::new(),
        _ => {
            let same_length = context.exports.values().nth(random.usize(0..context.exports.len()))?;
            random.choice(same_length)?.clone()
        }
    };
    object.rename_symbol(symbol, new.as_bytes());
    Some(format!("{new:?} instead of {old}, weak {weak}"))
}

fn license(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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

fn namespace(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let imported: Vec<&str> = context.base.module.fields("import_ns").collect();
    match random.u8(0..6) {
        0 | 1 => {
            // A symbol in a namespace that may not be imported.
            let table = context.kernel.symbols.as_ref()?;
            let inside: Vec<_> =
                table.iter().filter(|s| s.namespace.is_some() && s.module == "vmlinux").collect();
            let chosen = random.choice(inside)?;
            let symbol = random.choice(imports(object))?;
            let namespace = chosen.namespace?.to_owned();
            object.rename_symbol(symbol, chosen.name.as_bytes());
            with_version(object, chosen.name, chosen.crc);
            let imports: Vec<&str> = if random.bool() { vec![&namespace] } else { vec![] };
            let all: Vec<&str> = imported.iter().chain(&imports).copied().collect();
            set_field(object, "import_ns", &all)?;
            Some(format!("{} of namespace {namespace}, imports {all:?}", chosen.name))
        }
        2 if !imported.is_empty() => {
            set_field(object, "import_ns", &imported[1..])?;
            Some(format!("no import of {}", imported[0]))
        }
        3 => {
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

/// Appends a version to `__versions`.
fn with_version(object: &mut Object, name: &str, crc: u32) {
    let Some(section) = object.find("__versions").filter(|_| name.len() < 56) else { return };
    let entry = [&u64::from(crc).to_le_bytes()[..], name.as_bytes(), &vec![0; 56 - name.len()]].concat();
    let content = [object.content(section), &entry].concat();
    object.replace(section, &content);
}

fn duplicate_export(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let exports = &context.base.module.exports;
    let old = &random.choice(exports)?.name;
    let new = if random.bool() {
        random.choice(context.exports.get(&old.len())?)?.clone()
    } else {
        format!("{}~", old.get(..old.len() - 1)?)
    };
    // The kernel reads the name from this section, and the check from the symbols.
    let strings = object.find("__ksymtab_strings")?;
    let range = object.range(strings);
    replace_text(object.bytes.get_mut(range)?, old, &new);
    for prefix in ["__ksymtab_", "__kstrtab_", "__kstrtabns_", "__crc_", "__flags_"] {
        let wanted = format!("{prefix}{old}");
        let symbols = object.symbols();
        for symbol in
            symbols.into_iter().filter(|&s| object.symbol_name(s) == wanted.as_bytes()).collect::<Vec<_>>()
        {
            object.rename_symbol(symbol, format!("{prefix}{new}").as_bytes());
        }
    }
    Some(format!("exports {new} instead of {old}"))
}

/// Replaces a string that ends with a zero byte.
fn replace_text(bytes: &mut [u8], old: &str, new: &str) {
    let start = bytes
        .windows(old.len() + 1)
        .enumerate()
        .find(|(at, window)| {
            window.strip_suffix(b"\0") == Some(old.as_bytes()) && (*at == 0 || bytes.get(at - 1) == Some(&0))
        })
        .map(|(at, _)| at);
    if let Some(place) = start.and_then(|start| bytes.get_mut(start..start + old.len())) {
        place.copy_from_slice(new.as_bytes());
    }
}

fn type_information(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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
            let at = random.usize(0..24.min(content.len()));
            let bit = random.u32(0..8);
            *content.get_mut(at)? ^= 1 << bit;
            object.replace(section, &content);
            return Some(format!("bit {bit} of byte {at} of the header of .BTF"));
        }
        3 => {
            let at = random.usize(24..content.len().max(25));
            let value = random.u8(..);
            *content.get_mut(at)? = value;
            object.replace(section, &content);
            return Some(format!("byte {at} of .BTF = {value}"));
        }
        4 => content.truncate(random.usize(0..content.len().max(1))),
        5 => content.extend([0; 4]),
        _ => {}
    }
    object.replace(section, &content);
    Some(format!(".BTF with {} bytes", content.len()))
}

fn livepatch(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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

fn relocation_type(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (at, target) = random.choice(object.relocations())?;
    let old = object.get(at, RELOCATION_KIND);
    let kinds = match context.kernel.arch {
        Architecture::Amd64 => vec![0, 1, 2, 4, 9, 10, 11, 24, 25, 41, 42, 43, 255],
        Architecture::Arm64 => {
            vec![0, 256, 257, 258, 260, 261, 263, 274, 275, 277, 283, 299, 311, 312, 313, 314, 400, 1024]
        }
    };
    let kind = if random.u8(0..3) == 0 { old } else { random.choice(kinds)? };
    object.set(at, RELOCATION_KIND, kind);
    let name = String::from_utf8_lossy(object.name(target)).into_owned();
    Some(format!("relocation of {name}+{:#x}, type {kind} instead of {old}", object.get(at, PLACE)))
}

fn relocation_target(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (at, target) = random.choice(object.relocations())?;
    let place = usize::try_from(object.get(at, PLACE)).ok()?;
    let start = object.range(target).start;
    let distance = random.usize(0..10);
    let byte = (start + place + distance).checked_sub(1)?;
    let bit = random.u32(0..8);
    let old = object.get(byte, Field(0, 1));
    object.set(byte, Field(0, 1), old ^ 1 << bit);
    let name = String::from_utf8_lossy(object.name(target)).into_owned();
    Some(format!("bit {bit} of byte {} of the target {name}+{place:#x}", i64::try_from(distance).ok()? - 1))
}

fn relocation_table(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let tables: Vec<usize> = (1..object.count())
        .filter(|&section| object.section(section, KIND) == u64::from(elf::RELA))
        .collect();
    let table = random.choice(tables)?;
    let name = String::from_utf8_lossy(object.name(table)).into_owned();
    match random.u8(0..4) {
        0 => {
            object.set_section(table, KIND, REL.into());
            Some(format!("{name} of type SHT_REL"))
        }
        1 => {
            object.set_section(table, KIND, PROGBITS.into());
            Some(format!("{name} of type SHT_PROGBITS"))
        }
        2 => {
            let target = random.choice([0, object.count() as u64, u64::from(u32::MAX)])?;
            object.set_section(table, INFO, target);
            Some(format!("{name} of section {target}"))
        }
        _ => {
            let size = object.section(table, SIZE);
            object.set_section(table, SIZE, size.checked_sub(random.choice([1, 8, 24])?)?);
            Some(format!("{name} with {} bytes", object.section(table, SIZE)))
        }
    }
}

fn per_cpu(context: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    // On arm64 the last bytes of the reserve depend on where the kernel's own variables end.
    let limit = if context.kernel.arch == Architecture::Arm64 { 8128 } else { 8192 };
    let size = match random.u8(0..4) {
        0 => 8193 + random.usize(0..16),
        1 => limit - random.usize(0..16),
        2 => random.usize(0..16384),
        _ => random.choice([0, 1, limit, 8193, 32768, 32769, 65536])?,
    };
    let section = object.add(".data..percpu", PROGBITS, ALLOC | WRITE, &vec![0; size]);
    let align = random.choice([1, 8, 64])?;
    object.set_section(section, elf::ALIGN, align);
    if random.bool() {
        object.set_section(section, KIND, NOBITS.into());
    }
    Some(format!("{size} bytes per processor, aligned to {align}"))
}

/// Changes of the record and the message at the end of a signed module.
fn signature(context: &Context<'_>, random: &mut Rng) -> Option<Mutant> {
    const MARKER: usize = 28;
    const RECORD: usize = 12;
    let signed = &context.base.signed;
    if context.base.module.signature != Signature::None || signed.len() <= context.base.object.bytes.len() {
        return None;
    }
    let message = context.base.object.bytes.len();
    let record = signed.len().checked_sub(MARKER + RECORD)?;
    // The functions must not run, so the signature does not fit the object. A kernel that knows the key would notice.
    let mut bytes = [&context.base.object.bytes[..], signed.get(message..)?].concat();
    let what = match random.u8(0..7) {
        0 => {
            bytes.truncate(message);
            "no signature".to_owned()
        }
        1 => {
            let more = random.usize(1..4);
            bytes.extend(vec![b'\n'; more]);
            format!("{more} bytes after the signature")
        }
        2 => {
            let at = record + RECORD + random.usize(0..MARKER);
            *bytes.get_mut(at)? ^= 1;
            "a damaged marker".to_owned()
        }
        3 => {
            let (at, value) = (random.usize(0..RECORD), random.u8(..));
            *bytes.get_mut(record + at)? = value;
            format!("byte {at} of the record = {value}")
        }
        4 => {
            let length = u32::from_be_bytes(bytes.get(record + 8..record + 12)?.try_into().ok()?);
            let new = random.choice([0, 1, length - 1, length + 1, u32::try_from(record).ok()?, u32::MAX])?;
            bytes.get_mut(record + 8..record + 12)?.copy_from_slice(&new.to_be_bytes());
            format!("a message of {new} bytes instead of {length}")
        }
        5 => {
            bytes.truncate(signed.len() - random.usize(1..MARKER + RECORD));
            "a truncated end".to_owned()
        }
        _ => {
            let at = random.usize(0..(record - message).min(120));
            let value = random.u8(..);
            *bytes.get_mut(message + at)? = value;
            format!("byte {at} of the message = {value}")
        }
    };
    // The kernel knows the key and refuses the signature of another object. Neither the check nor the headers have the key.
    let key = |bytes: &[u8]| match kmod::without_signature(bytes).1 {
        Signature::By(by) => Some(by.key_id),
        _ => None,
    };
    let is_its_own = key(&bytes).is_some_and(|own| Some(own) == key(signed));
    (!is_its_own).then_some(Mutant { rule: "signature", what, bytes })
}

fn any_header(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let at = random.usize(4..64);
    let value = random.u8(..);
    object.set(at, Field(0, 1), value.into());
    Some(format!("byte {at} of the header = {value}"))
}

fn any_section(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let fields = [NAME, KIND, FLAGS, elf::ADDRESS, OFFSET, SIZE, LINK, INFO, elf::ALIGN, ENTRY];
    let field = random.choice(fields)?;
    let section = random.usize(0..object.count());
    let name = String::from_utf8_lossy(object.name(section)).into_owned();
    let old = object.section(section, field);
    let new = number(random, old, field);
    object.set_section(section, field, new);
    Some(format!("field at {} of section {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

fn any_symbol(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let field = random.choice([SYMBOL_NAME, SYMBOL_INFO, SYMBOL_SECTION, SYMBOL_VALUE])?;
    let symbol = random.choice(object.symbols())?;
    let name = String::from_utf8_lossy(object.symbol_name(symbol)).into_owned();
    let old = object.get(symbol, field);
    let new = number(random, old, field);
    object.set(symbol, field, new);
    Some(format!("field at {} of symbol {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

/// Not the place: the kernel does not check it, and a wrong one damages the machine.
fn any_relocation(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
    let (at, target) = random.choice(object.relocations())?;
    let field = random.choice([RELOCATION_KIND, RELOCATION_SYMBOL])?;
    let old = object.get(at, field);
    let count = object.symbols().len() as u64;
    let new = if field == RELOCATION_SYMBOL { random.u64(0..=count) } else { number(random, old, field) };
    object.set(at, field, new);
    let name = String::from_utf8_lossy(object.name(target)).into_owned();
    Some(format!("field at {} of a relocation of {name} = {} instead of {}", field.0, hex(new), hex(old)))
}

/// A byte of a section that describes the module.
fn any_byte(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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
    let at = random.usize(0..range.len().max(1));
    let value = random.u8(..);
    object.set(range.start + at, Field(0, 1), value.into());
    Some(format!("byte {at} of {name} = {value}"))
}

fn any_length(_: &Context<'_>, object: &mut Object, random: &mut Rng) -> Option<String> {
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
