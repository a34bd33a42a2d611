//! Predicts whether the kernel's module loader accepts the modules of a payload.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use super::{
    CheckReport, Finding, KernelFacts, Module, ModuleAbout, ModuleError, ModuleReport, Rule, SymbolTable,
    Verdict,
    about::firmware_names,
    load_order::{LoadOrder, load_order},
    module_name,
    resolve::{Import, Provider, Resolver},
    rules::{self, Subject},
    taint,
    text::names,
};

/// Input of a check.
#[derive(Clone, Copy, Debug)]
pub struct CheckRequest<'a> {
    /// Facts about the kernel, from its header set.
    pub kernel: &'a KernelFacts,
    /// Symbol tables of the images that the payload was compiled against, in the order of `needs`.
    pub needs: &'a [NeededTable],
    /// All modules of the payload.
    pub modules: &'a [PayloadModule],
    /// Names of modules that the payload must contain; `-` and `_` are equivalent.
    pub required: &'a [String],
    /// All files of the image, as paths relative to it, for finding missing firmware. `None` if `modules` is not a
    /// whole payload.
    pub files: Option<&'a [String]>,
}

impl<'a> CheckRequest<'a> {
    /// Request for modules that need only the kernel and each other.
    pub fn new(kernel: &'a KernelFacts, modules: &'a [PayloadModule]) -> Self {
        Self { kernel, needs: &[], modules, required: &[], files: None }
    }
}

/// Symbols that a needed image exports.
#[derive(Clone, Debug)]
pub struct NeededTable {
    /// Name of the image, or another description of the table's source for people.
    pub image: String,
    /// `Module.symvers` of the image's exposed headers.
    pub symbols: SymbolTable,
    /// Names of the image's modules that pass on the taint of a proprietary license ([`crate::proprietary_modules`]).
    /// `None` if the image's modules are not available. Their licenses are then unknown, unless the table replaces the
    /// kernel's own modules.
    pub proprietary: Option<BTreeSet<String>>,
}

/// A module file of a payload.
#[derive(Clone, Debug)]
pub struct PayloadModule {
    /// Path of the file, relative to the payload.
    pub path: String,
    /// Parsed module, or the reason why the file is not a module.
    pub module: Result<Module, ModuleError>,
}

/// Runs the check. The same request gives the same report, byte for byte.
pub fn check(request: &CheckRequest<'_>) -> CheckReport {
    let &CheckRequest { kernel, needs: _, modules, required, files } = request;
    let resolver = Resolver::new(request);
    let imports: Vec<Vec<Import<'_>>> = modules
        .iter()
        .map(|payload| payload.module.as_ref().map_or_else(|_| Vec::new(), |module| resolver.imports(module)))
        .collect();
    let needs: Vec<BTreeSet<usize>> = imports.iter().map(|imports| payload_needs(imports)).collect();
    let order = load_order(&needs);
    let taints = taint::inherited(request, &imports, &order);
    let exported_earlier = exported_earlier(modules, &order);
    let firmware = files.map(|files| firmware_names(files, kernel));

    let mut reports: Vec<ModuleReport> = modules
        .iter()
        .zip(&imports)
        .zip(taints.iter().zip(&exported_earlier))
        .map(|((payload, imports), (taint, exported_earlier))| match &payload.module {
            Ok(module) => {
                let (taint, agreement) = (taint.as_ref(), OnceCell::new());
                let subject = Subject { kernel, module, imports, exported_earlier, taint, agreement };
                let report = module_report(payload, module.name.clone(), rules::apply(&subject));
                ModuleReport { about: ModuleAbout::of(module, kernel, firmware.as_ref()), ..report }
            }
            Err(error) => {
                let unreadable =
                    Finding::new(Rule::Elf, error.verdict(), "file", error.to_string(), error.remedy());
                module_report(payload, module_name(&payload.path), vec![unreadable])
            }
        })
        .collect();
    propagate_verdicts(&mut reports, &order, &needs);

    let findings = [missing_modules(&reports, required), duplicate_modules(&reports)].concat();
    let readable_modules = order.order.iter().filter_map(|&index| modules.get(index)?.module.as_ref().ok());
    CheckReport {
        kernel: kernel.release.to_string(),
        architecture: kernel.arch,
        verdict: worst(&findings).max(reports.iter().map(|report| report.verdict).max().unwrap_or_default()),
        load_order: readable_modules.map(|module| module.name.clone()).collect(),
        findings,
        modules: reports,
        boot: None,
    }
}

