//! Pure: kernel modules: ELF, modinfo, vermagic, symbol versions, and what the loader would say.

#![forbid(unsafe_code)]

mod about;
mod architecture;
mod boot;
mod btf;
mod btf_split;
mod certificate;
mod check;
mod config;
#[doc(hidden)]
pub mod der;
mod elf;
mod facts;
mod in_tree;
mod load_order;
mod module;
mod release;
mod report;
mod resolve;
mod rules;
mod sign;
mod signature;
mod symvers;
mod system_map;
mod table;
mod vermagic;
mod vmlinux;
mod vmlinuz;

#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]
pub mod testing;

pub use about::{ModuleAbout, SignedBy, Taint};
pub use architecture::{Architecture, ArchitectureError};
pub use boot::{BootOutcome, BootReport, ModuleBoot};
pub use btf::{Btf, BtfError};
pub use btf_split::{BtfFault, SplitBtf};
pub use certificate::{Certificate, CertificateError};
pub use check::{CheckRequest, NeededTable, PayloadModule, check};
pub use config::{ConfigError, KernelConfig};
pub use facts::{BeyondHeaders, BtfBase, FactSource, InTree, KernelFacts, Known};
pub use module::{Module, ModuleError, ModuleExport, UndefinedSymbol, module_name};
pub use release::{KernelRelease, ReleaseError};
pub use report::{CheckReport, Finding, ModuleReport, Rule, Verdict, VerdictError};
pub use sign::{CannotVerify, ModuleKey, SignatureHash, SigningRule, signer, trailer, without_signature};
pub use signature::{Signature, Signer};
pub use symvers::{ExportedSymbol, SymbolTable, SymbolTableError};
pub use system_map::exported_names;
pub use table::{Style, table, table_with};
pub use vermagic::{Difference, Vermagic};
pub use vmlinux::Vmlinux;
pub use vmlinuz::{Method, Payload, VmlinuzError, kernel, locate};
