//! Loaded modules, read from `/proc/modules` and `/sys/module`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use crate::{
    error::Error,
    files,
    module_file::{ModuleInfo, identity, kernel_name},
    node::Paths,
};

/// State of a loaded module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Module {
    /// Reference count, including references of other modules.
    pub(crate) references: usize,
    /// Modules that use this module.
    pub(crate) holders: BTreeSet<String>,
    /// Hash of the module's sources (`srcversion`); empty if it has none.
    pub(crate) source_version: String,
}

/// Loaded modules by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Loaded(BTreeMap<String, Module>);

impl Loaded {
    /// Reads the current state.
    pub(crate) fn read(paths: &Paths) -> Result<Self, Error> {
        let path = "/proc/modules";
        let text = fs::read_to_string(paths.at(path)).map_err(Error::on("read", path))?;
        let modules = text.lines().filter_map(|line| {
            // Fields: name size references users state address. The users are "-" or a list with a comma after each
            // name.
            let mut fields = line.split_whitespace();
            let (name, _, references) = (fields.next()?, fields.next()?, fields.next()?);
            let users = fields.next().unwrap_or("-").split(',');
            let holders = users.filter(|user| !matches!(*user, "" | "-" | "[permanent]"));
            let version = files::text(paths.at(&format!("/sys/module/{name}/srcversion")));
            let module = Module {
                // "-" on kernels that cannot unload modules; it counts as 0.
                references: references.parse().unwrap_or_default(),
                holders: holders.map(kernel_name).collect(),
                source_version: version.unwrap_or_default(),
            };
            Some((name.to_owned(), module))
        });
        Ok(Self(modules.collect()))
    }

    /// Whether the loaded module of this name is the build in the file.
    pub(crate) fn matches_file(&self, paths: &Paths, name: &str, file: &ModuleInfo) -> bool {
        self.identity(paths, name).is_some_and(|loaded| file.identity() == Some(loaded))
    }

    /// Identifies a loaded module among modules of the same name; see [`ModuleInfo::identity`].
    pub(crate) fn identity(&self, paths: &Paths, name: &str) -> Option<String> {
        let name = kernel_name(name);
        let note = fs::read(paths.at(&format!("/sys/module/{name}/notes/.note.gnu.build-id")));
        identity(&self.get(&name)?.source_version, &note.unwrap_or_default())
    }

    /// Whether the loaded module was built in the kernel's tree, unlike the out-of-tree drivers of images.
    pub(crate) fn is_in_tree(paths: &Paths, name: &str) -> bool {
        let taint = files::text(paths.at(&format!("/sys/module/{}/taint", kernel_name(name))));
        taint.is_some_and(|taint| !taint.contains('O'))
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

    /// Returns the state after these modules are unloaded.
    pub(crate) fn without(&self, names: &[String]) -> Self {
        let remaining = self.0.iter().filter(|(name, _)| !names.contains(name));
        Self(remaining.map(|(name, module)| (name.clone(), module.clone())).collect())
    }

    /// Lists modules and all their direct and indirect users in unload order: users first. Names that are not loaded are
    /// skipped.
    pub(crate) fn with_holders(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<String> {
        let mut order = Vec::new();
        let mut seen = BTreeSet::new();
        for name in names {
            self.visit(&kernel_name(name.as_ref()), &mut seen, &mut order);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn a_module_is_identified_by_srcversion_or_else_by_build_id() {
        let bench = Bench::new();
        bench.write("/proc/modules", "a 1 0 - Live 0x0\nb 1 2 c,[permanent], Live 0x0\n");
        bench.write("/sys/module/a/srcversion", "A1\n");
        bench.write("/sys/module/b/notes/.note.gnu.build-id", "note");
        let paths = bench.node().paths;
        let loaded = Loaded::read(&paths).unwrap();
        let is = |name: &str, source_version: &str, build_id: &str| {
            let (source_version, build_id) = (source_version.to_owned(), build_id.as_bytes().to_vec());
            loaded.matches_file(
                &paths,
                name,
                &ModuleInfo { source_version, build_id, ..ModuleInfo::default() },
            )
        };
        assert!(is("a", "A1", "other") && !is("a", "A2", "") && !is("a", "", ""));
        assert!(is("b", "", "note") && !is("b", "", "other") && !is("b", "", "") && !is("b", "A1", "note"));
        assert!(!is("absent", "A1", "note"));
        let module = loaded.get("b").unwrap();
        assert_eq!(
            (module.references, module.holders.iter().map(String::as_str).collect::<Vec<_>>()),
            (2, vec!["c"])
        );
    }
}
