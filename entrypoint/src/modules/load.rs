//! Loads modules with what they need, in order.

use std::collections::BTreeSet;

use rustix::io::Errno;

use super::{
    error::ModuleError,
    file::ModuleFile,
    index::{Found, Index, Origin},
    kernel_name,
    loaded::Loaded,
    parameters::Parameters,
};
use crate::node::Node;

/// What there is to load from, and with.
pub(crate) struct Loader<'a> {
    pub(crate) node: &'a Node<'a>,
    pub(crate) index: &'a Index,
    pub(crate) parameters: &'a Parameters,
}

/// A module that is to be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) file: ModuleFile,
    pub(crate) origin: Origin,
    /// A soft dependency: what does not come in is only said.
    pub(crate) optional: bool,
}

impl Loader<'_> {
    /// Loads a module with what it needs. Returns the names of those that were not loaded before, in order.
    pub(crate) fn load(&self, name: &str) -> Result<Vec<String>, ModuleError> {
        let loaded = Loaded::read(&self.node.paths)?;
        let mut done = Vec::new();
        for step in self.plan(name, &loaded)? {
            match self.insert(&step) {
                Ok(true) => done.push(step.name),
                Ok(false) => {}
                Err(error) if step.optional => {
                    self.node.log.warn(format!("go on without {}: {error}", step.name));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Loads what a module needs of a tree, and not the module itself, as if only `loaded` were loaded.
    pub(crate) fn load_needs(
        &self,
        name: &str,
        from: Origin,
        loaded: &Loaded,
    ) -> Result<Vec<String>, ModuleError> {
        let mut done = Vec::new();
        let name = kernel_name(name);
        for step in self.plan(&name, loaded)? {
            // What stands upon a module of another tree waits for its turn.
            let needs = step.file.info()?.depends;
            let ready = needs.iter().all(|need| self.index.origin(need).is_none_or(|origin| origin == from));
            if step.origin == from && step.name != name && ready && self.insert(&step)? {
                done.push(step.name);
            }
        }
        Ok(done)
    }

    /// What has to be loaded for a module, in order: nothing when it is loaded or built in.
    pub(crate) fn plan(&self, name: &str, loaded: &Loaded) -> Result<Vec<Step>, ModuleError> {
        let mut walk =
            Walk { loader: self, loaded, path: Vec::new(), done: BTreeSet::new(), steps: Vec::new() };
        walk.visit(&kernel_name(name), None, false)?;
        Ok(walk.steps)
    }

    /// Was it loaded by this? `EEXIST`: somebody was faster, which is as good.
    fn insert(&self, step: &Step) -> Result<bool, ModuleError> {
        let Step { name, file, origin, optional: _ } = step;
        let parameters = self.parameters.of(name);
        let (path, from) =
            (self.node.paths.name(&file.path), if *origin == Origin::Host { " of the host" } else { "" });
        match self.node.kernel.load(file, &parameters) {
            Ok(()) => {
                let with =
                    if parameters.is_empty() { String::new() } else { format!(" with \"{parameters}\"") };
                self.node.log.step(format!("loaded module {name}{from} ({path}){with}"));
                Ok(true)
            }
            Err(refusal) if refusal.errno == Errno::EXIST => Ok(false),
            Err(refusal) => Err(ModuleError::Refused { name: name.clone(), path, parameters, refusal }),
        }
    }
}

struct Walk<'a> {
    loader: &'a Loader<'a>,
    loaded: &'a Loaded,
    path: Vec<String>,
    done: BTreeSet<String>,
    steps: Vec<Step>,
}

impl Walk<'_> {
    fn visit(&mut self, name: &str, needed_by: Option<&str>, optional: bool) -> Result<(), ModuleError> {
        if self.loaded.contains(name) || self.done.contains(name) {
            return Ok(());
        }
        if self.path.iter().any(|other| other == name) {
            // Soft dependencies may run in circles; modprobe takes them as they come.
            if optional {
                return Ok(());
            }
            let names = self.path.iter().cloned().chain([name.to_owned()]).collect();
            return Err(ModuleError::Cycle { names });
        }
        let (file, origin) = match self.loader.index.find(name) {
            Some(Found::File { file, origin }) => (file, origin),
            Some(Found::BuiltIn) => return Ok(()),
            // Soft dependencies are often aliases, or parts of the kernel.
            None if optional => return Ok(()),
            None => return self.loader.index.require(name, needed_by).map(|_| ()),
        };
        let info = file.info()?;
        let more = self.loader.parameters.soft_dependencies(name);
        self.path.push(name.to_owned());
        for need in info.soft.before.iter().chain(&more.before) {
            self.visit(need, Some(name), true)?;
        }
        for need in &info.depends {
            self.visit(need, Some(name), optional)?;
        }
        self.path.pop();
        self.done.insert(name.to_owned());
        self.steps.push(Step { name: name.to_owned(), file, origin, optional });
        for after in info.soft.after.iter().chain(&more.after) {
            self.visit(after, Some(name), true)?;
        }
        Ok(())
    }
}
