//! Plans the load order: the payload's modules, each preceded by the in-tree modules that it depends on.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use driver_entrypoint::work::Step;
use farrier_payload::DecompressionBudget;
use kmod::{CachedFile, Module, module_name};

use super::{
    BootRequest, Result,
    in_tree::{InTreeModules, dependencies, open},
};

/// A module to load.
#[derive(Debug)]
pub(super) struct PlannedStep {
    /// Index in the request's modules; `None` for an in-tree module.
    pub(super) payload_index: Option<usize>,
    /// Name as `lsmod` shows it.
    pub(super) name: String,
    /// Path in the virtual machine.
    pub(super) path: String,
    /// Path on the host.
    pub(super) source: PathBuf,
    /// Names of the modules that the module depends on, except those built into the kernel image.
    pub(super) dependencies: Vec<String>,
    /// Parameters as for `insmod`.
    parameters: String,
}

impl PlannedStep {
    /// Returns the step for the virtual machine's work list.
    pub(super) fn work_step(&self) -> Step {
        Step {
            payload: self.payload_index.is_some(),
            name: self.name.clone(),
            path: self.path.clone(),
            parameters: self.parameters.clone(),
        }
    }
}

/// Plans the steps of the work list, in load order.
pub(super) fn plan(request: &BootRequest) -> Result<Vec<PlannedStep>> {
    let mut in_tree = match &request.kernel.modules {
        Some(directory) => InTreeModules::find(directory)?,
        None => InTreeModules::default(),
    };
    for directory in &request.needed {
        in_tree.override_with(InTreeModules::find(directory)?);
    }
    let mut planner = StepPlanner {
        request,
        in_tree,
        payload: BTreeMap::new(),
        visited: BTreeSet::new(),
        steps: Vec::new(),
    };
    let mut modules = Vec::new();
    for (index, path) in request.modules.iter().enumerate() {
        let source = request.payload.join(path);
        let (name, dependencies) = read_name_and_dependencies(&source, &request.decompression)?;
        if !request.unload_each {
            planner.payload.insert(name.clone(), index);
        }
        modules.push((name, dependencies, source));
    }
    for (index, (name, dependencies, source)) in modules.iter().enumerate() {
        planner.add_payload_module(index, name, dependencies, source, &modules)?;
    }
    Ok(planner.steps)
}

/// Name, dependencies and file of a payload module.
type PayloadFile = (String, Vec<String>, PathBuf);

/// Depth-first search through the dependencies of the payload's modules.
struct StepPlanner<'a> {
    request: &'a BootRequest,
    in_tree: InTreeModules,
    /// Indexes of the payload's modules by name; empty if each module is unloaded before the next is loaded.
    payload: BTreeMap<String, usize>,
    /// Names of the dependencies that have been visited.
    visited: BTreeSet<String>,
    steps: Vec<PlannedStep>,
}

impl StepPlanner<'_> {
    fn add_payload_module(
        &mut self,
        index: usize,
        name: &str,
        dependencies: &[String],
        source: &Path,
        modules: &[PayloadFile],
    ) -> Result<()> {
        if self.steps.iter().any(|step| step.payload_index == Some(index)) {
            return Ok(());
        }
        for dependency in dependencies {
            self.add_dependency(dependency, modules)?;
        }
        let parameters = self.request.parameters.get(name).cloned().unwrap_or_default();
        self.push(Some(index), name.to_owned(), source.to_owned(), dependencies.to_vec(), parameters);
        Ok(())
    }

    /// Adds a dependency. An in-tree module comes before the first module that depends on it. The payload's modules keep the
    /// caller's order, unless an in-tree module depends on a payload module, which then comes first.
    fn add_dependency(&mut self, name: &str, modules: &[PayloadFile]) -> Result<()> {
        if !self.visited.insert(name.to_owned()) {
            return Ok(());
        }
        if let Some(&index) = self.payload.get(name) {
            return match modules.get(index) {
                Some((name, dependencies, source)) => {
                    self.add_payload_module(index, name, dependencies, source, modules)
                }
                None => Ok(()),
            };
        }
        // A missing module is not an error here: its dependents get the outcome `NotReached`.
        let Some(source) = self.in_tree.file(name) else { return Ok(()) };
        let dependencies = self.in_tree.prerequisites(&source, &self.request.decompression)?;
        for dependency in &dependencies {
            self.add_dependency(dependency, modules)?;
        }
        self.push(None, name.to_owned(), source, dependencies, String::new());
        Ok(())
    }

    fn push(
        &mut self,
        payload_index: Option<usize>,
        name: String,
        source: PathBuf,
        dependencies: Vec<String>,
        parameters: String,
    ) {
        let path = format!("/modules/{}.ko", self.steps.len());
        let dependencies = dependencies.into_iter().filter(|name| !self.in_tree.is_built_in(name)).collect();
        self.steps.push(PlannedStep { payload_index, name, path, source, dependencies, parameters });
    }
}

/// Reads a payload module's name and dependencies.
fn read_name_and_dependencies(path: &Path, budget: &DecompressionBudget) -> Result<(String, Vec<String>)> {
    let file = open(path, budget)?;
    // If farrier cannot parse the module, the kernel refuses it, and the check reports that.
    Ok(match Module::parse(&CachedFile::new(file)) {
        Ok(module) => (module.name.clone(), dependencies(&module)),
        Err(_) => (module_name(&path.to_string_lossy()), Vec::new()),
    })
}
