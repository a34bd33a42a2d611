//! Forecast of an unload: the users of each module, the network interfaces that go down with it, and the losses of
//! the node and its pods.

use std::{fmt, fs, path::PathBuf, slice};

use driver_entrypoint::holders::{Holder, to_text};

use crate::{
    disruption::{Disruption, Loss, VARIABLE},
    error::Error,
    files::{entries, name_of},
    modules::{is_module_name, loaded::Loaded, unload, users::module_of},
    node::{Node, is_plain_path},
    personality::mofed::sriov::lost_settings,
    pod_interfaces::{self, PodInterface},
    routes::{Network, TrafficUse},
    storage::{self, StorageUse},
};

/// Usage text of `forecast`.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint forecast [--message PATH] MODULE...

Forecasts the unload of these modules and of those that use them. Exit code 0: all can be unloaded; 1: at least one cannot,
or its unload would disrupt the node. ALLOW_DISRUPTION (uplink, storage, pods) allows that, as in the driver's container.
With hostPID and hostNetwork it sees the node's processes, mounts and routes; else those of its own container.
Also writes their users to PATH (a container's /dev/termination-log), where farrier reads them. Processes of the pod
FARRIER_DRIVER_POD, which is the driver's own, do not count.";

/// Arguments of `forecast`.
pub(crate) struct ForecastRequest<'a> {
    modules: &'a [&'a str],
    /// File that the forecast is written to, in addition to the log.
    message: Option<&'a str>,
    /// UID of the pod whose processes are ignored: the driver's own pod.
    driver_pod: Option<String>,
    /// Disruptions that the driver's container would accept.
    allowed: Vec<Disruption>,
}

impl<'a> ForecastRequest<'a> {
    /// Parses the arguments after `forecast`; `None` if they are invalid.
    pub(crate) fn parse(
        arguments: &'a [&'a str],
        driver_pod: Option<String>,
        allowed: Vec<Disruption>,
    ) -> Option<Self> {
        let (message, modules) = match arguments {
            ["--message", path, modules @ ..] => (Some(*path), modules),
            modules => (None, modules),
        };
        let are_modules = !modules.is_empty() && modules.iter().all(|name| is_module_name(name));
        let is_path = message.is_none_or(is_plain_path);
        (are_modules && is_path).then_some(Self { modules, message, driver_pod, allowed })
    }
}

/// Forecast for one module.
pub(crate) struct UnloadForecast {
    name: String,
    /// Holders that prevent the unload.
    holders: Vec<Holder>,
    /// Disruptions of the node or of a pod that are not allowed.
    losses: Vec<Loss>,
    /// Network interfaces that go down with the module.
    down: Vec<String>,
    /// Settings of the module's devices that `mofed` does not restore.
    unrestored: Vec<String>,
}

impl UnloadForecast {
    /// Whether the unload would fail or be refused.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.holders.is_empty() || !self.losses.is_empty()
    }

    /// Whether the unload fails, takes an interface down or loses settings.
    pub(crate) fn has_effect(&self) -> bool {
        self.is_blocked() || !self.down.is_empty() || !self.unrestored.is_empty()
    }

    /// Returns holders and losses for farrier, which evicts their pods.
    fn holders_and_losses(&self) -> impl Iterator<Item = Holder> {
        let lost =
            self.losses.iter().map(|loss| Holder { pod: loss.pod.clone(), what: loss.resource.clone() });
        let all = self.holders.iter().cloned().chain(lost);
        all.map(|Holder { pod, what }| Holder { pod, what: format!("{}: {what}", self.name) })
    }
}

impl fmt::Display for UnloadForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, holders, losses, down, unrestored } = self;
        let held = holders.iter().map(|holder| holder.what.as_str()).collect::<Vec<_>>().join("; ");
        let lost = join_losses(losses);
        match (holders.is_empty(), losses.is_empty(), down.is_empty()) {
            (true, true, false) => {
                write!(f, "module {name} can be unloaded, which takes down {}", down.join("; "))
            }
            (true, true, true) => write!(f, "module {name} can be unloaded"),
            (true, false, _) => write!(f, "the unload of module {name} would disrupt {lost}"),
            (false, true, _) => write!(f, "module {name} cannot be unloaded: {held}"),
            (false, false, _) => {
                write!(f, "module {name} cannot be unloaded: {held}; and would disrupt {lost}")
            }
        }?;
        if unrestored.is_empty() {
            return Ok(());
        }
        write!(f, "; lost with it, and not restored: {}", unrestored.join("; "))
    }
}

