//! Blacklist that keeps the host from loading its own modules while the container replaces them. The blacklist never
//! outlives the node's boot: if a killed container left it behind for the next boot, the node would come up without
//! network.

use crate::{error::Error, files, node::Node};

/// The host's `/run/modprobe.d`, where the manifest mounts it.
const VOLATILE: &str = "/host/run/modprobe.d";

pub(crate) struct Blacklist<'a> {
    pub(crate) node: &'a Node<'a>,
    /// File name in the host's `/run/modprobe.d`; ends in `.conf`.
    pub(crate) name: String,
    /// Fallback where the host's `/run/modprobe.d` is not mounted: path of a symlink and its target. The target does
    /// not survive a reboot.
    pub(crate) link: Option<(&'a str, String)>,
    /// The modules that the host must not load.
    pub(crate) modules: Vec<String>,
}

impl Blacklist<'_> {
    /// Writes the blacklist to the host's `/run/modprobe.d`. The operators' manifests mount the host's `/etc` but not
    /// that directory. With those manifests the blacklist is a symlink whose target is on the node's volume, so that a
    /// leftover symlink dangles after a reboot.
    pub(crate) fn write(&self) -> Result<(), Error> {
        let Self { node, link, .. } = self;
        self.remove()?;
        if node.paths.at(VOLATILE).is_dir() {
            let file = self.volatile_file();
            files::write(node, &file, &self.text())?;
            node.log.step(format!("wrote {file}"));
        } else if let Some((link, contents)) = link {
            files::write(node, contents, &self.text())?;
            files::link(node, link, contents)?;
            node.log.step(format!("linked {link} to {contents}"));
        } else {
            node.log.step(format!(
                "{VOLATILE} is not mounted: udev may load the host's modules during the replacement"
            ));
        }
        Ok(())
    }

    /// Removes the file and the symlink of [`write`](Self::write), including leftovers of a killed container of this or
    /// an earlier version.
    pub(crate) fn remove(&self) -> Result<(), Error> {
        let volatile = self.volatile_file();
        let (link, contents) = self.link.as_ref().map(|(link, contents)| (*link, contents.as_str())).unzip();
        for path in [link, Some(volatile.as_str()), contents].into_iter().flatten() {
            if files::remove(self.node, path)? {
                self.node.log.step(format!("removed {path}"));
            }
        }
        Ok(())
    }

    pub(crate) fn text(&self) -> String {
        let lines: Vec<String> = self.modules.iter().map(|name| format!("blacklist {name}")).collect();
        let why = "# Written by driver-entrypoint while it replaces these modules; removed afterwards.";
        format!("{why}\n{}\n", lines.join("\n"))
    }

    fn volatile_file(&self) -> String {
        format!("{VOLATILE}/{}", self.name)
    }
}
