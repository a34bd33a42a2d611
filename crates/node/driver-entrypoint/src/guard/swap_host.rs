//! The phases of a swap on the host. Each phase can run again after an interruption, and then only does the remaining work.

use std::{net::SocketAddr, path::Path, time::Duration};

use rustix::io::Errno;
use swap_guard::{
    journal::{Failure, Phase},
    request::{Module, NEW, OLD, Request},
    swap::Host,
};

use super::{DIRECTORY, failure_record, owner, reboot};
use crate::{
    connectivity::ApiServers,
    devices::BoundDevices,
    error::{Error, LoadRefusal},
    failure::FailureRecord,
    files::{self, name_of},
    forecast,
    kernel::LoadError,
    module_file::{Compression, ModuleFile, Origin},
    modules::{loaded::Loaded, unload, with_parameters},
    node::Node,
    personality::mofed::sriov::NetworkState,
    signals::Signals,
};

/// Time that the owner of the interfaces (a network manager) has to configure them before the saved settings are replayed.
const OWNER_SECONDS: u32 = 10;
/// Time before the replay if no network manager owns an interface: udev may still rename devices.
const NO_OWNER_SECONDS: u32 = 3;
/// Maximum time for an old driver to load.
const RESTORE_LIMIT: Duration = Duration::from_mins(1);

/// The node during a swap.
pub(super) struct SwapHost<'a> {
    pub(super) node: &'a Node<'a>,
    /// Path of the request's directory.
    pub(super) directory: String,
    pub(super) request: Request,
}

/// Signals of a guard during a swap: none, because the guard must not end before the swap does.
struct NoSignals;

impl Signals for NoSignals {
    fn received(&mut self) -> Option<&'static str> {
        None
    }

    fn wait(&mut self) -> &'static str {
        ""
    }
}

impl Host for SwapHost<'_> {
    fn uptime(&self) -> u64 {
        let text = files::text(self.node.paths.at("/proc/uptime")).unwrap_or_default();
        text.split('.').next().and_then(|seconds| seconds.parse().ok()).unwrap_or_default()
    }

    fn perform(&mut self, phase: Phase, time_left: Duration) -> Result<(), Failure> {
        self.node.log.step(format!("{phase}: {} s left", time_left.as_secs()));
        let result = match phase {
            Phase::Saving => self.save(),
            Phase::Unloading => unload::unload_all(self.node, &self.request.unload).map(|_| ()),
            Phase::Loading => self.load_new(time_left),
            Phase::Replaying | Phase::UndoReplaying => {
                self.replay();
                Ok(())
            }
            Phase::Confirming => self.confirm(time_left, false).and_then(|()| self.check_new()),
            Phase::UndoConfirming => self.confirm(time_left, true),
            Phase::UndoUnloading => self.unload_new(),
            Phase::UndoLoading => self.load_old(),
            Phase::Committed | Phase::Undone | Phase::PartlyUndone | Phase::Lost | Phase::Refused => Ok(()),
        };
        result.map_err(|error| {
            self.node.log.warn(format!("{phase}: {error}"));
            Failure { reason: error.to_string(), transient: error.is_transient() }
        })
    }

    fn check_restored(&self) -> Result<(), Failure> {
        let required = self.request.restore.iter().filter(|module| !module.optional);
        let others: Vec<String> = required.filter_map(|module| self.replacement_of(module)).collect();
        if others.is_empty() { Ok(()) } else { Err(Failure { reason: others.join("; "), transient: false }) }
    }

    fn warn(&mut self, error: &std::io::Error) {
        self.node.log.warn(format!("write the journal: {error}"));
    }
}

