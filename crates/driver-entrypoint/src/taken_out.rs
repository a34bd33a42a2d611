//! The host's own modules that make way for those of an image, and come back. Which they were is kept below `/run`: until the
//! node's next boot, which loads them by itself, a container that was killed leaves it to the next one.

use crate::{error::Error, files, modules::load::Loader};

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

    /// Loads those that the host has, the last that went first.
    pub(crate) fn load(&self, names: &[String]) -> Result<(), Error> {
        for name in names.iter().rev() {
            if self.host.index.has(name) {
                self.host.load(name)?;
            }
        }
        Ok(())
    }

    /// All are back.
    pub(crate) fn forget(&self) -> Result<(), Error> {
        files::remove(self.host.node, &self.file)?;
        Ok(())
    }
}