fn join_losses(losses: &[Loss]) -> String {
    losses.iter().map(|loss| loss.resource.as_str()).collect::<Vec<_>>().join("; ")
}

/// Runs the `forecast` command: logs a line for each module.
pub(crate) fn run(node: &Node<'_>, request: &ForecastRequest<'_>) -> Result<(), Error> {
    let ForecastRequest { modules, message, driver_pod, allowed } = request;
    let forecasts = forecast(node, modules, driver_pod.as_deref(), allowed)?;
    if forecasts.is_empty() {
        node.log.step("none of these modules is loaded");
    }
    for forecast in &forecasts {
        node.log.step(forecast);
    }
    if let Some(path) = message {
        let holders: Vec<Holder> = forecasts.iter().flat_map(UnloadForecast::holders_and_losses).collect();
        // The kubelet bind-mounts this file, so write it in place instead of renaming another file over it.
        fs::write(node.paths.at(path), to_text(&holders)).map_err(Error::on("write", *path))?;
    }
    if forecasts.iter().any(|forecast| !forecast.holders.is_empty()) {
        return Err(Error::new(
            "not all of these modules can be unloaded",
            "stop the processes that use them, unmount their file systems, or drain the node",
        ));
    }
    refuse_disruption(&forecasts)
}

/// Logs a forecast before modules are unloaded. Fails if the unload would disrupt more than is allowed.
pub(crate) fn check(node: &Node<'_>, names: &[impl AsRef<str>], allowed: &[Disruption]) -> Result<(), Error> {
    refuse_disruption(&announce(node, names, allowed)?)
}

/// Logs a forecast before modules are unloaded.
pub(crate) fn announce(
    node: &Node<'_>,
    names: &[impl AsRef<str>],
    allowed: &[Disruption],
) -> Result<Vec<UnloadForecast>, Error> {
    let forecasts = forecast(node, names, None, allowed)?;
    for forecast in forecasts.iter().filter(|forecast| forecast.has_effect()) {
        node.log.step(format!("forecast: {forecast}"));
    }
    Ok(forecasts)
}

/// Fails if an unload would cause a disruption that is not allowed.
fn refuse_disruption(forecasts: &[UnloadForecast]) -> Result<(), Error> {
    let losses: Vec<Loss> = forecasts.iter().flat_map(|forecast| forecast.losses.clone()).collect();
    if losses.is_empty() {
        return Ok(());
    }
    let is_caused = |disruption: &Disruption| losses.iter().any(|loss| loss.disruption == *disruption);
    let names: Vec<&str> = Disruption::ALL.into_iter().filter(is_caused).map(Disruption::name).collect();
    Err(Error::new(
        format!("refused, because the unload of the driver would disrupt {}", join_losses(&losses)),
        format!(
            "move the traffic, file systems or pods to other devices; or accept the disruption with {VARIABLE}={} in \
             the definition's runtime.env or the DaemonSet",
            names.join(",")
        ),
    ))
}

/// Forecasts the unload of these modules and of all modules that use them, in unload order. Ignores processes of the
/// pod `driver_pod`, and disruptions that are allowed.
fn forecast(
    node: &Node<'_>,
    names: &[impl AsRef<str>],
    driver_pod: Option<&str>,
    allowed: &[Disruption],
) -> Result<Vec<UnloadForecast>, Error> {
    let state = NodeState {
        node,
        loaded: Loaded::read(&node.paths)?,
        network: Network::read(&node.paths),
        storage: storage::uses(&node.paths),
        pods: pod_interfaces::read(&node.paths),
    };
    let forecasts = state.loaded.with_holders(names).into_iter().map(|name| {
        let down = interfaces_of(node, slice::from_ref(&name)).into_iter();
        let down = down.map(|path| InterfaceUse { uses: state.network.uses(&path), path });
        let down: Vec<InterfaceUse> = down.collect();
        let mut losses = state.losses(&name, &down, driver_pod);
        losses.retain(|loss| !allowed.contains(&loss.disruption));
        let holders = state.holders(&name, !losses.is_empty(), driver_pod);
        let unrestored = if name == "mlx5_core" { lost_settings(node) } else { Vec::new() };
        let down = down.iter().map(InterfaceUse::to_string).collect();
        UnloadForecast { name, holders, losses, down, unrestored }
    });
    Ok(forecasts.collect())
}

