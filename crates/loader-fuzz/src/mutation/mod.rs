//! Mutations of modules, by the rule of the loader that they aim at. A mutation of a rule produces a module on either side of
//! the rule's limit. Other mutations change any field of the file.

// `Mutation` is the type of all mutations, including those that always apply.
#![allow(clippy::unnecessary_wraps)]

mod any_field;
mod elf_structure;
mod module_info;
mod section_content;
mod signature;
mod symbol;
mod symbol_version;

use std::collections::BTreeMap;

use fastrand::Rng;
use kmod::KernelFacts;

use any_field::{any_byte, any_header, any_length, any_relocation, any_section, any_symbol};
use elf_structure::{
    additional_section, file_header, missing_plt, module_size, section_flags, section_past_end,
    symbol_section, symbol_table_structure,
};
use module_info::{flag_field, license, modinfo, vermagic};
use section_content::{btf, per_cpu, relocation_table, relocation_target, relocation_type};
use signature::signature;
use symbol::{duplicate_export, missing_export_table, namespace, undefined_symbol};
use symbol_version::{extended_versions, missing_versions, symbol_crc};

use crate::{elf::Object, kernel::BaseModule};

/// A changed module.
pub struct Mutant {
    /// Name of the rule that the mutation aims at; `any` for a change of any field.
    pub rule: &'static str,
    /// Description of the change, for people.
    pub description: String,
    pub bytes: Vec<u8>,
}

/// Input of a mutation, in addition to the random numbers.
pub struct Context<'a> {
    pub kernel: &'a KernelFacts,
    pub base: &'a BaseModule,
    /// Symbols that the kernel image exports without a namespace, by the length of their names. A name can replace another name
    /// of the same length in place.
    pub exports: &'a BTreeMap<usize, Vec<String>>,
}

/// Changes the object, and returns a description of the change. Returns `None` if the mutation does not apply to the object.
type Mutation = fn(&Context<'_>, &mut Object, &mut Rng) -> Option<String>;

/// Mutations of each rule; a mutation that is listed twice is chosen twice as often. `any` comes last.
const RULES: [(&str, &[Mutation]); 14] = [
    (
        "elf",
        &[
            file_header,
            section_past_end,
            additional_section,
            symbol_table_structure,
            section_flags,
            symbol_section,
            modinfo,
            missing_plt,
        ],
    ),
    ("signature", &[]),
    ("module-size", &[module_size]),
    ("vermagic", &[vermagic]),
    ("symbol-version", &[symbol_crc, symbol_crc, missing_versions, extended_versions, missing_export_table]),
    ("undefined-symbol", &[undefined_symbol]),
    ("license", &[license]),
    ("namespace", &[namespace]),
    ("duplicate-export", &[duplicate_export]),
    ("btf", &[btf]),
    ("kernel", &[flag_field]),
    ("relocation", &[relocation_type, relocation_type, relocation_target, relocation_table]),
    ("per-cpu", &[per_cpu]),
    ("any", &[any_header, any_section, any_section, any_symbol, any_relocation, any_byte, any_length]),
];

/// Names of all rules. The position of a name is the `rule` argument of [`mutant`].
pub fn rules() -> impl Iterator<Item = &'static str> {
    RULES.iter().map(|(name, _)| *name)
}

/// Applies a random mutation of a rule. Returns `None` if the mutation does not apply to the module.
pub fn mutant(context: &Context<'_>, rule: usize, random: &mut Rng) -> Option<Mutant> {
    let (name, mutations) = RULES.get(rule)?;
    if *name == "signature" {
        return signature(context, random);
    }
    let mutation = random.choice(mutations.iter())?;
    let mut object = context.base.object.clone();
    let description = mutation(context, &mut object, random)?;
    Some(Mutant { rule: name, description, bytes: object.bytes })
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}
