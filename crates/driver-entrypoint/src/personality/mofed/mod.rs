//! `mofed`: replaces the node's RDMA stack and mlx5 drivers by those of the image, exposes their headers, and puts
//! the host's own back at the end where that is asked for.
//!
//! The steps, files and variables are those of the Network Operator's container (Mellanox/doca-driver-build).

mod devlink;
mod settings;
pub(crate) mod sriov;
mod stack;
#[cfg(test)]
mod tests;
mod udev;

pub(crate) use settings::Settings;
use sriov::State;
use stack::{Comparison, PEER_MEMORY, Stack};

use crate::{
    blacklist::Blacklist,
    error::Error,
    files, forecast,
    lock::Lock,
    modules::{index::Index, load::Loader, loaded::Loaded, parameters::Parameters, unload},
    mounts,
    node::Node,
    signals::Ending,
    taken_out::TakenOut,
};

/// From start to stop.
pub(crate) fn run(node: &Node<'_>, settings: &Settings, ending: &mut dyn Ending) -> Result<(), Error> {
    let _lock = Lock::take(node, &settings.lock)?;
    files::clear_ready(node, &settings.ready)?;
    let (index, host) = (Index::of_node(node)?, Index::of_host(node)?);
    let parameters = Parameters::read(&node.paths);
    let container = Container {
        node,
        settings,
        stack: Stack { node, settings, loader: Loader { node, index: &index, parameters: &parameters } },
        taken_out: TakenOut {
            host: Loader { node, index: &host, parameters: &parameters },
            file: settings.state_file("replaced"),
        },
    };
    if let Err(error) = container.start(ending) {
        // What is exposed would be of drivers that are not there.
        node.log.warn_of(container.conceal());
        return Err(error);
    }
    let signal = ending.wait();
    node.log.step(format!("{signal}: stopping"));
    container.stop()
}

struct Container<'a> {
    node: &'a Node<'a>,
    settings: &'a Settings,
    stack: Stack<'a>,
    taken_out: TakenOut<'a>,
}