/// State of the node that a forecast is derived from.
struct NodeState<'a> {
    node: &'a Node<'a>,
    loaded: Loaded,
    network: Network,
    storage: Vec<StorageUse>,
    pods: Vec<PodInterface>,
}

impl NodeState<'_> {
    /// Lists the losses of the node and its pods without a module and its interfaces `down`.
    fn losses(&self, module: &str, down: &[InterfaceUse], driver_pod: Option<&str>) -> Vec<Loss> {
        let mut losses: Vec<Loss> = down.iter().filter_map(InterfaceUse::loss).collect();
        let is_lost = |storage: &&StorageUse| {
            let is_reached =
                |server| down.iter().any(|interface| self.network.carries(&interface.path, server));
            storage.modules.contains(module) || storage.servers.iter().copied().any(is_reached)
        };
        let lost = self.storage.iter().filter(is_lost).map(|storage| storage.description.clone());
        losses.extend(lost.map(|resource| Loss { disruption: Disruption::Storage, pod: None, resource }));
        let is_driver_pod = |loss: &Loss| driver_pod.is_some() && loss.pod.as_deref() == driver_pod;
        let pod_losses = pod_interfaces::losses(&self.pods, &self.node.paths, module).into_iter();
        losses.extend(pod_losses.filter(|loss| !is_driver_pod(loss)));
        losses
    }

    /// Lists the users that prevent the unload of a module. Counts references without a visible process only if the
    /// module has no losses, because a loss may explain such references.
    fn holders(&self, module: &str, has_losses: bool, driver_pod: Option<&str>) -> Vec<Holder> {
        let mut holders = Vec::new();
        let in_use = [unload::in_use, unload::virtual_functions_in_use];
        for error in in_use.iter().filter_map(|in_use| in_use(self.node, &self.loaded, module)) {
            let Error::InUse { users, references, .. } = error else { continue };
            let others =
                users.iter().filter(|user| driver_pod.is_none() || user.pod.as_deref() != driver_pod);
            holders
                .extend(others.map(|user| Holder { pod: user.pod.clone(), what: format!("used by {user}") }));
            if users.is_empty() && holders.is_empty() && !has_losses {
                let user = self.storage.iter().find(|storage| storage.modules.contains(module));
                let user = user.map_or("an unknown user", |storage| &storage.description);
                holders.push(Holder { pod: None, what: format!("{references} reference(s) of {user}") });
            }
        }
        holders
    }
}

/// A network interface of a driver, with the traffic that it carries.
struct InterfaceUse {
    path: PathBuf,
    uses: Vec<TrafficUse>,
}

impl InterfaceUse {
    /// Returns the node's loss if the interface is its uplink.
    fn loss(&self) -> Option<Loss> {
        let uplinks = self.uses.iter().filter(|traffic| traffic.is_uplink);
        let uplinks: Vec<&str> = uplinks.map(|traffic| traffic.description.as_str()).collect();
        let resource = format!("interface {} ({})", name_of(&self.path), uplinks.join(", "));
        (!uplinks.is_empty()).then_some(Loss { disruption: Disruption::Uplink, pod: None, resource })
    }
}

impl fmt::Display for InterfaceUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interface {}", name_of(&self.path))?;
        let uses: Vec<&str> = self.uses.iter().map(|traffic| traffic.description.as_str()).collect();
        if uses.is_empty() { Ok(()) } else { write!(f, " ({})", uses.join(", ")) }
    }
}

/// Lists the network interfaces that these modules drive.
pub(crate) fn interfaces_of(node: &Node<'_>, modules: &[String]) -> Vec<PathBuf> {
    let mut interfaces = entries(node.paths.at("/sys/class/net"));
    interfaces.retain(|path| module_of(&path.join("device")).is_some_and(|module| modules.contains(&module)));
    interfaces
}

#[cfg(test)]
mod tests;
