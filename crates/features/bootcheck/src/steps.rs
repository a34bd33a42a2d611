//! Plans what is loaded in which order: the payload's modules, each preceded by the in-tree modules that it needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use driver_entrypoint::work::Step;
use farrier_payload::DecompressionBudget;
use kmod::{CachedFile, Module, module_name};

use super::{
    BootRequest, Result,
    in_tree::{InTreeModules, needs, open},
};

/// A module to load.
#[derive(Debug)]
pub(super) struct PlannedStep {
    /// Index in the request's modules; `None` for an in-tree module.
    pub(super) payload: Option<usize>,
    /// Name as `lsmod` shows it.
    pub(super) name: String,
    /// Path in the virtual machine.
    pub(super) path: String,
    /// Path on the host.
    pub(super) source: PathBuf,
    /// Names of the modules that it needs, except those built into the kernel image.
    pub(super) needs: Vec<String>,
    parameters: String,
}

impl PlannedStep {
    /// Returns the entry for the virtual machine's work list.
    pub(super) fn work(&self) -> Step {
        Step {
            payload: self.payload.is_some(),
            name: self.name.clone(),
            path: self.path.clone(),
            parameters: self.parameters.clone(),
        }
    }
}

/// Plans the steps, in order.
pub(super) fn plan(request: &BootRequest) -> Result<Vec<PlannedStep>> {
    let mut in_tree = match &request.kernel.modules {
        Some(directory) => InTreeModules::find(directory)?,
        None => InTreeModules::default(),
    };
    for directory in &request.needed {
        in_tree.replace(InTreeModules::find(directory)?);
    }
    let mut plan =
        Plan { request, in_tree, payload: BTreeMap::new(), seen: BTreeSet::new(), steps: Vec::new() };
    let mut modules = Vec::new();
    for (index, path) in request.modules.iter().enumerate() {
        let source = request.payload.join(path);
        let (name, needs) = read(&source, &request.decompression)?;
        if !request.tried_alone {
            plan.payload.insert(name.clone(), index);
        }
        modules.push((name, needs, source));
    }
    for (index, (name, needs, source)) in modules.iter().enumerate() {
        plan.payload_module(index, name, needs, source, &modules)?;
    }
    Ok(plan.steps)
}

/// Name, needs and file of a payload module.
type PayloadEntry = (String, Vec<String>, PathBuf);

struct Plan<'a> {
    request: &'a BootRequest,
    in_tree: InTreeModules,
    /// Indexes of the payload's modules by name; empty if each module is tried alone.
    payload: BTreeMap<String, usize>,
    /// Modules that have been visited as a dependency.
    seen: BTreeSet<String>,
    steps: Vec<PlannedStep>,
}

impl Plan<'_> {
    fn payload_module(
        &mut self,
        index: usize,
        name: &str,
        needs: &[String],
        source: &Path,
        modules: &[PayloadEntry],
    ) -> Result<()> {
        if self.steps.iter().any(|step| step.payload == Some(index)) {
            return Ok(());
        }
        for needed in needs {
            self.need(needed, modules)?;
        }
        let parameters = self.request.parameters.get(name).cloned().unwrap_or_default();
        self.push(Some(index), name.to_owned(), source.to_owned(), needs.to_vec(), parameters);
        Ok(())
    }

    /// Plans a needed module. The caller determines the order of the payload's modules, and an in-tree module comes
    /// before the first module that needs it. If an in-tree module needs a payload module, that payload module comes
    /// first.
    fn need(&mut self, name: &str, modules: &[PayloadEntry]) -> Result<()> {
        if !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        if let Some(&index) = self.payload.get(name) {
            return match modules.get(index) {
                Some((name, needs, source)) => self.payload_module(index, name, needs, source, modules),
                None => Ok(()),
            };
        }
        // A missing module is not an error here: the outcome shows that its dependents cannot be judged.
        let Some(source) = self.in_tree.file(name) else { return Ok(()) };
        let needs = self.in_tree.needs(&source, &self.request.decompression)?;
        for needed in &needs {
            self.need(needed, modules)?;
        }
        self.push(None, name.to_owned(), source, needs, String::new());
        Ok(())
    }

    fn push(
        &mut self,
        payload: Option<usize>,
        name: String,
        source: PathBuf,
        needs: Vec<String>,
        parameters: String,
    ) {
        let path = format!("/modules/{}.ko", self.steps.len());
        let needs = needs.into_iter().filter(|name| !self.in_tree.is_built_in(name)).collect();
        self.steps.push(PlannedStep { payload, name, path, source, needs, parameters });
    }
}

fn read(path: &Path, budget: &DecompressionBudget) -> Result<(String, Vec<String>)> {
    let file = open(path, budget)?;
    // If farrier cannot parse the module, the kernel refuses it, and the check reports that.
    Ok(match Module::parse(&CachedFile::new(file)) {
        Ok(module) => (module.name.clone(), needs(&module)),
        Err(_) => (module_name(&path.to_string_lossy()), Vec::new()),
    })
}
