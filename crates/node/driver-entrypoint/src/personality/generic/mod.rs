//! `generic MODULE...`: loads modules, reports readiness, and unloads the modules at the end. With `--replace` it first
//! unloads modules of the host, and loads them again at the end.

mod options;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, time::Duration};

use options::Condition;
pub(crate) use options::{Options, USAGE};

use crate::{
    blacklist::Blacklist,
    connectivity::ApiServers,
    devices::BoundDevices,
    error::Error,
    failure::{self, FailureRecord},
    files,
    firmware::Firmware,
    forecast,
    guard::{
        END,
        client::{GuardClient, Swap},
    },
    host_modules::HostModules,
    lock, logind,
    module_file::ModuleFile,
    modules::{load::Loader, loaded::Loaded, unload},
    node::Node,
    program,
    signals::Signals,
};

/// Polling interval of the wait loops.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the container from start to stop.
pub(crate) fn run(node: &Node<'_>, options: &Options, signals: &mut dyn Signals) -> Result<(), Error> {
    let options = &options.complete(node)?;
    let _lock = lock::take(node, &options.file("lock"))?;
    let ready = options.file("ready");
    files::remove_and_log(node, &ready)?;
    let (host_path, name) = (&options.file("firmware"), options.name());
    let container = Container {
        node,
        options,
        loader: Loader::of_node(node)?,
        host_modules: HostModules::read(node, options.file("replaced"))?,
        api_servers: ApiServers { node, file: options.file("api-servers"), limit: options.api_server_limit },
        bound_devices: BoundDevices { node, file: options.file("bound") },
        guard: options.guard.as_deref().map(|directory| GuardClient { node, directory, name }),
        firmware: Firmware { host_path, subdir: "" },
    };
    let mut loaded = Vec::new();
    match container.start(signals, &mut loaded) {
        Ok(()) => {
            container.bound_devices.forget()?;
            files::set_ready(node, &ready)?;
            let signal = signals.wait();
            node.log.step(format!("{signal}: stopping"));
            files::remove_and_log(node, &ready)?;
            if options.keep {
                node.log.step("the modules stay loaded (--keep)");
                return Ok(());
            }
            if logind::is_shutting_down(node) {
                node.log.step("the node shuts down: the modules stay loaded");
                return Ok(());
            }
            forecast::check(node, &options.modules, &options.allowed)?;
            container.stop(&options.modules, &loaded, signals)
        }
        Err(error) if container.guard.as_ref().is_some_and(GuardClient::is_busy) => {
            node.log.step("the guard continues the swap");
            Err(error)
        }
        Err(error) => {
            node.log.warn_of(container.stop(&[], &loaded, signals));
            node.log.warn_of(container.api_servers.forget());
            node.log.warn_of(container.bound_devices.forget());
            let is_restored = container.host_modules.are_back(&container.loader);
            Err(if is_restored { error.without_state() } else { error })
        }
    }
}

struct Container<'a> {
    node: &'a Node<'a>,
    options: &'a Options,
    loader: Loader<'a>,
    host_modules: HostModules<'a>,
    api_servers: ApiServers<'a>,
    bound_devices: BoundDevices<'a>,
    guard: Option<GuardClient<'a>>,
    firmware: Firmware<'a>,
}