/// For each module, its exports that an earlier module in the load order also exports, with the name of the earlier module.
/// Ignores files of the same module, because only one of them is loaded.
fn exported_earlier<'a>(modules: &'a [PayloadModule], order: &LoadOrder) -> Vec<BTreeMap<&'a str, &'a str>> {
    let mut earlier = vec![BTreeMap::new(); modules.len()];
    let mut exporters: HashMap<&str, &str> = HashMap::new();
    for &index in order.order.iter().chain(&order.circular) {
        let Some((Ok(module), exported)) = modules.get(index).map(|m| &m.module).zip(earlier.get_mut(index))
        else {
            continue;
        };
        for export in &module.exports {
            let first: &str = exporters.entry(&export.name).or_insert(&module.name);
            if first != module.name {
                exported.insert(export.name.as_str(), first);
            }
        }
    }
    earlier
}

fn worst(findings: &[Finding]) -> Verdict {
    findings.iter().map(|finding| finding.verdict).max().unwrap_or_default()
}

fn module_report(payload: &PayloadModule, name: String, findings: Vec<Finding>) -> ModuleReport {
    ModuleReport {
        path: payload.path.clone(),
        name,
        verdict: worst(&findings),
        findings,
        about: ModuleAbout::default(),
    }
}

/// Indexes of the payload's modules that provide these imports.
fn payload_needs(imports: &[Import<'_>]) -> BTreeSet<usize> {
    let provider = |import: &Import<'_>| match import.provider {
        Provider::Payload { index, .. } => Some(index),
        _ => None,
    };
    imports.iter().filter_map(provider).collect()
}

/// Passes verdicts on to dependents, because a module loads only if the modules that it needs load. Follows the load order, so
/// that verdicts propagate along chains.
fn propagate_verdicts(reports: &mut [ModuleReport], order: &LoadOrder, needs: &[BTreeSet<usize>]) {
    for index in order.order.iter().copied().chain(order.circular.iter().copied()) {
        let mut findings = Vec::new();
        for needed in needs.get(index).into_iter().flatten().filter_map(|&needed| reports.get(needed)) {
            if needed.verdict > Verdict::Loads {
                let name = &needed.name;
                let message = match needed.verdict {
                    Verdict::Refused => format!("needs {name}, which the kernel refuses"),
                    Verdict::Loads | Verdict::Unknown => {
                        format!("needs {name}, and farrier cannot tell whether {name} loads")
                    }
                };
                let remedy = format!("resolve the findings for {name}");
                findings.push(Finding::new(Rule::Dependency, needed.verdict, name, message, remedy));
            }
        }
        if order.circular.contains(&index) {
            let message = "depends, directly or indirectly, on modules that depend on each other in a cycle";
            let remedy = "build the modules together, as their own makefile does";
            findings.push(Finding::new(Rule::Dependency, Verdict::Refused, "circle", message, remedy));
        }
        if let Some(report) = reports.get_mut(index) {
            report.verdict = report.verdict.max(worst(&findings));
            report.findings.append(&mut findings);
        }
    }
}

fn missing_modules(reports: &[ModuleReport], required: &[String]) -> Vec<Finding> {
    let present: BTreeSet<&str> = reports.iter().map(|report| report.name.as_str()).collect();
    let required: BTreeSet<String> = required.iter().map(|name| module_name(name)).collect();
    let finding = |name: String| {
        let message = format!("module {name} is required, and the payload does not contain it");
        let remedy = "correct the required name, or see the build log for why the module was not compiled or not installed under /out";
        let finding = Finding::new(Rule::RequiredModule, Verdict::Refused, name, message, remedy);
        if present.is_empty() { finding } else { finding.found(names(present.iter().copied())) }
    };
    required.into_iter().filter(|name| !present.contains(name.as_str())).map(finding).collect()
}

fn duplicate_modules(reports: &[ModuleReport]) -> Vec<Finding> {
    let mut paths: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for report in reports {
        paths.entry(&report.name).or_default().push(&report.path);
    }
    let finding = |(name, paths): (&str, Vec<&str>)| {
        let message =
            format!("module {name} is in the payload {} times, but depmod uses only one", paths.len());
        Finding::new(Rule::DuplicateModule, Verdict::Unknown, name, message, "install it once")
            .found(paths.join(", "))
    };
    paths.into_iter().filter(|(_, paths)| paths.len() > 1).map(finding).collect()
}

#[cfg(test)]
mod tests;
