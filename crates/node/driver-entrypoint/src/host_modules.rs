//! The host's modules that were unloaded for the image's modules, to be loaded again later. Their names are saved below `/run`,
//! so that the next container knows them if this one is killed. A reboot clears the file, and loads the host's modules
//! anyway.

use crate::{
    error::Error,
    files,
    modules::{index::Index, load::Loader, loaded::Loaded, parameters::Parameters},
    node::Node,
};

pub(crate) struct HostModules<'a> {
    /// Loader with the host's tree only.
    pub(crate) host: Loader<'a>,
    /// File with the saved names.
    file: String,
    /// Whether the loader has the host's options, of its `modprobe.d`.
    has_options: bool,
}

impl<'a> HostModules<'a> {
    /// Reads the host's modules and their options. `file` is the file with the saved names.
    pub(crate) fn read(node: &'a Node<'a>, file: String) -> Result<Self, Error> {
        let (parameters, has_options) = Parameters::of_host(&node.paths);
        Ok(Self { host: Loader { node, index: Index::of_host(node)?, parameters }, file, has_options })
    }

    /// Modules that this and earlier containers unloaded, in unload order.
    pub(crate) fn names(&self) -> Vec<String> {
        files::lines(self.host.node, &self.file)
    }

    /// Takes names in unload order. Returns the names that the host's tree has, in load order.
    pub(crate) fn with_files(&self, names: &[String]) -> Vec<String> {
        names.iter().rev().filter(|name| self.host.index.file(name).is_some()).cloned().collect()
    }

    /// Whether the host's saved modules are loaded again, and not the image's modules of the same names.
    pub(crate) fn are_back(&self, image: &Loader<'_>) -> bool {
        let Ok(loaded) = Loaded::read(&self.host.node.paths) else { return false };
        self.names().iter().all(|name| loaded.contains(name) && !image.is_image_build(&loaded, name))
    }

    /// Saves the names of modules before they are unloaded. Returns all saved names.
    pub(crate) fn save(&self, names: &[String]) -> Result<Vec<String>, Error> {
        files::add_lines(self.host.node, &self.file, names.to_vec())
    }

    /// Fails if a module could not be loaded again. An out-of-tree module without a file in the host's tree comes from an
    /// earlier image, and needs no restoring.
    pub(crate) fn check(&self, names: &[String]) -> Result<(), Error> {
        let Loader { node, index, .. } = &self.host;
        let is_lost =
            |name: &&String| !index.has(name) && (index.is_empty() || Loaded::is_in_tree(&node.paths, name));
        let Some(name) = names.iter().find(is_lost) else { return Ok(()) };
        let tree = node.paths.container_path(&node.paths.host_modules(&node.kernel.release()));
        Err(Error::new(
            format!("module {name} belongs to the host and cannot be restored: it is not below {tree}"),
            "mount the host's /lib/modules at /host/lib/modules, and check that the node has its running kernel's modules",
        ))
    }

    /// Loads the modules that the host has, in reverse unload order. A failure does not stop the others; the first
    /// error is returned.
    pub(crate) fn load(&self, names: &[String]) -> Result<(), Error> {
        if !self.has_options && !names.is_empty() {
            self.host.node.log.warn(
                "the host's /etc is not visible: its modules are loaded without its options. Mount the \
                 host's /etc at /host/etc, or set hostPID: true",
            );
        }
        let mut result = self.check(names);
        for name in names.iter().rev().filter(|name| self.host.index.has(name)) {
            if let Err(error) = self.host.load(name) {
                self.host.node.log.warn(format!("module {name} of the host could not be restored: {error}"));
                result = result.and(Err(error));
            }
        }
        result
    }

    /// Removes the saved names after all modules are loaded again.
    pub(crate) fn clear(&self) -> Result<(), Error> {
        files::remove(self.host.node, &self.file).map(drop)
    }
}