impl Container<'_> {
    /// Loads the modules. Adds the names of the newly loaded modules to `loaded`, even if it fails.
    fn start(&self, signals: &mut dyn Signals, loaded: &mut Vec<String>) -> Result<(), Error> {
        let Self { node, options, host_modules, .. } = self;
        self.wait(&options.wait_for, "load", signals)?;
        if options.firmware {
            self.firmware.set_search_path(node)?;
            self.firmware.provide(node)?;
        }
        if let Some(guard) = &self.guard {
            guard.await_earlier(signals)?;
        }
        // A killed container may have left the blacklist behind.
        self.blacklist().remove();
        let (to_unload, host_names) = self.plan_unload()?;
        if to_unload.is_empty() {
            self.load(signals, loaded)?;
            self.set_up(signals)?;
            return self.confirm(signals, loaded);
        }
        let failure = self.failure_record()?;
        failure.check()?;
        forecast::check(node, &to_unload, &options.allowed)?;
        host_modules.save(&host_names)?;
        if let Some(guard) = &self.guard {
            self.blacklist().write();
            let swap = Swap {
                digest: failure.image.clone(),
                limit: options.api_server_limit,
                unload: &to_unload,
                new_modules: (&self.loader, options.modules.clone(), Vec::new()),
                old_modules: (&host_modules.host, host_modules.with_files(&host_modules.names())),
            };
            let result = guard.swap(&swap, signals);
            // The guard needs the blacklist until the swap ends.
            if !guard.is_busy() {
                self.blacklist().remove();
            }
            let state = Loaded::read(&node.paths)?;
            let mut new_modules = self.image_modules_where(|name| self.loader.is_image_build(&state, name));
            new_modules.retain(|name| !to_unload.contains(name));
            loaded.extend(new_modules);
            let result = result.and_then(|()| self.set_up(signals));
            failure.update(&result);
            return result;
        }
        self.api_servers.record(&to_unload)?;
        self.bound_devices.record(&to_unload)?;
        self.blacklist().write();
        let result = unload::unload_all(node, &to_unload).and_then(|_| self.load(signals, loaded));
        let result = result.and_then(|()| self.bound_devices.check());
        self.blacklist().remove();
        let result = result.and_then(|()| self.set_up(signals));
        let result = result.and_then(|()| self.confirm_api_servers(signals));
        failure.update(&result);
        result
    }

    /// Checks the devices and waits for the API servers if a container was killed before it did so. After a failure, adds the
    /// image's modules to `loaded`, so that the caller unloads these modules.
    fn confirm(&self, signals: &mut dyn Signals, loaded: &mut Vec<String>) -> Result<(), Error> {
        let confirmed = self.bound_devices.check().and_then(|()| self.confirm_api_servers(signals));
        if confirmed.is_err() {
            self.failure_record()?.update(&confirmed);
            let state = Loaded::read(&self.node.paths)?;
            loaded.extend(self.image_modules_where(|name| self.loader.is_image_build(&state, name)));
        }
        confirmed
    }

    fn confirm_api_servers(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let modules = [self.host_modules.names(), self.options.modules.clone()].concat();
        self.api_servers.confirm(&modules, false, signals)
    }

    /// Runs the program of `--then`, and waits until the driver is ready.
    fn set_up(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        if let Some(program) = &self.options.then {
            program::run(self.node, program, &self.options.modules, signals)?;
        }
        self.wait(&self.options.ready_when, "get ready", signals)
    }

    fn failure_record(&self) -> Result<FailureRecord<'_>, Error> {
        let Self { node, options, loader, .. } = self;
        let image = failure::digest(loader, &self.image_modules_where(|_| true), &format!("{options:?}"))?;
        Ok(FailureRecord { node, file: options.file("failed"), lasting_file: None, image })
    }

    /// Unloads the image's modules and restores the host's: through the guard if modules of the host were replaced, otherwise
    /// with [`unload_and_restore`](Self::unload_and_restore).
    fn stop(&self, modules: &[String], loaded: &[String], signals: &mut dyn Signals) -> Result<(), Error> {
        let names = self.host_modules.names();
        let Some(guard) = self.guard.as_ref().filter(|_| !names.is_empty()) else {
            return self.unload_and_restore(modules, loaded);
        };
        let to_unload = self.modules_of_image(modules, loaded)?;
        if to_unload.is_empty() || self.find_stale_module(&names)?.is_some() {
            return self.unload_and_restore(modules, loaded);
        }
        self.host_modules.check(&names)?;
        self.node.log.step("restoring the host's modules");
        let swap = Swap {
            digest: format!("{}{END}", self.failure_record()?.image),
            limit: self.options.api_server_limit,
            unload: &to_unload,
            new_modules: (&self.host_modules.host, self.host_modules.with_files(&names), Vec::new()),
            old_modules: (&self.loader, self.options.modules.clone()),
        };
        guard.swap(&swap, signals)?;
        // Only the record of the host's modules and the firmware remain.
        self.unload_and_restore(&[], &[])
    }

    /// Lists the loaded modules of the image that the container has to unload, users first. Dependencies that something
    /// else uses stay.
    fn modules_of_image(&self, modules: &[String], loaded: &[String]) -> Result<Vec<String>, Error> {
        let state = Loaded::read(&self.node.paths)?;
        let dependencies = self.image_modules_where(|name| self.loader.is_image_build(&state, name));
        let own: Vec<String> = modules.iter().chain(loaded).chain(&dependencies).cloned().collect();
        let mut order = state.with_holders(own.iter().rev());
        order.retain(|name| own.contains(name));
        let is_used = |name: &&String| {
            state.get(name).is_some_and(|module| module.holders.iter().any(|holder| !order.contains(holder)))
        };
        let used: Vec<String> = order.iter().filter(is_used).cloned().collect();
        order.retain(|name| modules.contains(name) || !used.contains(name));
        Ok(order)
    }

    /// Unloads the requested modules in reverse order, then modules that were loaded as their dependencies and have no
    /// other users. Then loads the host's replaced modules again.
    fn unload_and_restore(&self, modules: &[String], loaded: &[String]) -> Result<(), Error> {
        let Self { node, options, .. } = self;
        // A dkms.conf may list a user of a module before that module.
        let mut to_unload = Loaded::read(&node.paths)?.with_holders(modules.iter().rev());
        to_unload.retain(|name| modules.contains(name));
        unload::unload_all(node, &to_unload)?;
        self.unload_dependencies(modules, loaded)?;
        let host_names = self.host_modules.names();
        if let Some(name) = self.find_remaining_module(&host_names)? {
            node.log.step(format!("module {name} of an image stays loaded: the host's are not restored yet"));
            return Ok(());
        }
        let mut result = Ok(());
        if !host_names.is_empty() {
            node.log.step("restoring the host's modules");
            result = self.host_modules.load(&host_names).and_then(|()| self.host_modules.clear());
        }
        if options.firmware {
            self.firmware.restore_search_path(node)?;
        }
        result
    }

    /// Unloads the modules in `loaded` that nothing else uses. A killed container also leaves the image's dependencies
    /// that it had loaded; they are also unloaded, except after a failed start, when `modules` is empty.
    fn unload_dependencies(&self, modules: &[String], loaded: &[String]) -> Result<(), Error> {
        let node = self.node;
        let state = Loaded::read(&node.paths)?;
        let is_leftover = |name: &str| !modules.is_empty() && self.loader.is_image_build(&state, name);
        let leftovers = self.image_modules_where(is_leftover);
        let to_unload = state.with_holders(loaded.iter().rev().chain(&leftovers));
        for name in to_unload.iter().filter(|name| loaded.contains(name) || leftovers.contains(*name)) {
            match unload::unload(node, name) {
                Err(Error::Held { .. } | Error::InUse { .. }) => {
                    node.log.step(format!("module {name} stays loaded: something else uses it"));
                }
                other => node.log.warn_of(other),
            }
        }
        Ok(())
    }

    /// Finds a loaded module of another image that has the name of a host's module in `host_names`.
    fn find_stale_module(&self, host_names: &[String]) -> Result<Option<String>, Error> {
        let loaded = Loaded::read(&self.node.paths)?;
        let stale = self.image_modules_where(|name| self.is_stale(&loaded, name));
        Ok(stale.into_iter().find(|name| host_names.contains(name)))
    }

    /// Finds a loaded module of an image that has the name of a host's module in `host_names`.
    fn find_remaining_module(&self, host_names: &[String]) -> Result<Option<String>, Error> {
        let loaded = Loaded::read(&self.node.paths)?;
        let is_left = |name: &str| self.loader.is_image_build(&loaded, name) || self.is_stale(&loaded, name);
        let replaces_host = |name: &String| self.options.modules.contains(name) || host_names.contains(name);
        Ok(self.image_modules_where(is_left).into_iter().find(replaces_host))
    }

    fn load(&self, signals: &mut dyn Signals, loaded: &mut Vec<String>) -> Result<(), Error> {
        for name in &self.options.modules {
            signals.check()?;
            self.loader.load_into(name, loaded)?;
            if !loaded.contains(name) {
                let is_ours = self.loader.is_image_build(&Loaded::read(&self.node.paths)?, name);
                let hint =
                    if is_ours { "" } else { ", and is not the image's: --replace would unload it first" };
                self.node.log.step(format!("module {name} is already loaded{hint}"));
            }
        }
        Ok(())
    }

    /// Plans the unload before the start. Returns the modules to unload, users first: modules of the host to replace, and
    /// leftovers of another image. Also returns which of these belong to the host. Fails before any change if a module
    /// cannot be unloaded now or loaded again at the end, or if a requested module cannot be loaded.
    fn plan_unload(&self) -> Result<(Vec<String>, Vec<String>), Error> {
        let Self { node, options, .. } = self;
        let loaded = Loaded::read(&node.paths)?;
        let stale = self.image_modules_where(|name| self.is_stale(&loaded, name));
        for name in &stale {
            node.log.step(format!("module {name} is already loaded, from another image: unloading it first"));
        }
        let mut to_replace = self.loader.without_image_build(&loaded, &options.replace);
        to_replace.extend(stale.iter().filter(|name| !options.replace.contains(name)).cloned());
        let order = loaded.with_holders(&to_replace);
        for name in &order {
            if !options.replace.contains(name) && !options.modules.contains(name) && !stale.contains(name) {
                return Err(Error::new(
                    format!("module {name} uses modules to be replaced: {}", to_replace.join(", ")),
                    format!(
                        "add --replace {name}, which unloads it first and restores it at the end; or unload it on the node"
                    ),
                ));
            }
            unload::check_users(node, name)?;
        }
        let mut host_names = self.loader.without_image_build(&loaded, &order);
        host_names.retain(|name| !stale.contains(name));
        self.host_modules.check(&host_names)?;
        let staying = loaded.without(&order);
        for name in &options.modules {
            self.loader.plan(name, &staying)?;
        }
        Ok((order, host_names))
    }

    /// Returns those of the requested modules and their dependencies in the image that pass the filter. Ignores errors
    /// about missing modules, which the load reports.
    fn image_modules_where(&self, filter: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let with_dependencies =
            |name: &String| self.loader.image_modules_for(name).unwrap_or_else(|_| vec![name.clone()]);
        self.options.modules.iter().flat_map(with_dependencies).filter(|name| filter(name)).collect()
    }

    /// Whether the loaded module belongs neither to the image nor to the host. Without the host's tree this is unknown,
    /// and the answer is false.
    fn is_stale(&self, loaded: &Loaded, name: &str) -> bool {
        let (paths, host) = (&self.node.paths, &self.host_modules.host.index);
        let is_other = !Loaded::is_in_tree(paths, name) && !self.loader.is_image_build(loaded, name);
        let identity = loaded.identity(paths, name).filter(|_| is_other && !host.is_empty());
        let file_identity = |file: &ModuleFile| file.info().ok()?.identity();
        identity.is_some()
            && host.file(name).is_none_or(|file| file_identity(file).is_some_and(|id| Some(id) != identity))
    }

    /// Waits until all conditions hold.
    fn wait(&self, conditions: &[Condition], purpose: &str, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, .. } = self;
        for condition in conditions {
            if !condition.is_met(&node.paths) {
                node.log.step(format!("waiting for {condition}, to {purpose}"));
            }
            while !condition.is_met(&node.paths) {
                signals.check()?;
                node.kernel.pause(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    fn blacklist(&self) -> Blacklist<'_> {
        let name = format!("farrier-{}.conf", self.options.name());
        Blacklist { node: self.node, name, link: None, modules: self.options.replace.clone() }
    }
}
