//! What is loaded: `/proc/modules` and `/sys/module`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use super::{error::ModuleError, kernel_name};
use crate::paths::Paths;

/// A loaded module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Module {
    /// All references, those of modules among them.
    pub(crate) references: usize,
    /// The modules that use it.
    pub(crate) holders: BTreeSet<String>,
    /// Hash over its sources; empty where it has none.
    pub(crate) source_version: String,
}

/// The loaded modules, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Loaded(BTreeMap<String, Module>);

impl Loaded {
    /// At this moment.
    pub(crate) fn read(paths: &Paths) -> Result<Self, ModuleError> {
        let path = paths.at("/proc/modules");
        let text = fs::read_to_string(&path)
            .map_err(|source| ModuleError::Unreadable { path: paths.name(&path), source })?;
        let modules = text.lines().filter_map(|line| {
            // name size references users, state address; users is "-" or a list with a comma after each.
            let mut fields = line.split_whitespace();
            let (name, _, references) = (fields.next()?, fields.next()?, fields.next()?);
            let users = fields.next().unwrap_or("-").split(',');
            let holders = users.filter(|user| !matches!(*user, "" | "-" | "[permanent]"));
            let version = fs::read_to_string(paths.at(&format!("/sys/module/{name}/srcversion")));
            let module = Module {
                // "-" where the kernel cannot unload modules.
                references: references.parse().unwrap_or_default(),
                holders: holders.map(kernel_name).collect(),
                source_version: version.unwrap_or_default().trim().to_owned(),
            };
            Some((name.to_owned(), module))
        });
        Ok(Self(modules.collect()))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Module> {
        self.0.get(&kernel_name(name))
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// What stays when these are unloaded.
    pub(crate) fn without(&self, names: &[String]) -> Self {
        let staying = self.0.iter().filter(|(name, _)| !names.contains(name));
        Self(staying.map(|(name, module)| (name.clone(), module.clone())).collect())
    }

    /// Modules, with all that use them directly or not, those that nothing uses first. Names that are not loaded
    /// are left out.
    pub(crate) fn with_holders(&self, names: &[&str]) -> Vec<String> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.visit(&kernel_name(name), &mut seen, &mut order);
        }
        order
    }

    fn visit(&self, name: &str, seen: &mut BTreeSet<String>, order: &mut Vec<String>) {
        let Some(module) = self.0.get(name) else { return };
        if !seen.insert(name.to_owned()) {
            return;
        }
        for holder in &module.holders {
            self.visit(holder, seen, order);
        }
        order.push(name.to_owned());
    }
}
