//! `generic MODULE...`: loads modules, reports readiness, and unloads the modules at the end. With `--replace` it first
//! unloads modules of the host, and loads them again at the end.

mod options;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, io, os::unix::process::CommandExt as _, process::Command, time::Duration};

use options::Condition;
pub(crate) use options::{Options, USAGE};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    blacklist::Blacklist,
    devices,
    error::Error,
    failure::{self, FailureRecord},
    files,
    firmware::Firmware,
    forecast,
    lock::Lock,
    logind,
    module_file::ModuleFile,
    modules::{index::Index, load::Loader, loaded::Loaded, parameters::Parameters, unload},
    node::Node,
    signals::Ending,
    taken_out::TakenOut,
};

/// Polling interval of the wait loops.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Runs the container from start to stop.
pub(crate) fn run(node: &Node<'_>, options: &Options, ending: &mut dyn Ending) -> Result<(), Error> {
    let options = &options.complete(node)?;
    let _lock = Lock::take(node, &options.file("lock"))?;
    let ready = options.file("ready");
    files::clear_ready(node, &ready)?;
    let (index, host) = (Index::of_node(node)?, Index::of_host(node)?);
    let parameters = Parameters::read(&node.paths);
    let (of_host, has_options) = Parameters::of_host(&node.paths);
    let container = Container {
        node,
        options,
        loader: Loader { node, index: &index, parameters: &parameters },
        taken_out: TakenOut {
            host: Loader { node, index: &host, parameters: &of_host },
            has_options,
            file: options.file("replaced"),
        },
        firmware_path: options.file("firmware"),
    };
    let mut loaded = Vec::new();
    match container.start(ending, &mut loaded) {
        Ok(()) => {
            files::set_ready(node, &ready)?;
            let signal = ending.wait();
            node.log.step(format!("{signal}: stopping"));
            files::clear_ready(node, &ready)?;
            if options.keep {
                node.log.step("the modules stay loaded (--keep)");
                return Ok(());
            }
            if logind::is_shutting_down(node) {
                node.log.step("the node shuts down: the modules stay loaded");
                return Ok(());
            }
            forecast::check(node, &options.modules, &options.allowed)?;
            container.stop(&options.modules, &loaded)
        }
        Err(error) => {
            node.log.warn_of(container.stop(&[], &loaded));
            Err(error)
        }
    }
}

struct Container<'a> {
    node: &'a Node<'a>,
    options: &'a Options,
    loader: Loader<'a>,
    taken_out: TakenOut<'a>,
    firmware_path: String,
}

