//! `mofed`: replaces the node's RDMA stack and mlx5 drivers with the image's, and exposes the image's kernel headers.
//! Restores the host's drivers at the end if `RESTORE_DRIVER_ON_POD_TERMINATION` is set.
//!
//! The steps, files and variables match the Network Operator's container (Mellanox/doca-driver-build).

mod devlink;
mod hooks;
mod settings;
pub(crate) mod sriov;
mod stack;
#[cfg(test)]
mod tests;
mod udev;

use hooks::Hooks;
pub(crate) use settings::Settings;
use sriov::NetworkState;
use stack::{PEER_MEMORY, Stack};

use crate::{
    blacklist::Blacklist,
    connectivity::ApiServers,
    devices::BoundDevices,
    error::Error,
    failure::{self, FailureRecord},
    files, forecast,
    guard::{
        END,
        client::{GuardClient, Swap},
    },
    host_modules::HostModules,
    lock, logind,
    modules::{load::Loader, loaded::Loaded, unload},
    mounts,
    node::Node,
    signals::Signals,
};

/// Runs the container from start to stop.
pub(crate) fn run(node: &Node<'_>, settings: &Settings, signals: &mut dyn Signals) -> Result<(), Error> {
    let _lock = lock::take(node, &settings.lock)?;
    files::remove_and_log(node, &settings.ready)?;
    let limit = settings.api_server_limit;
    let container = Container {
        node,
        settings,
        stack: Stack { node, settings, loader: Loader::of_node(node)? },
        host_modules: HostModules::read(node, settings.state_file("replaced"))?,
        api_servers: ApiServers { node, file: settings.state_file("api-servers"), limit },
        bound_devices: BoundDevices { node, file: settings.state_file("bound") },
        guard: settings.guard.as_deref().map(|directory| GuardClient { node, directory, name: "mofed" }),
        hooks: Hooks { node, programs: &settings.hooks, file: settings.state_file("changed-interfaces") },
        blacklist: settings.blacklist(node),
    };
    if let Err(error) = container.start(signals) {
        if container.is_guard_busy() {
            node.log.step("the guard continues the swap");
            return Err(error);
        }
        // Exposed headers would belong to drivers that are not loaded.
        node.log.warn_of(mounts::conceal(node, &settings.exposed().1));
        container.remove_udev_rules();
        let had_driver = container.has_driver().unwrap_or_default();
        node.log.warn_of(container.repair());
        if !had_driver {
            container.run_hook_after(signals);
        }
        let is_restored = container.host_modules.are_back(&container.stack.loader);
        return Err(if is_restored { error.without_state() } else { error });
    }
    let signal = signals.wait();
    node.log.step(format!("{signal}: stopping"));
    container.stop(signals)
}

struct Container<'a> {
    node: &'a Node<'a>,
    settings: &'a Settings,
    stack: Stack<'a>,
    host_modules: HostModules<'a>,
    api_servers: ApiServers<'a>,
    bound_devices: BoundDevices<'a>,
    guard: Option<GuardClient<'a>>,
    hooks: Hooks<'a>,
    blacklist: Blacklist<'a>,
}

