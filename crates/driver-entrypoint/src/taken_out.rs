//! The host's own modules that make way for those of an image, and come back. Which they were is kept below `/run`: until the
//! node's next boot, which loads them by itself, a container that was killed leaves it to the next one.

use crate::{
    error::Error,
    files,
    modules::{load::Loader, loaded::Loaded},
};

pub(crate) struct TakenOut<'a> {
    /// Loads from the host's tree alone.
    pub(crate) host: Loader<'a>,
    /// Where their names are kept.
    pub(crate) file: String,
}

impl TakenOut<'_> {
    /// Those of this container and of the ones before it, in the order in which they were unloaded.
    pub(crate) fn names(&self) -> Vec<String> {
        let names = files::text(self.host.node.paths.at(&self.file)).unwrap_or_default();
        names.lines().map(str::to_owned).collect()
    }

    /// Notes that these make way, too, before they do. Gives all.
    pub(crate) fn add(&self, names: &[String]) -> Result<Vec<String>, Error> {
        let mut all = self.names();
        for name in names {
            if !all.contains(name) {
                all.push(name.clone());
            }
        }
        files::write(self.host.node, &self.file, &all.join("\n"))?;
        Ok(all)
    }

    /// Refuses where one of these could not come back. A module that has no file there, and was not built with the kernel, is of an
    /// image before this one.
    pub(crate) fn check(&self, names: &[String]) -> Result<(), Error> {
        let Loader { node, index, .. } = self.host;
        let is_lost = |name: &&String| {
            !index.has(name) && (index.is_empty() || Loaded::is_of_kernel(&node.paths, name))
        };
        let Some(name) = names.iter().find(is_lost) else { return Ok(()) };
        let tree = node.paths.name(&node.paths.host_modules(&node.kernel.release()));
        Err(Error::new(
            format!("module {name} is the host's, and cannot come back: it is not below {tree}"),
            "mount the host's /lib/modules at /host/lib/modules, and see that the node has its running kernel's modules",
        ))
    }

    /// Loads those that the host has, the last that went first. One that does not come keeps no other away; the first such is the error.
    pub(crate) fn load(&self, names: &[String]) -> Result<(), Error> {
        let mut result = self.check(names);
        for name in names.iter().rev().filter(|name| self.host.index.has(name)) {
            if let Err(error) = self.host.load(name) {
                self.host.node.log.warn(format!("module {name} of the host does not come back: {error}"));
                result = result.and(Err(error));
            }
        }
        result
    }

    /// All are back.
    pub(crate) fn forget(&self) -> Result<(), Error> {
        files::remove(self.host.node, &self.file)?;
        Ok(())
    }
}
