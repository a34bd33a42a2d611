//! Blacklist that keeps the host from loading its own modules while the container replaces them. The blacklist never
//! outlives the node's boot: if a killed container left it behind for the next boot, the node would come up without
//! network.

use crate::{files, node::Node};

/// The host's `/run/modprobe.d`, where the manifest mounts it.
const RUN_DIRECTORY: &str = "/host/run/modprobe.d";

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
    /// that directory. With those manifests, writes a symlink to a file on the node's volume instead: after a reboot, a
    /// leftover symlink dangles and has no effect. Writes nothing if the host's directories are read-only. The check after
    /// the replacement then finds modules that the host has loaded.
    pub(crate) fn write(&self) {
        let Self { node, link, .. } = self;
        self.remove();
        let outcome = if node.paths.at(RUN_DIRECTORY).is_dir() {
            let file = self.run_file();
            files::write(node, &file, &self.text()).map(|()| format!("wrote {file}"))
        } else if let Some((link, target)) = link {
            let written =
                files::write(node, target, &self.text()).and_then(|()| files::link(node, link, target));
            written.map(|()| format!("linked {link} to {target}"))
        } else {
            Ok(format!(
                "{RUN_DIRECTORY} is not mounted: udev may load the host's modules during the replacement"
            ))
        };
        match outcome {
            Ok(message) => node.log.step(message),
            Err(error) => node.log.warn(format!(
                "continuing without a blacklist, udev may load the host's modules during the replacement: {error}"
            )),
        }
    }

    /// Removes the file and the symlink of [`write`](Self::write), including leftovers of a killed container of this or
    /// an earlier version.
    pub(crate) fn remove(&self) {
        let run_file = self.run_file();
        let (link, target) = self.link.as_ref().map(|(link, target)| (*link, target.as_str())).unzip();
        for path in [link, Some(run_file.as_str()), target].into_iter().flatten() {
            self.node.log.warn_of(files::remove_and_log(self.node, path));
        }
    }

    pub(crate) fn text(&self) -> String {
        let lines: Vec<String> = self.modules.iter().map(|name| format!("blacklist {name}")).collect();
        let header = "# Written by driver-entrypoint while it replaces these modules; removed afterwards.";
        format!("{header}\n{}\n", lines.join("\n"))
    }

    fn run_file(&self) -> String {
        format!("{RUN_DIRECTORY}/{}", self.name)
    }
}
