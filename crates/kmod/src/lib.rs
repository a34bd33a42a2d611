#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod about;
mod architecture;
mod boot;
mod btf;
mod certificate;
mod check;
mod compression;
mod config;
mod der;
mod elf;
mod error;
mod facts;
mod file;
mod headers;
mod in_tree;
mod load_order;
mod lz4;
mod module;
mod release;
mod relocation;
mod report;
mod resolve;
mod rules;
mod sign;
mod signature;
mod symvers;
mod system_map;
mod taint;
mod text;
mod vermagic;
mod vmlinux;
mod vmlinuz;

#[cfg(any(test, feature = "testing"))]
#[allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::return_self_not_must_use
)]
pub mod testing;

pub use about::{ModuleAbout, SignedBy, Taint};
pub use architecture::{Architecture, ArchitectureError};
pub use boot::{BootOutcome, BootReport, ModuleBoot};
pub use btf::{Btf, BtfBase, BtfError, SplitBtf};
pub use certificate::{Certificate, CertificateError};
pub use check::{CheckRequest, NeededTable, PayloadModule, check};
pub use compression::Compression;
pub use config::{ConfigError, KernelConfig};
pub use elf::StringTableError;
pub use error::ModuleError;
pub use facts::{ExtraKernelFacts, FactSource, KernelFacts, Known};
pub use file::{CachedFile, ModuleBytes};
pub use headers::HeaderError;
pub use in_tree::InTree;
pub use module::{
    ExportTable, ExportTables, ExtendedVersions, Layout, Module, ModuleExport, NameTables, ThisModule,
    UndefinedSymbol, module_name,
};
pub use release::{KernelRelease, ReleaseError};
pub use relocation::{BadRelocation, RelocationProblem};
pub use report::{CheckReport, Finding, ModuleReport, Rule, RuleError, Verdict, VerdictError};
pub use sign::{
    CannotVerify, ModuleKey, SignatureHash, SigningRule, signature_message, signer, trailer,
    without_signature,
};
pub use signature::{Signature, Signer};
pub use symvers::{ExportedSymbol, SymbolTable, SymbolTableError};
pub use system_map::exported_names;
pub use taint::proprietary_modules;
pub use vermagic::{Difference, Vermagic, VermagicHeaders};
pub use vmlinux::{Banner, Vmlinux};
pub use vmlinuz::{Method, Payload, VmlinuzError, kernel, locate, unpack};
