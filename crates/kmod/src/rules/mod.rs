//! Pure: the loader's rules, one file each. A rule looks at one module and adds what it finds.

mod btf;
mod conflict;
mod licence;
mod namespace;
mod object;
mod signature;
pub(super) mod subject;
mod symbol_version;
mod undefined_symbol;
mod vermagic;

use super::Finding;
use subject::Subject;

/// A rule.
type Rule = fn(&Subject<'_>, &mut Vec<Finding>);

/// All rules, in the order in which the loader meets them.
const RULES: [Rule; 12] = [
    signature::check,
    object::machine,
    object::sections,
    object::module_size,
    vermagic::check,
    undefined_symbol::check,
    symbol_version::check,
    licence::check,
    namespace::check,
    conflict::export,
    conflict::built_in,
    btf::check,
];

/// What all rules find.
pub(super) fn apply(subject: &Subject<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rule in RULES {
        rule(subject, &mut findings);
    }
    findings
}