impl Container<'_> {
    fn start(&self, ending: &mut dyn Ending) -> Result<(), Error> {
        let Self { node, settings, stack, .. } = self;
        node.log.step(format!("kernel {}: starting", node.kernel.release()));
        stack.check_image()?;
        // A container that was killed may have left it.
        self.blacklist().remove()?;
        let loaded = Loaded::read(&node.paths)?;
        let comparison = stack.compare(&loaded)?;
        let is_replaced = comparison != Comparison::Same;
        match comparison {
            Comparison::Same => {
                node.log.step("the loaded drivers are those of this image: not reloaded");
                // Of an attempt that did not come as far as to unload them.
                if State::kept(node, &self.state_file("sriov")).is_none() {
                    files::remove(node, &self.state_file("sriov"))?;
                }
                // One that was killed half-way through loading left the rest to us.
                let unfinished = node.paths.at(&self.state_file("replacing")).exists();
                stack.load(&if unfinished { self.taken_out.names() } else { Vec::new() })?;
                files::remove(node, &self.state_file("replacing"))?;
            }
            Comparison::Differs { module, loaded: there, image } => {
                let there = match there {
                    None => "not loaded".to_owned(),
                    // Debian's own modules have none.
                    Some(version) if version.is_empty() => "loaded without a srcversion".to_owned(),
                    Some(version) => format!("loaded as {version}"),
                };
                node.log.step(format!(
                    "{module} is {there}, and {image} in this image: the drivers are replaced"
                ));
                ending.go_on()?;
                self.replace(&loaded)?;
            }
        }
        // Before the root is exposed: that is over what was kept.
        self.restore_network(is_replaced)?;
        let (from, to) = settings.exposed();
        if node.paths.at(from).exists() {
            mounts::expose(node, from, &to)?;
        } else {
            // What a container that was killed left there is of another image.
            self.conceal()?;
            node.log
                .warn(format!("this image has no {from}: no peer memory can be built against these drivers"));
        }
        files::set_ready(node, &settings.ready)
    }

    fn stop(&self) -> Result<(), Error> {
        let Self { node, settings, .. } = self;
        files::clear_ready(node, &settings.ready)?;
        if settings.udev_rules {
            files::remove(node, &settings.udev_file)?;
        }
        self.conceal()?;
        if settings.restore {
            self.restore_host()?;
        } else {
            node.log.step("RESTORE_DRIVER_ON_POD_TERMINATION is not set: the drivers stay loaded");
        }
        self.blacklist().remove()
    }

    /// Out with the old, in with the new. What cannot be done is found before, and what goes wrong then is undone.
    fn replace(&self, loaded: &Loaded) -> Result<(), Error> {
        let Self { node, settings, stack, .. } = self;
        check_peer_memory(node)?;
        let leaving = stack.in_the_way(loaded)?;
        // The manifests of the first generation do not mount the host's modules.
        if settings.restore || !settings.expose_root {
            self.taken_out.check(&stack.loader.of_others(loaded, &leaving))?;
        }
        forecast::announce(node, &leaving)?;
        unload::unload_all(node, &PEER_MEMORY)?;
        self.save_network(loaded)?;
        self.write_udev_rules()?;
        let taken_out = self.taken_out.add(&leaving)?;
        files::write(node, &self.state_file("replacing"), "")?;
        self.blacklist().write()?;
        let replaced = self.exchange(loaded, &leaving, &taken_out);
        files::remove(node, &self.state_file("replacing"))?;
        self.blacklist().remove()?;
        replaced
    }

    fn exchange(&self, loaded: &Loaded, leaving: &[String], taken_out: &[String]) -> Result<(), Error> {
        let Self { node, stack, .. } = self;
        stack.load_host_needs(loaded, leaving)?;
        let exchanged = unload::unload_all(node, leaving).and_then(|_| stack.load(taken_out));
        let exchanged = exchanged.and_then(|()| stack.check_loaded());
        if exchanged.is_err() {
            node.log.warn("the drivers could not be replaced: putting back the host's");
            node.log.warn_of(self.put_back(taken_out));
            node.log.warn_of(self.restore_network(false));
        }
        exchanged
    }

    /// The host's drivers instead of ours.
    fn restore_host(&self) -> Result<(), Error> {
        let Self { node, stack, .. } = self;
        let loaded = Loaded::read(&node.paths)?;
        if stack.compare(&loaded)? != Comparison::Same {
            node.log.step("the loaded drivers are not those of this image: they stay");
            return Ok(());
        }
        check_peer_memory(node)?;
        let leaving = stack.in_the_way(&loaded)?;
        self.taken_out.check(&leaving)?;
        forecast::announce(node, &leaving)?;
        unload::unload_all(node, &PEER_MEMORY)?;
        self.save_network(&loaded)?;
        node.log.step("putting back the host's drivers");
        let names = self.taken_out.add(&leaving)?;
        files::write(node, &self.state_file("replacing"), "")?;
        if let Err(error) = unload::unload_all(node, &leaving) {
            node.log.warn("the image's drivers stay loaded");
            let staying = Loaded::read(&node.paths)?;
            let gone: Vec<String> = leaving.into_iter().filter(|name| !staying.contains(name)).collect();
            let back = stack.load(&gone);
            self.restore_network(false)?;
            back?;
            files::remove(node, &self.state_file("replacing"))?;
            return Err(error);
        }
        let back = self.taken_out.load(&names);
        self.restore_network(true)?;
        back?;
        files::remove(node, &self.state_file("replacing"))?;
        self.taken_out.forget()
    }

    /// After a failure half-way: what is loaded of ours goes, what was loaded of the host's comes.
    fn put_back(&self, names: &[String]) -> Result<(), Error> {
        let loaded = Loaded::read(&self.node.paths)?;
        let is_ours = |name: &&str| self.stack.loader.is_ours(&loaded, name);
        unload::unload_all(self.node, &loaded.with_holders(loaded.names().filter(is_ours)))?;
        self.taken_out.load(names)
    }

    fn conceal(&self) -> Result<(), Error> {
        let (_, to) = self.settings.exposed();
        mounts::conceal(self.node, &to)
    }

    fn blacklist(&self) -> Blacklist<'_> {
        self.settings.blacklist(self.node)
    }

    fn write_udev_rules(&self) -> Result<(), Error> {
        let Self { node, settings, .. } = self;
        if !settings.udev_rules {
            return Ok(());
        }
        files::remove(node, &settings.udev_file)?;
        if names_have_ports(node) {
            node.log.step("interfaces are named with their ports already: no udev rules needed");
            return Ok(());
        }
        files::write(node, &settings.udev_file, &udev::rules())?;
        node.log.step(format!("wrote {}", settings.udev_file));
        Ok(())
    }

    /// What a container kept that was killed after it had unloaded the driver is older: it counts.
    fn save_network(&self, loaded: &Loaded) -> Result<(), Error> {
        let file = self.state_file("sriov");
        if State::kept(self.node, &file).is_some() || !loaded.contains("mlx5_core") {
            return Ok(());
        }
        let state = State::read(self.node, &self.state_file("devlink"));
        if state.is_empty() {
            return Ok(());
        }
        self.node.log.step(format!("saved {}", state.summary()));
        state.keep(self.node, &file)
    }

    /// What was kept of the driver before this one. `fresh`: the driver was loaded just now. Without a driver it is left to the next container.
    fn restore_network(&self, fresh: bool) -> Result<(), Error> {
        if !Loaded::read(&self.node.paths)?.contains("mlx5_core") {
            return Ok(());
        }
        let file = self.state_file("sriov");
        let state = State::found(self.node, &file);
        if fresh || state.is_some() {
            let state = state.unwrap_or_default();
            state.restore(self.node, self.settings.bind_delay, &self.state_file("devlink"));
        }
        files::remove(self.node, &file)?;
        Ok(())
    }

    fn state_file(&self, name: &str) -> String {
        self.settings.state_file(name)
    }
}

fn check_peer_memory(node: &Node<'_>) -> Result<(), Error> {
    PEER_MEMORY.iter().try_for_each(|name| unload::check_users(node, name))
}

/// Does udev give an NVIDIA interface a name with its port, such as `enp8s0f0np0`? From its database, where the pod
/// mounts it.
fn names_have_ports(node: &Node<'_>) -> bool {
    files::entries(node.paths.at("/sys/class/net")).iter().any(|interface| {
        let name = || {
            files::text(interface.join("device/vendor")).filter(|vendor| vendor == "0x15b3")?;
            let number = files::text(interface.join("ifindex"))?;
            let data = files::text(node.paths.at(&format!("/run/udev/data/n{number}")))?;
            data.lines().find_map(|line| line.strip_prefix("E:ID_NET_NAME_PATH=")).map(str::to_owned)
        };
        name().is_some_and(|name| ["np0", "np1", "np2", "np3"].iter().any(|port| name.ends_with(port)))
    })
}
