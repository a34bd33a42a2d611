//! Finds the provider of each symbol that a module needs, as on the node.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{CheckRequest, ExportedSymbol, Module, ModuleExport, NeededTable, SymbolTable, UndefinedSymbol};

/// The readable modules of a payload, and everything that they can be linked against.
pub(super) struct Resolver<'a> {
    kernel: Option<&'a SymbolTable>,
    /// Exports of the kernel image, from a source other than `Module.symvers`.
    named: Option<&'a BTreeSet<String>>,
    /// Needed images; the flag tells whether the image replaces modules of the kernel's own.
    needs: Vec<(&'a NeededTable, bool)>,
    /// Maps a symbol to the index of the payload's module, the module and its export.
    exports: HashMap<&'a str, (usize, &'a Module, &'a ModuleExport)>,
    /// Modules that replace the kernel's own of the same name, with the replacing image; `None` is the payload.
    replaced: BTreeMap<String, Option<&'a str>>,
}

/// A needed symbol and its provider.
pub(super) struct Import<'a> {
    pub symbol: &'a UndefinedSymbol,
    pub provider: Provider<'a>,
}

impl Import<'_> {
    /// Whether the payload's module of this index exports the symbol.
    pub fn is_provided_by(&self, module: usize) -> bool {
        matches!(self.provider, Provider::Payload { index, .. } if index == module)
    }
}

/// Provider of a symbol.
pub(super) enum Provider<'a> {
    /// Another module of the payload, with its index in the request.
    Payload { index: usize, module: &'a Module, export: &'a ModuleExport },
    /// A module of a needed image. `proprietary` tells whether that module passes on the taint of a proprietary
    /// license, if known.
    Needed { image: &'a str, symbol: ExportedSymbol<'a>, proprietary: Option<bool> },
    /// The kernel image or one of the kernel's own modules.
    Kernel(ExportedSymbol<'a>),
    /// One of the kernel's own modules exports the symbol. The payload or a needed image replaces that module with one
    /// of the same name that does not export it.
    Replaced { module: String, image: Option<&'a str> },
    /// The kernel image, according to a source such as `System.map`, which reveals neither the version nor who may use
    /// the symbol.
    Named,
    /// Neither the payload, a needed image nor the kernel exports the symbol.
    Missing,
    /// The header set has no symbol table, so one of the kernel's own modules may export the symbol.
    Unknown,
}

/// Properties of an export, regardless of its provider.
pub(super) struct Export<'a> {
    /// Symbol version; `None` if a module of the payload does not contain it.
    pub crc: Option<u32>,
    pub gpl_only: bool,
    pub namespace: Option<&'a str>,
}

impl<'a> Resolver<'a> {
    pub fn new(request: &CheckRequest<'a>) -> Self {
        let mut exports = HashMap::new();
        let mut replaced = BTreeMap::new();
        for need in request.needs {
            replaced
                .extend(need.symbols.exporters().map(|e| (super::module_name(e), Some(need.image.as_str()))));
        }
        for (index, payload) in request.modules.iter().enumerate() {
            let Ok(module) = &payload.module else { continue };
            replaced.insert(module.name.clone(), None);
            for export in &module.exports {
                exports.entry(export.name.as_str()).or_insert((index, module, export));
            }
        }
        let kernel = request.kernel.symbols.as_ref();
        let own_table = kernel.filter(|_| request.needs.iter().any(|need| need.proprietary.is_none()));
        let own: BTreeSet<String> =
            own_table.into_iter().flat_map(|table| table.exporters().map(super::module_name)).collect();
        let is_replacement = |need: &NeededTable| {
            need.symbols.exporters().any(|exporter| own.contains(&super::module_name(exporter)))
        };
        let needs = request.needs.iter().map(|need| (need, is_replacement(need))).collect();
        let named = request.kernel.beyond_headers.exports.as_ref().map(|known| &known.value);
        Self { kernel, named, needs, exports, replaced }
    }

    pub fn imports(&self, module: &'a Module) -> Vec<Import<'a>> {
        let import =
            |symbol: &'a UndefinedSymbol| Import { symbol, provider: self.provider(&symbol.name, module) };
        module.undefined.iter().map(import).collect()
    }

    /// Finds the provider of a symbol. The payload comes first, because its modules are the ones to be loaded. The
    /// images that it was compiled against come next. The kernel comes last, without its modules that are
    /// replaced.
    fn provider(&self, symbol: &str, of: &Module) -> Provider<'a> {
        // A module that loads has no exports yet.
        let in_payload = self.exports.get(symbol).filter(|(_, module, _)| !std::ptr::eq(*module, of));
        if let Some(&(index, module, export)) = in_payload {
            return Provider::Payload { index, module, export };
        }
        for &(need, is_replacement) in &self.needs {
            if let Some(symbol) = need.symbols.get(symbol) {
                let known = need.proprietary.as_ref().map(|names| names.contains(&symbol.module_name()));
                // An image that replaces the kernel's own modules, such as OFED, is derived from these and has their
                // license.
                let proprietary = known.or(is_replacement.then_some(false));
                return Provider::Needed { image: &need.image, symbol, proprietary };
            }
        }
        let Some(kernel) = self.kernel else {
            let named = self.named.is_some_and(|names| names.contains(symbol));
            return if named { Provider::Named } else { Provider::Unknown };
        };
        let Some(found) = kernel.get(symbol) else { return Provider::Missing };
        let module = found.module_name();
        match self.replaced.get(&module) {
            Some(&image) => Provider::Replaced { module, image },
            None => Provider::Kernel(found),
        }
    }
}

impl<'a> Provider<'a> {
    /// Returns the export, if there is one.
    pub fn export(&self) -> Option<Export<'a>> {
        match self {
            Self::Payload { export, .. } => Some(Export {
                crc: export.crc,
                gpl_only: export.gpl_only,
                namespace: export.namespace.as_deref(),
            }),
            Self::Needed { symbol, .. } | Self::Kernel(symbol) => {
                Some(Export { crc: Some(symbol.crc), gpl_only: symbol.gpl_only, namespace: symbol.namespace })
            }
            Self::Named | Self::Replaced { .. } | Self::Missing | Self::Unknown => None,
        }
    }

    /// Describes the exporter for people: `the kernel`, `ib_core of mofed`, `nvidia of this payload`.
    pub fn describe(&self) -> String {
        match self {
            Self::Payload { module, .. } => format!("{} of this payload", module.name),
            Self::Needed { image, symbol, .. } => format!("{} of {image}", symbol.module_name()),
            Self::Named => "the kernel".to_owned(),
            Self::Kernel(symbol) if symbol.module == "vmlinux" => "the kernel".to_owned(),
            Self::Kernel(symbol) => format!("the kernel's {}", symbol.module_name()),
            Self::Replaced { module, .. } => format!("the kernel's {module}"),
            Self::Missing | Self::Unknown => "nothing".to_owned(),
        }
    }
}