impl Container<'_> {
    fn start(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, settings, stack, .. } = self;
        node.log.step(format!("kernel {}: starting", node.kernel.release()));
        if let Some(guard) = &self.guard {
            guard.await_earlier(signals)?;
        }
        // A killed container may have left the blacklist behind.
        self.blacklist.remove();
        stack.check_image()?;
        let loaded = Loaded::read(&node.paths)?;
        // Finish each branch before the root is exposed: the mount hides the saved state.
        if let Some((_, difference)) = stack.find_difference(&loaded)? {
            node.log.step(format!("{difference}: replacing the drivers"));
            signals.check()?;
            self.replace(&loaded, signals).inspect_err(|_| self.run_hook_after(signals))?;
        } else {
            self.keep_loaded_drivers(signals)?;
        }
        self.bound_devices.forget()?;
        self.hooks.run_after(&[], signals)?;
        self.expose()?;
        files::set_ready(node, &settings.ready)
    }

    /// Keeps drivers that match the image, and finishes the work of an earlier container.
    fn keep_loaded_drivers(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, stack, .. } = self;
        node.log.step("the loaded drivers match this image: not reloaded");
        // The stop of an earlier container has removed the rules.
        node.log.warn_of(self.write_udev_rules());
        // Remove the state of an attempt that failed before it unloaded the driver.
        if NetworkState::load_if_unloaded(node, &self.state_file("sriov")).is_none() {
            files::remove(node, &self.state_file("sriov"))?;
        }
        // If an earlier container was killed while loading, load the remaining modules.
        let unfinished = node.paths.at(&self.state_file("replacing")).exists();
        stack.load(&if unfinished { self.host_modules.names() } else { Vec::new() })?;
        files::remove(node, &self.state_file("replacing"))?;
        self.apply_saved_network(false)?;
        let names = self.host_modules.names();
        let confirmed =
            self.bound_devices.check().and_then(|()| self.api_servers.confirm(&names, false, signals));
        if confirmed.is_err() {
            self.undo_replacement(&names);
            self.failure_record()?.update(&confirmed);
            return confirmed;
        }
        self.restore_and_forget_network(false)
    }

    /// Exposes the image's kernel headers, or its root.
    fn expose(&self) -> Result<(), Error> {
        let Self { node, settings, .. } = self;
        let (from, to) = settings.exposed();
        if node.paths.at(from).exists() {
            return mounts::expose(node, from, &to);
        }
        // A killed container may have left the mount of another image there.
        mounts::conceal(node, &to)?;
        node.log.warn(format!("this image has no {from}: no peer memory can be built against these drivers"));
        Ok(())
    }

    fn stop(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, settings, .. } = self;
        files::remove_and_log(node, &settings.ready)?;
        self.remove_udev_rules();
        mounts::conceal(node, &settings.exposed().1)?;
        if settings.restore && logind::is_shutting_down(node) {
            node.log
                .step("the node shuts down: the drivers stay loaded, because pods still need the network");
        } else if settings.restore {
            let restored = self.restore_host(signals);
            self.run_hook_after(signals);
            restored?;
        } else {
            node.log.step("RESTORE_DRIVER_ON_POD_TERMINATION is not set: the drivers stay loaded");
        }
        self.blacklist.remove();
        Ok(())
    }

    /// Replaces the loaded drivers with the image's. Checks as much as possible before any change, and undoes the
    /// change if it fails.
    fn replace(&self, loaded: &Loaded, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, settings, stack, .. } = self;
        let failure = self.failure_record()?;
        // If the driver is not loaded, another attempt cannot interrupt the network.
        if loaded.contains("mlx5_core") {
            failure.check()?;
        }
        if let Some(guard) = &self.guard {
            guard.check(failure.image.clone())?;
        }
        PEER_MEMORY.iter().try_for_each(|name| unload::check_users(node, name))?;
        let to_unload = stack.modules_to_unload(loaded)?;
        // The manifests of the first generation do not mount the host's modules.
        if settings.restore || !settings.expose_root {
            self.host_modules.check(&stack.loader.without_image_build(loaded, &to_unload))?;
        }
        forecast::check(node, &to_unload, &settings.allowed)?;
        self.hooks.run_before(&to_unload, signals)?;
        unload::unload_all(node, &PEER_MEMORY)?;
        if self.guard.is_none() {
            self.save_network(loaded)?;
            self.api_servers.record(&to_unload)?;
        }
        node.log.warn_of(self.write_udev_rules());
        let unloaded = self.host_modules.save(&to_unload)?;
        files::write(node, &self.state_file("replacing"), "")?;
        self.blacklist.write();
        let result = self.swap_drivers(loaded, &to_unload, &unloaded, failure.image.clone(), signals);
        failure.update(&result);
        // The guard needs the blacklist until the swap ends, even if this container ends first.
        if self.is_guard_busy() {
            return result;
        }
        files::remove(node, &self.state_file("replacing"))?;
        self.blacklist.remove();
        result
    }

    /// Replaces the drivers, or has the guard on the host replace them. `to_unload` are the modules to unload now; `unloaded` also
    /// has those that earlier containers unloaded.
    fn swap_drivers(
        &self,
        loaded: &Loaded,
        to_unload: &[String],
        unloaded: &[String],
        digest: String,
        signals: &mut dyn Signals,
    ) -> Result<(), Error> {
        let Self { node, settings, stack, host_modules, .. } = self;
        stack.load_host_deps(loaded, to_unload)?;
        if let Some(guard) = &self.guard {
            let (required, optional) = stack.modules_of_swap(unloaded);
            let swap = Swap {
                digest,
                limit: settings.api_server_limit,
                unload: to_unload,
                new_modules: (&stack.loader, required, optional),
                old_modules: (&host_modules.host, host_modules.with_files(unloaded)),
            };
            guard.swap(&swap, signals)?;
            return stack.check_loaded();
        }
        self.bound_devices.record(to_unload)?;
        let result = unload::unload_all(node, to_unload).and_then(|_| {
            self.keep_bond_addresses();
            stack.load(unloaded)
        });
        let result = result.and_then(|()| stack.check_loaded());
        let result = result.and_then(|()| self.bound_devices.check());
        let result = result.and_then(|()| self.apply_saved_network(true));
        let result = result.and_then(|()| self.api_servers.confirm(unloaded, false, signals));
        result.inspect_err(|_| self.undo_replacement(unloaded))?;
        self.forget_saved_network()
    }

    fn is_guard_busy(&self) -> bool {
        self.guard.as_ref().is_some_and(GuardClient::is_busy)
    }

    /// Runs the program of `HOOK_AFTER`, and only logs its failure. While no driver is loaded, leaves it to the next container, and
    /// also interfaces that do not exist.
    fn run_hook_after(&self, signals: &mut dyn Signals) {
        if !self.is_guard_busy() && self.has_driver().unwrap_or_default() {
            self.node.log.warn_of(self.hooks.run_after(&self.hooks.missing(), signals));
        }
    }

    /// Replaces the image's drivers with the host's.
    fn restore_host(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, settings, stack, host_modules, .. } = self;
        let loaded = Loaded::read(&node.paths)?;
        if stack.find_difference(&loaded)?.is_some() {
            node.log.step("the loaded drivers are not from this image: they stay loaded");
            return self.repair();
        }
        let mut digest = String::new();
        if let Some(guard) = &self.guard {
            digest = format!("{}{END}", self.failure_record()?.image);
            guard.check(digest.clone())?;
        }
        PEER_MEMORY.iter().try_for_each(|name| unload::check_users(node, name))?;
        let mut to_unload = stack.modules_to_unload(&loaded)?;
        host_modules.check(&to_unload)?;
        forecast::check(node, &to_unload, &settings.allowed)?;
        self.hooks.run_before(&to_unload, signals)?;
        unload::unload_all(node, &PEER_MEMORY)?;
        if self.guard.is_none() {
            self.save_network(&loaded)?;
        }
        node.log.step("restoring the host's drivers");
        let names = host_modules.save(&to_unload)?;
        files::write(node, &self.state_file("replacing"), "")?;
        if let Some(guard) = &self.guard {
            let (required, _) = stack.modules_of_swap(&names);
            let swap = Swap {
                digest,
                limit: settings.api_server_limit,
                unload: &to_unload,
                new_modules: (&host_modules.host, host_modules.with_files(&names), Vec::new()),
                old_modules: (&stack.loader, required),
            };
            guard.swap(&swap, signals)?;
        } else if let Err(error) = unload::unload_all(node, &to_unload) {
            node.log.warn("the image's drivers stay loaded");
            let loaded = Loaded::read(&node.paths)?;
            to_unload.retain(|name| !loaded.contains(name));
            let reloaded = stack.load(&to_unload);
            self.restore_and_forget_network(false)?;
            reloaded?;
            files::remove(node, &self.state_file("replacing"))?;
            return Err(error);
        } else {
            self.keep_bond_addresses();
            let restored = host_modules.load(&names);
            self.restore_and_forget_network(true)?;
            restored?;
        }
        files::remove(node, &self.state_file("replacing"))?;
        host_modules.clear()
    }

    /// Restores the host's drivers if an earlier, killed container left the node without some of them. If all are loaded,
    /// restores only the interfaces' settings that the earlier container had not restored.
    fn repair(&self) -> Result<(), Error> {
        let Self { node, host_modules, .. } = self;
        let (names, loaded) = (host_modules.names(), Loaded::read(&node.paths)?);
        // Without an interruption, a module may be absent because the image does not have it.
        let was_interrupted = node.paths.at(&self.state_file("replacing")).exists();
        let is_needed = |name: &str| was_interrupted || matches!(name, "mlx5_core" | "ib_core");
        if !names.iter().any(|name| !loaded.contains(name) && is_needed(name)) {
            let has_settings = NetworkState::load_if_unloaded(node, &self.state_file("sriov")).is_some();
            return if has_settings { self.restore_and_forget_network(true) } else { Ok(()) };
        }
        node.log.warn("a container that was interrupted left the node without drivers: restoring the host's");
        self.blacklist.remove();
        let is_from_image = |name: &&String| loaded.contains(name) && !Loaded::is_in_tree(&node.paths, name);
        let from_image = loaded.with_holders(names.iter().filter(is_from_image));
        node.log.warn_of(unload::unload_all(node, &from_image));
        self.keep_bond_addresses();
        let restored = host_modules.load(&names);
        self.restore_and_forget_network(true)?;
        restored?;
        files::remove(node, &self.state_file("replacing"))?;
        self.api_servers.forget()?;
        self.bound_devices.forget()?;
        host_modules.clear()
    }

    /// Undoes a failed replacement: loads the host's modules in `names` instead of the image's, and restores the network.
    fn undo_replacement(&self, names: &[String]) {
        let log = &self.node.log;
        log.warn("the drivers could not be replaced: restoring the host's");
        log.warn_of(self.load_host_modules(names));
        log.warn_of(self.restore_and_forget_network(false));
        log.warn_of(self.api_servers.forget());
        log.warn_of(self.bound_devices.forget());
    }

    fn load_host_modules(&self, names: &[String]) -> Result<(), Error> {
        let loaded = Loaded::read(&self.node.paths)?;
        let is_image_build = |name: &&str| self.stack.loader.is_image_build(&loaded, name);
        unload::unload_all(self.node, &loaded.with_holders(loaded.names().filter(is_image_build)))?;
        self.keep_bond_addresses();
        self.host_modules.load(names)
    }

    fn write_udev_rules(&self) -> Result<(), Error> {
        let node = self.node;
        let Some(file) = &self.settings.udev_file else { return Ok(()) };
        files::remove(node, file)?;
        if names_have_ports(node) {
            node.log.step("interface names include the port already: no udev rules needed");
            return Ok(());
        }
        files::write(node, file, &udev::rules())?;
        node.log.step(format!("wrote {file}"));
        Ok(())
    }

    fn remove_udev_rules(&self) {
        if let Some(file) = &self.settings.udev_file {
            self.node.log.warn_of(files::remove(self.node, file));
        }
    }

    /// Saves network state before the driver is unloaded. State from a container that was killed after unloading the
    /// driver is kept, because it predates the unload.
    fn save_network(&self, loaded: &Loaded) -> Result<(), Error> {
        let file = self.state_file("sriov");
        if NetworkState::load_if_unloaded(self.node, &file).is_some() || !loaded.contains("mlx5_core") {
            return Ok(());
        }
        let state = NetworkState::read(self.node, &self.state_file("devlink"));
        if state.is_empty() {
            return Ok(());
        }
        self.node.log.step(format!("saved {}", state.summary()));
        state.save(self.node, &file)
    }

    /// Before a driver is loaded after an unload.
    fn keep_bond_addresses(&self) {
        if let Some(state) = NetworkState::load(self.node, &self.state_file("sriov")) {
            state.keep_bond_addresses(self.node);
        }
    }

    /// Restores the network state saved from the previous driver, and removes it. `just_loaded` is whether the driver was just
    /// loaded. Without a loaded driver, leaves the state to the next container.
    fn restore_and_forget_network(&self, just_loaded: bool) -> Result<(), Error> {
        self.apply_saved_network(just_loaded)?;
        self.forget_saved_network()
    }

    /// Restores the saved network state, and keeps it for the case that the replacement is undone.
    fn apply_saved_network(&self, just_loaded: bool) -> Result<(), Error> {
        let state = NetworkState::load(self.node, &self.state_file("sriov"));
        if self.has_driver()? && (just_loaded || state.is_some()) {
            let state = state.unwrap_or_default();
            state.restore(self.node, self.settings.bind_delay, &self.state_file("devlink"));
        }
        Ok(())
    }

    fn forget_saved_network(&self) -> Result<(), Error> {
        if self.has_driver()? {
            files::remove(self.node, &self.state_file("sriov"))?;
        }
        Ok(())
    }

    fn has_driver(&self) -> Result<bool, Error> {
        Ok(Loaded::read(&self.node.paths)?.contains("mlx5_core"))
    }

    fn failure_record(&self) -> Result<FailureRecord<'_>, Error> {
        let image = failure::digest(&self.stack.loader, &self.stack.own_modules()?, "")?;
        Ok(FailureRecord { node: self.node, file: self.state_file("failed"), lasting_file: None, image })
    }

    fn state_file(&self, name: &str) -> String {
        self.settings.state_file(name)
    }
}

/// Whether the name of an NVIDIA interface includes its port, such as `enp8s0f0np0`. Reads the present names: after the event of
/// a rename, udev's database has the port in spite of the rules.
fn names_have_ports(node: &Node<'_>) -> bool {
    files::entries(node.paths.at("/sys/class/net")).iter().any(|interface| {
        let name = files::name_of(interface);
        files::text(interface.join("device/vendor")).is_some_and(|vendor| vendor == "0x15b3")
            && ["np0", "np1", "np2", "np3"].iter().any(|port| name.ends_with(port))
    })
}