impl SwapHost<'_> {
    /// Record of the container's image that failed.
    pub(super) fn failure_record(&self) -> FailureRecord<'_> {
        failure_record(self.node, DIRECTORY, &self.container(), self.request.digest.clone())
    }

    /// Name of the container that has requested the swap.
    fn container(&self) -> String {
        name_of(Path::new(&self.directory))
    }

    fn save(&self) -> Result<(), Error> {
        let Self { node, request, .. } = self;
        self.check_expected()?;
        self.failure_record().check()?;
        reboot::record(node, &self.container(), request.digest.clone()).check()?;
        let servers = self.api_servers(request.limit);
        let silent = servers.record(&request.unload)?;
        if !silent.is_empty() && servers.recorded().is_empty() {
            return Err(no_answer_before(&silent));
        }
        let interfaces = forecast::interfaces_of(node, &request.unload);
        owner::save(node, &self.file("interfaces"), &interfaces)?;
        self.bound_devices().record(&request.unload)?;
        let network = NetworkState::read_of_modules(node, &self.file("defaults"), &request.unload);
        if network.is_empty() {
            return Ok(());
        }
        node.log.step(format!("saved {}", network.summary()));
        network.save(node, &self.file("network"))
    }

    /// Fails if the modules to unload are not those for which the container has planned the swap: the guard may have performed
    /// the swap of another container in between.
    fn check_expected(&self) -> Result<(), Error> {
        let paths = &self.node.paths;
        let loaded = Loaded::read(paths)?;
        let is_other =
            |(name, identity): &&(String, String)| loaded.identity(paths, name).as_ref() != Some(identity);
        let Some((name, _)) = self.request.expect.iter().find(is_other) else { return Ok(()) };
        Err(Error::new(
            format!("module {name} is not the one for which the swap was planned"),
            "another container has replaced the module: run only one container that replaces it",
        ))
    }

    fn load_new(&self, time_left: Duration) -> Result<(), Error> {
        let Self { node, request, .. } = self;
        self.keep_bond_addresses();
        for module in &request.load {
            if self.is_loaded(module, NEW)? {
                continue;
            }
            if Loaded::read(&node.paths)?.contains(&module.name) {
                return Err(Error::new(
                    format!(
                        "another program on the node has loaded a {} that is not the image's",
                        module.name
                    ),
                    "mount the host's /run/modprobe.d in the driver's container: the blacklist there keeps udev from loading it",
                ));
            }
            match self.load(module, NEW, time_left) {
                Err(error) if module.optional => {
                    node.log.warn(format!("continuing without {}: {error}", module.name));
                }
                result => result?,
            }
        }
        self.bound_devices().check()?;
        self.check_new()
    }

    /// Fails unless the new modules are loaded. udev or people may have loaded others of the same names.
    fn check_new(&self) -> Result<(), Error> {
        for module in self.request.load.iter().filter(|module| !module.optional) {
            if !self.is_loaded(module, NEW)? {
                return Err(Error::new(
                    format!("module {} is not loaded, or not in the build of the new drivers", module.name),
                    "dmesg on the node has the kernel's messages",
                ));
            }
        }
        Ok(())
    }

    /// Describes what is loaded in place of an old module; `None` if the old module is loaded.
    fn replacement_of(&self, module: &Module) -> Option<String> {
        let name = &module.name;
        let is_loaded = |directory| self.is_loaded(module, directory).unwrap_or_default();
        if is_loaded(OLD) {
            None
        } else if is_loaded(NEW) {
            Some(format!("the new module {name} stays loaded"))
        } else if Loaded::read(&self.node.paths).is_ok_and(|loaded| loaded.contains(name)) {
            Some(format!("module {name} is loaded in a build that is neither the old nor the new one"))
        } else {
            Some(format!("module {name} is not loaded"))
        }
    }

    /// Unloads the new modules, users first. If a module cannot be unloaded, still unloads the others.
    fn unload_new(&self) -> Result<(), Error> {
        let Self { node, request, .. } = self;
        let mut names = Vec::new();
        for module in request.load.iter().rev() {
            // A module that is the same before and after the swap stays loaded.
            let identity = self.identity(module, NEW);
            let is_same = identity.is_some() && identity == self.identity(module, OLD);
            if self.is_loaded(module, NEW)? && !is_same {
                names.push(&module.name);
            }
        }
        let mut result = Ok(());
        for name in Loaded::read(&node.paths)?.with_holders(names) {
            result = result.and(unload::unload(node, &name).map(|_| ()));
        }
        result
    }

    /// Loads the old modules again. If a module cannot be loaded, still loads the others.
    fn load_old(&self) -> Result<(), Error> {
        let Self { node, request, .. } = self;
        self.keep_bond_addresses();
        let mut result = Ok(());
        for module in &request.restore {
            if Loaded::read(&node.paths)?.contains(&module.name) {
                continue;
            }
            let loaded = self.load(module, OLD, RESTORE_LIMIT).or_else(|error| self.modprobe(module, error));
            if let Err(error) = loaded {
                node.log.warn(format!("module {} could not be restored: {error}", module.name));
                result = result.and(if module.optional { Ok(()) } else { Err(error) });
            }
        }
        result
    }

    /// Loads a module from the host's own tree, because LoadPin and IMA may refuse the copy in the request's directory.
    /// Returns `error`, the reason of that refusal, if `modprobe` fails too.
    fn modprobe(&self, module: &Module, error: Error) -> Result<(), Error> {
        let log = &self.node.log;
        log.warn(format!("{error}; trying the host's modprobe"));
        match owner::run(self.node, "modprobe", &[&module.name]) {
            Ok(()) => {
                log.step(format!("modprobe loaded {}", module.name));
                Ok(())
            }
            Err(reason) => {
                log.warn(format!("modprobe {}: {reason}", module.name));
                Err(error)
            }
        }
    }

    /// Loads a module. Tries each of the request's parameter strings until the kernel accepts one.
    fn load(&self, module: &Module, directory: &str, limit: Duration) -> Result<(), Error> {
        let Self { node, .. } = self;
        let file = self.module_file(module, directory);
        let none = [String::new()];
        let attempts =
            if module.parameters.is_empty() { none.as_slice() } else { module.parameters.as_slice() };
        let mut result = Ok(());
        for parameters in attempts {
            result = self.load_file(module, &file, parameters, limit);
            match &result {
                Ok(()) => {
                    let options = with_parameters(parameters);
                    node.log.step(format!("loaded the {directory} module {}{options}", module.name));
                    return Ok(());
                }
                Err(Error::Refused { .. }) => {}
                Err(_) => return result,
            }
        }
        result
    }

    fn load_file(
        &self,
        module: &Module,
        file: &ModuleFile,
        parameters: &str,
        limit: Duration,
    ) -> Result<(), Error> {
        let Module { name, .. } = module;
        match self.node.kernel.load_within(file, parameters, limit) {
            // The process of a guard that was killed may have completed its work.
            Ok(()) | Err(LoadError::Refused(LoadRefusal { errno: Errno::EXIST, .. })) => Ok(()),
            Err(LoadError::Refused(refusal)) => {
                let path = self.node.paths.container_path(&file.path);
                Err(Error::Refused { name: name.clone(), path, parameters: parameters.to_owned(), refusal })
            }
            Err(LoadError::Failed(reason)) => Err(Error::new(
                format!("load {name}: {reason}"),
                "dmesg on the node has the kernel's messages",
            )),
        }
    }

    /// Whether a module is loaded from the file of a request.
    fn is_loaded(&self, module: &Module, directory: &str) -> Result<bool, Error> {
        let paths = &self.node.paths;
        let loaded = Loaded::read(paths)?;
        if !loaded.contains(&module.name) {
            return Ok(false);
        }
        let info = self.module_file(module, directory).info()?;
        // Without an identity, modules cannot be told apart.
        Ok(info.identity().is_none() || loaded.matches_file(paths, &module.name, &info))
    }

    /// Identity of a file of the request; `None` also without such a file.
    fn identity(&self, module: &Module, directory: &str) -> Option<String> {
        self.module_file(module, directory).info().ok()?.identity()
    }

    fn module_file(&self, module: &Module, directory: &str) -> ModuleFile {
        let path = self.node.paths.at(&self.file(&module.file(directory)));
        ModuleFile { path, compression: Compression::None, origin: Origin::Host }
    }

    fn keep_bond_addresses(&self) {
        if let Some(network) = NetworkState::load(self.node, &self.file("network")) {
            network.keep_bond_addresses(self.node);
        }
    }

    /// Lets the interfaces' owner configure them, and then restores the remaining settings. Only logs failures, because the next
    /// phase decides by the answers of the API servers.
    fn replay(&self) {
        let node = self.node;
        let has_owner = owner::configure(node, &self.file("interfaces"));
        let Some(network) = NetworkState::load(node, &self.file("network")) else { return };
        let seconds = if has_owner { OWNER_SECONDS } else { NO_OWNER_SECONDS };
        network.restore(node, seconds, &self.file("defaults"));
    }

    /// Waits until the API servers answer. During an undo, one server is enough, because the node is then not cut off.
    fn confirm(&self, time_left: Duration, is_undo: bool) -> Result<(), Error> {
        let Request { limit, unload, load, restore, .. } = &self.request;
        let servers = self.api_servers(if limit.is_zero() { Duration::ZERO } else { time_left });
        let modules = load.iter().chain(restore).map(|module| module.name.clone());
        let modules: Vec<String> = modules.chain(unload.iter().cloned()).collect();
        servers.confirm(&modules, is_undo, &mut NoSignals)
    }

    fn bound_devices(&self) -> BoundDevices<'_> {
        BoundDevices { node: self.node, file: self.file("devices") }
    }

    fn api_servers(&self, limit: Duration) -> ApiServers<'_> {
        ApiServers { node: self.node, file: self.file("api-servers"), limit }
    }

    fn file(&self, name: &str) -> String {
        format!("{}/{name}", self.directory)
    }
}

fn no_answer_before(servers: &[SocketAddr]) -> Error {
    let servers: Vec<String> = servers.iter().map(SocketAddr::to_string).collect();
    Error::new(
        format!("no API server answers before the swap: {}", servers.join(", ")),
        "the guard could not tell whether the new drivers work. With API_SERVER_TIMEOUT_SEC=0 it does not check",
    )
}
