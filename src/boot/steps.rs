//! Decides what is loaded in which order: the payload's modules, and before each those of the kernel's own that
//! it needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use driver_entrypoint::work::Step;
use object::read::ReadCache;

use super::{
    BootRequest, Result,
    in_tree::{InTreeModules, needs, open},
};
use crate::{
    kmod::{Module, module_name},
    payload::DecompressionBudget,
};

/// A module that is going to be loaded.
#[derive(Debug)]
pub(super) struct PlannedStep {
    /// Its place in the request's modules; `None` for one of the kernel's own.
    pub(super) payload: Option<usize>,
    /// Its name as `lsmod` shows it.
    pub(super) name: String,
    /// Where it lies in the virtual machine.
    pub(super) path: String,
    /// Where it lies on this one.
    pub(super) source: PathBuf,
    /// Names of the modules that it needs, but for those that are part of the kernel image.
    pub(super) needs: Vec<String>,
    parameters: String,
}

impl PlannedStep {
    /// What the virtual machine is told about it.
    pub(super) fn work(&self) -> Step {
        Step {
            payload: self.payload.is_some(),
            name: self.name.clone(),
            path: self.path.clone(),
            parameters: self.parameters.clone(),
        }
    }
}

/// The steps, in order.
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

/// Name, what it needs, file.
type PayloadEntry = (String, Vec<String>, PathBuf);

struct Plan<'a> {
    request: &'a BootRequest,
    in_tree: InTreeModules,
    /// Places of the payload's modules by name; empty when each is tried alone.
    payload: BTreeMap<String, usize>,
    /// The kernel's own modules that were looked at.
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

    /// The order of the payload's modules is the caller's; one of the kernel's own comes before the first that
    /// needs it. One that needs a module of the payload comes after that: it was or will be given its turn.
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
        // Of one that is missing the outcome tells: what needs it cannot be judged.
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
    // What farrier cannot read the kernel refuses, and that is what it is asked for.
    Ok(match Module::parse(&ReadCache::new(file)) {
        Ok(module) => (module.name.clone(), needs(&module)),
        Err(_) => (module_name(&path.to_string_lossy()), Vec::new()),
    })
}
