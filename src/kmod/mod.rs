//! Pure: kernel modules: ELF, modinfo, vermagic, symbol versions, and what the loader would say.

mod boot;
mod btf;
mod check;
mod config;
mod elf;
mod facts;
mod in_tree;
mod load_order;
mod module;
mod report;
mod resolve;
mod rules;
mod symvers;
mod system_map;
mod table;
mod vermagic;
mod vmlinux;
mod vmlinuz;

#[cfg(test)]
pub(crate) mod testing;

pub use boot::{BootOutcome, BootReport, ModuleBoot};
pub use btf::{Btf, BtfError};
pub use check::{CheckRequest, NeededTable, PayloadModule, check};
pub use config::{ConfigError, KernelConfig};
pub use facts::{BeyondHeaders, BtfBase, FactSource, InTree, KernelFacts, Known};
pub use module::{Module, ModuleError, ModuleExport, UndefinedSymbol, module_name};
pub use report::{CheckReport, Finding, ModuleReport, Rule, Verdict, VerdictError};
pub use symvers::{ExportedSymbol, SymbolTable, SymbolTableError};
pub use system_map::exported_names;
pub use table::table;
pub use vermagic::{Difference, Vermagic};
pub use vmlinux::Vmlinux;
pub use vmlinuz::{Method, Payload, VmlinuzError, kernel, locate};
