//! The blacklist, which keeps the host from loading its own modules while they are replaced. It never outlives the
//! node's boot: left by a container that was killed, it would leave the next boot without network.

use crate::{error::Error, files, node::Node};

/// The host's `/run/modprobe.d`, where the manifest mounts it.
const VOLATILE: &str = "/host/run/modprobe.d";

pub(crate) struct Blacklist<'a> {
    pub(crate) node: &'a Node<'a>,
    /// Its name in the host's `/run/modprobe.d`, which ends in `.conf`.
    pub(crate) name: String,
    /// Where the host's `/run/modprobe.d` is not mounted: a link, and what it leads to, which is gone after a boot.
    pub(crate) link: Option<(&'a str, String)>,
    /// The modules that the host must not load.
    pub(crate) modules: Vec<String>,
}

impl Blacklist<'_> {
    /// A file in the host's `/run/modprobe.d`. The operators' manifests mount the host's `/etc` and not that: there it is
    /// a link, and what it leads to is on the node's volume, so that a link that is left leads nowhere after a boot.
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
            node.log
                .step(format!("{VOLATILE} is not mounted: udev may load the host's modules again meanwhile"));
        }
        Ok(())
    }

    /// Removes what [`write`](Self::write) made, or a container that was killed, of this version or one before.
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
