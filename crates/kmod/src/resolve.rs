//! Finds the provider of each symbol that a module needs, as on the node.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{CheckRequest, ExportedSymbol, Module, ModuleExport, NeededTable, SymbolTable, UndefinedSymbol};

/// Exports of a payload, its needed images and the kernel, for resolving the symbols of the payload's modules.
pub(super) struct Resolver<'a> {
    kernel: Option<&'a SymbolTable>,
    /// Names of the kernel image's exports, from a source other than `Module.symvers`.
    image_exports: Option<&'a BTreeSet<String>>,
    /// Needed images; the flag says whether the image replaces in-tree modules.
    needs: Vec<(&'a NeededTable, bool)>,
    /// Exports of the payload by symbol, each with the index of its module, the module and the export.
    exports: HashMap<&'a str, (usize, &'a Module, &'a ModuleExport)>,
    /// Modules that replace an in-tree module of the same name, with the replacing image; `None` stands for the payload.
    replaced: BTreeMap<String, Option<&'a str>>,
    /// Modules of the payload with exports whose names were stripped.
    stripped: Vec<&'a Module>,
}

/// A needed symbol and its provider.
pub(super) struct Import<'a> {
    pub symbol: &'a UndefinedSymbol,
    pub provider: Provider<'a>,
}

/// Provider of a symbol.
pub(super) enum Provider<'a> {
    /// Another module of the payload, with its index in the request.
    Payload { index: usize, module: &'a Module, export: &'a ModuleExport },
    /// A module of a needed image. `proprietary` says whether that module passes on the taint of a proprietary license;
    /// `None` if unknown.
    Needed { image: &'a str, symbol: ExportedSymbol<'a>, proprietary: Option<bool> },
    /// The kernel image or one of the kernel's own modules.
    Kernel(ExportedSymbol<'a>),
    /// An in-tree module exports the symbol, but the payload or a needed image replaces that module with one of the same name
    /// that does not export the symbol.
    Replaced { module: String, image: Option<&'a str> },
    /// The kernel image, according to a source such as `System.map`, which reveals neither the symbol's version nor whether the
    /// symbol is GPL only.
    NameOnly,
    /// Neither the payload, a needed image nor the kernel exports the symbol.
    Missing,
    /// Nothing exports the symbol, unless this module of the payload does, whose exports have no names.
    Stripped(&'a Module),
    /// The header set has no symbol table, so an in-tree module may export the symbol.
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
        let (mut replaced, mut stripped) = (BTreeMap::new(), Vec::new());
        for need in request.needs {
            let modules = need.symbols.exporters().map(super::module_name);
            replaced.extend(modules.map(|module| (module, Some(need.image.as_str()))));
        }
        for (index, payload) in request.modules.iter().enumerate() {
            let Ok(module) = &payload.module else { continue };
            replaced.insert(module.name.clone(), None);
            if module.has_stripped_exports() {
                stripped.push(module);
            }
            for export in &module.exports {
                exports.entry(export.name.as_str()).or_insert((index, module, export));
            }
        }
        let kernel = request.kernel.symbols.as_ref();
        // Needed only for images whose licenses are unknown.
        let table = kernel.filter(|_| request.needs.iter().any(|need| need.proprietary.is_none()));
        let in_tree: BTreeSet<String> =
            table.into_iter().flat_map(|table| table.exporters().map(super::module_name)).collect();
        let is_replacement = |need: &NeededTable| {
            need.symbols.exporters().any(|exporter| in_tree.contains(&super::module_name(exporter)))
        };
        let needs = request.needs.iter().map(|need| (need, is_replacement(need))).collect();
        let image_exports = request.kernel.beyond_headers.exports.as_ref().map(|known| &known.value);
        Self { kernel, image_exports, needs, exports, replaced, stripped }
    }

    pub fn imports(&self, module: &'a Module) -> Vec<Import<'a>> {
        let import =
            |symbol: &'a UndefinedSymbol| Import { symbol, provider: self.provider(&symbol.name, module) };
        module.undefined.iter().map(import).collect()
    }

    /// Finds the provider of a symbol that a module needs, in this order:
    ///
    /// 1. the other modules of the payload, because they are the ones to be loaded,
    /// 2. the images that the payload was compiled against,
    /// 3. the kernel, without its modules that are replaced.
    fn provider(&self, symbol: &str, user: &Module) -> Provider<'a> {
        // The kernel does not resolve symbols from the exports of the module that it is loading.
        let in_payload = self.exports.get(symbol).filter(|(_, module, _)| !std::ptr::eq(*module, user));
        if let Some(&(index, module, export)) = in_payload {
            return Provider::Payload { index, module, export };
        }
        for &(need, is_replacement) in &self.needs {
            if let Some(symbol) = need.symbols.get(symbol) {
                let known = need.proprietary.as_ref().map(|names| names.contains(&symbol.module_name()));
                // An image that replaces in-tree modules, such as OFED, is derived from them and has their license.
                let proprietary = known.or(is_replacement.then_some(false));
                return Provider::Needed { image: &need.image, symbol, proprietary };
            }
        }
        let Some(kernel) = self.kernel else {
            let is_exported = self.image_exports.is_some_and(|names| names.contains(symbol));
            return if is_exported { Provider::NameOnly } else { Provider::Unknown };
        };
        let exported = kernel.get(symbol);
        let replaced = exported.and_then(|exported| {
            let module = exported.module_name();
            self.replaced.get(&module).map(|&image| Provider::Replaced { module, image })
        });
        let stripped = self.stripped.iter().find(|module| !std::ptr::eq(**module, user));
        match (exported, replaced) {
            (Some(exported), None) => Provider::Kernel(exported),
            (_, replaced) => match stripped {
                Some(&module) => Provider::Stripped(module),
                None => replaced.unwrap_or(Provider::Missing),
            },
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
            Self::NameOnly | Self::Replaced { .. } | Self::Missing | Self::Stripped(_) | Self::Unknown => {
                None
            }
        }
    }

    /// Describes the exporter for people: `the kernel`, `ib_core of mofed`, `nvidia of this payload`.
    pub fn describe(&self) -> String {
        match self {
            Self::Payload { module, .. } => format!("{} of this payload", module.name),
            Self::Needed { image, symbol, .. } => format!("{} of {image}", symbol.module_name()),
            Self::NameOnly => "the kernel".to_owned(),
            Self::Kernel(symbol) if symbol.module == "vmlinux" => "the kernel".to_owned(),
            Self::Kernel(symbol) => format!("the kernel's {}", symbol.module_name()),
            Self::Replaced { module, .. } => format!("the kernel's {module}"),
            Self::Missing | Self::Stripped(_) | Self::Unknown => "nothing".to_owned(),
        }
    }
}