impl Container<'_> {
    fn start(&self, ending: &mut dyn Ending, loaded: &mut Vec<String>) -> Result<(), Error> {
        let Self { node, options, .. } = self;
        self.wait(&options.wait_for, "load", ending)?;
        if options.firmware {
            self.firmware().set_search_path(node)?;
            let files = self.firmware().provide(node)?;
            node.log.step(format!("firmware: {files} file(s) copied to {}", self.firmware_path));
        }
        // A killed container may have left the blacklist behind.
        self.blacklist().remove();
        let (leaving, theirs) = self.leaving()?;
        if leaving.is_empty() {
            self.load(ending, loaded)?;
            return self.set_up(ending);
        }
        let failure = self.failure()?;
        failure.check()?;
        forecast::check(node, &leaving, &options.allowed)?;
        self.taken_out.add(&theirs)?;
        self.blacklist().write();
        let driven: Vec<String> =
            leaving.iter().flat_map(|name| devices::driven(&node.paths, name)).collect();
        let replaced = unload::unload_all(node, &leaving).and_then(|_| self.load(ending, loaded));
        let replaced = replaced.and_then(|()| devices::check_bound(node, &driven));
        self.blacklist().remove();
        let replaced = replaced.and_then(|()| self.set_up(ending));
        failure.update(&replaced);
        replaced
    }

    /// Runs the program of `--then`, and waits until the driver is ready.
    fn set_up(&self, ending: &mut dyn Ending) -> Result<(), Error> {
        if let Some(program) = &self.options.then {
            self.run_after(program, ending)?;
        }
        self.wait(&self.options.ready_when, "get ready", ending)
    }

    fn failure(&self) -> Result<FailureRecord<'_>, Error> {
        let Self { node, options, loader, .. } = self;
        let image = failure::digest(loader, &self.of_image_that(|_| true), &format!("{options:?}"))?;
        Ok(FailureRecord { node, file: options.file("failed"), image })
    }

    /// Unloads the requested modules in reverse order, then modules that were loaded as their dependencies and have no
    /// other users. Then loads the host's replaced modules again.
    fn stop(&self, modules: &[String], loaded: &[String]) -> Result<(), Error> {
        let node = self.node;
        // A dkms.conf may list a user of a module before that module.
        let leaving = Loaded::read(&node.paths)?.with_holders(modules.iter().rev());
        for name in leaving.iter().filter(|name| modules.contains(name)) {
            unload::unload(node, name)?;
        }
        // A killed container also leaves the image's dependencies that it had loaded. After a failed start these are
        // not touched.
        let there = Loaded::read(&node.paths)?;
        let ours = self.of_image_that(|name| !modules.is_empty() && self.loader.is_ours(&there, name));
        let rest = there.with_holders(loaded.iter().rev().chain(&ours));
        for name in rest.iter().filter(|name| loaded.contains(name) || ours.contains(*name)) {
            match unload::unload(node, name) {
                Err(Error::Held { .. } | Error::InUse { .. }) => {
                    node.log.step(format!("module {name} stays loaded: something else uses it"));
                }
                other => node.log.warn_of(other),
            }
        }
        let (taken_out, there) = (self.taken_out.names(), Loaded::read(&node.paths)?);
        let stays = |name: &str| self.loader.is_ours(&there, name) || self.is_left(&there, name);
        let in_their_place = |name: &&String| self.options.modules.contains(name) || taken_out.contains(name);
        if let Some(name) = self.of_image_that(stays).iter().find(in_their_place) {
            node.log.step(format!("module {name} of an image stays loaded: the host's are not restored yet"));
            return Ok(());
        }
        let mut back = Ok(());
        if !taken_out.is_empty() {
            node.log.step("restoring the host's modules");
            back = self.taken_out.load(&taken_out).and_then(|()| self.taken_out.forget());
        }
        if self.options.firmware {
            self.firmware().restore_search_path(node)?;
        }
        back
    }

    fn load(&self, ending: &mut dyn Ending, loaded: &mut Vec<String>) -> Result<(), Error> {
        for name in &self.options.modules {
            ending.go_on()?;
            self.loader.load_noting(name, loaded)?;
            if !loaded.contains(name) {
                let ours = self.loader.is_ours(&Loaded::read(&self.node.paths)?, name);
                let which =
                    if ours { "" } else { ", and is not the image's: --replace would unload it first" };
                self.node.log.step(format!("module {name} is already loaded{which}"));
            }
        }
        Ok(())
    }

    /// Plans the unload before the start. Returns all modules to unload in this order: users first, of the host's
    /// replaced modules and of leftover modules of another image. Also returns which of these belong to the host.
    /// Fails before any change if a module cannot be unloaded now or loaded again at the end, or if a requested module
    /// cannot be loaded.
    fn leaving(&self) -> Result<(Vec<String>, Vec<String>), Error> {
        let Self { node, options, .. } = self;
        let loaded = Loaded::read(&node.paths)?;
        let left = self.of_image_that(|name| self.is_left(&loaded, name));
        for name in &left {
            node.log.step(format!("module {name} is already loaded, from another image: unloading it first"));
        }
        let mut making_way = self.loader.of_others(&loaded, &options.replace);
        making_way.extend(left.iter().filter(|name| !options.replace.contains(name)).cloned());
        let order = loaded.with_holders(&making_way);
        for name in &order {
            if !options.replace.contains(name) && !options.modules.contains(name) && !left.contains(name) {
                return Err(Error::new(
                    format!("module {name} uses modules to be replaced: {}", making_way.join(", ")),
                    format!(
                        "add --replace {name}, which unloads it first and restores it at the end; or unload it on the node"
                    ),
                ));
            }
            unload::check_users(node, name)?;
        }
        let mut theirs = self.loader.of_others(&loaded, &order);
        theirs.retain(|name| !left.contains(name));
        self.taken_out.check(&theirs)?;
        let staying = loaded.without(&order);
        for name in &options.modules {
            self.loader.plan(name, &staying)?;
        }
        Ok((order, theirs))
    }

    /// Filters the requested modules and their dependencies from the image. Errors about missing modules are ignored
    /// here; loading reports them.
    fn of_image_that(&self, holds: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let with_needs = |name: &String| self.loader.of_image(name).unwrap_or_else(|_| vec![name.clone()]);
        self.options.modules.iter().flat_map(with_needs).filter(|name| holds(name)).collect()
    }

    /// Whether the loaded module belongs neither to the image nor to the host. Without the host's tree this is unknown,
    /// and the answer is false.
    fn is_left(&self, loaded: &Loaded, name: &str) -> bool {
        let (paths, host) = (&self.node.paths, self.taken_out.host.index);
        let is_others = !Loaded::is_of_kernel(paths, name) && !self.loader.is_ours(loaded, name);
        let there = loaded.identity(paths, name).filter(|_| is_others && !host.is_empty());
        let of_host = |file: &ModuleFile| file.info().ok()?.identity();
        there.is_some()
            && host.file(name).is_none_or(|file| of_host(file).is_some_and(|id| Some(id) != there))
    }

    /// Waits until all conditions hold.
    fn wait(&self, conditions: &[Condition], what_for: &str, ending: &mut dyn Ending) -> Result<(), Error> {
        let Self { node, .. } = self;
        for condition in conditions {
            if !condition.holds(&node.paths) {
                node.log.step(format!("waiting for {condition}, to {what_for}"));
            }
            while !condition.holds(&node.paths) {
                ending.go_on()?;
                node.kernel.pause(BETWEEN_LOOKS);
            }
        }
        Ok(())
    }

    /// Runs the program; its output goes to the container's log. If the container is asked to end, the program and its
    /// children are killed.
    fn run_after(&self, program: &str, ending: &mut dyn Ending) -> Result<(), Error> {
        let failed = |error: io::Error| {
            Error::new(format!("run {program}: {error}"), "the image must contain it at this path")
        };
        let mut command = Command::new(program);
        let mut child = command.args(&self.options.modules).process_group(0).spawn().map_err(failed)?;
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status;
            }
            if let Err(error) = ending.go_on() {
                let killed = kill_process_group(Pid::from_child(&child), Signal::KILL);
                killed.map_err(io::Error::from).and_then(|()| child.wait()).map_err(failed)?;
                return Err(error);
            }
            self.node.kernel.pause(BETWEEN_LOOKS);
        };
        if status.success() {
            self.node.log.step(format!("{program} succeeded"));
            return Ok(());
        }
        Err(Error::new(format!("{program} failed: {status}"), "its output is in this log"))
    }

    fn firmware(&self) -> Firmware<'_> {
        Firmware { host_path: &self.firmware_path, part: "" }
    }

    fn blacklist(&self) -> Blacklist<'_> {
        let name = format!("farrier-{}.conf", self.options.name());
        Blacklist { node: self.node, name, link: None, modules: self.options.replace.clone() }
    }
}
