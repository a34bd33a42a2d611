//! The blacklist, which keeps the host from loading its own modules while they are replaced. It never outlives the
//! node's boot: left by a container that was killed, it would leave the next boot without network.

use super::Settings;
use crate::{error::Error, files, node::Node};

/// The host's `/run/modprobe.d`, where the manifest mounts it.
const VOLATILE: &str = "/host/run/modprobe.d";

pub(super) struct Blacklist<'a> {
    pub(super) node: &'a Node<'a>,
    pub(super) settings: &'a Settings,
}

impl Blacklist<'_> {
    /// A file in the host's `/run/modprobe.d`. The operators' manifests mount the host's `/etc` and not that: there it is
    /// a link, and what it leads to is on the node's volume, so that a link that is left leads nowhere after a boot.
    pub(super) fn write(&self) -> Result<(), Error> {
        let Self { node, settings } = self;
        self.remove()?;
        if node.paths.at(VOLATILE).is_dir() {
            let file = self.volatile_file();
            files::write(node, &file, &self.text())?;
            node.log.step(format!("wrote {file}"));
        } else {
            let contents = settings.blacklist_contents();
            files::write(node, &contents, &self.text())?;
            files::link(node, &settings.blacklist_file, &contents)?;
            node.log.step(format!("linked {} to {contents}", settings.blacklist_file));
        }
        Ok(())
    }

    /// Removes what [`write`](Self::write) made, or a container that was killed, of this version or one before.
    pub(super) fn remove(&self) -> Result<(), Error> {
        let Self { node, settings } = self;
        for path in [&settings.blacklist_file, &self.volatile_file(), &settings.blacklist_contents()] {
            if files::remove(node, path)? {
                node.log.step(format!("removed {path}"));
            }
        }
        Ok(())
    }

    pub(super) fn text(&self) -> String {
        let Settings { blacklist, third_party, unload_third_party, auxiliary, .. } = self.settings;
        let third_party = third_party.iter().filter(|_| *unload_third_party);
        let names = blacklist.iter().chain(third_party).chain(auxiliary);
        let lines: Vec<String> = names.map(|name| format!("blacklist {name}")).collect();
        let why = "# Written by driver-entrypoint while it replaces these modules; removed afterwards.";
        format!("{why}\n{}\n", lines.join("\n"))
    }

    fn volatile_file(&self) -> String {
        let name = self.settings.blacklist_file.rsplit('/').next().unwrap_or_default();
        format!("{VOLATILE}/{name}")
    }
}
