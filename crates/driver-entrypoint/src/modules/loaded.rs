//! What is loaded: `/proc/modules` and `/sys/module`.

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
    pub(crate) fn read(paths: &Paths) -> Result<Self, Error> {
        let path = "/proc/modules";
        let text = fs::read_to_string(paths.at(path)).map_err(Error::on("read", path))?;
        let modules = text.lines().filter_map(|line| {
            // name size references users, state address; users is "-" or a list with a comma after each.
            let mut fields = line.split_whitespace();
            let (name, _, references) = (fields.next()?, fields.next()?, fields.next()?);
            let users = fields.next().unwrap_or("-").split(',');
            let holders = users.filter(|user| !matches!(*user, "" | "-" | "[permanent]"));
            let version = files::text(paths.at(&format!("/sys/module/{name}/srcversion")));
            let module = Module {
                // "-" where the kernel cannot unload modules.
                references: references.parse().unwrap_or_default(),
                holders: holders.map(kernel_name).collect(),
                source_version: version.unwrap_or_default(),
            };
            Some((name.to_owned(), module))
        });
        Ok(Self(modules.collect()))
    }

    /// Is a file's module the one that is loaded under its name?
    pub(crate) fn is(&self, paths: &Paths, name: &str, file: &ModuleInfo) -> bool {
        self.identity(paths, name).is_some_and(|loaded| file.identity() == Some(loaded))
    }

    /// Tells a loaded module from another of its name; see [`ModuleInfo::identity`].
    pub(crate) fn identity(&self, paths: &Paths, name: &str) -> Option<String> {
        let name = kernel_name(name);
        let note = fs::read(paths.at(&format!("/sys/module/{name}/notes/.note.gnu.build-id")));
        identity(&self.get(&name)?.source_version, &note.unwrap_or_default())
    }

    /// Was it built with the kernel, and not outside of its tree, as the drivers of images are?
    pub(crate) fn is_of_kernel(paths: &Paths, name: &str) -> bool {
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

    /// What stays when these are unloaded.
    pub(crate) fn without(&self, names: &[String]) -> Self {
        let staying = self.0.iter().filter(|(name, _)| !names.contains(name));
        Self(staying.map(|(name, module)| (name.clone(), module.clone())).collect())
    }

    /// Modules, with all that use them directly or not, those that nothing uses first. Names that are not loaded
    /// are left out.
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
    fn a_module_is_known_by_its_sources_or_else_by_its_link() {
        let bench = Bench::new();
        bench.file("/proc/modules", "a 1 0 - Live 0x0\nb 1 2 c,[permanent], Live 0x0\n");
        bench.file("/sys/module/a/srcversion", "A1\n");
        bench.file("/sys/module/b/notes/.note.gnu.build-id", "note");
        let paths = bench.node().paths;
        let loaded = Loaded::read(&paths).unwrap();
        let is = |name: &str, source_version: &str, build_id: &str| {
            let (source_version, build_id) = (source_version.to_owned(), build_id.as_bytes().to_vec());
            loaded.is(&paths, name, &ModuleInfo { source_version, build_id, ..ModuleInfo::default() })
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
