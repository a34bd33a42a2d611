//! The container's side of a swap by the guard: the request, and the wait for its end.

use std::{
    fs::{self, DirBuilder},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use swap_guard::{
    journal::{Failure, Journal, Phase},
    request::{Module, NEW, OLD, Request},
};

use super::{
    JOURNAL, LOCK, LOG, REQUEST, VARIABLE, failure_record, has_guard, is_open, lock_request, remove_modules,
};
use crate::{
    error::Error,
    files::{self, entries, text},
    modules::{
        load::{Loader, Step},
        loaded::Loaded,
    },
    node::{Node, is_plain_path},
    signals::Signals,
};

const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Number of polls without a running guard before the container gives up. systemd restarts a killed guard after one
/// second.
const MAX_POLLS_WITHOUT_GUARD: u32 = 300;

/// The guard of the node, as a driver container uses it.
pub(crate) struct GuardClient<'a> {
    pub(crate) node: &'a Node<'a>,
    /// The guard's directory.
    pub(crate) directory: &'a str,
    /// Name of the container's requests.
    pub(crate) name: &'a str,
}

/// A swap to request.
pub(crate) struct Swap<'a> {
    /// Digest of the new modules and their parameters.
    pub(crate) digest: String,
    pub(crate) limit: Duration,
    /// Modules to unload, users first.
    pub(crate) unload: &'a [String],
    /// Loader and names of the new modules. Those in the second list are optional.
    pub(crate) new_modules: (&'a Loader<'a>, Vec<String>, Vec<String>),
    /// Loader and names of the modules that are restored if the swap fails.
    pub(crate) old_modules: (&'a Loader<'a>, Vec<String>),
}

/// Reads the guard's directory from the environment; `None` without one. The error names the variable.
pub(crate) fn read_directory(variable: impl Fn(&str) -> Option<String>) -> Result<Option<String>, String> {
    match variable(VARIABLE).map(|path| path.trim().to_owned()).filter(|path| !path.is_empty()) {
        Some(path) if !is_plain_path(&path) => {
            Err(format!("{VARIABLE} must be an absolute path without .., not {path}"))
        }
        path => Ok(path),
    }
}

impl GuardClient<'_> {
    /// Whether the guard has not yet finished a request of this container. A new request must wait, because it uses the
    /// same directory.
    pub(crate) fn is_busy(&self) -> bool {
        is_open(&self.at(""))
    }

    /// Fails if no guard has been installed, or if it would refuse the swap, because an earlier one with this digest failed.
    pub(crate) fn check(&self, digest: String) -> Result<(), Error> {
        self.check_installed()?;
        failure_record(self.node, self.directory, self.name, digest).check()
    }

    fn check_installed(&self) -> Result<(), Error> {
        let Self { node, directory, .. } = self;
        let lock = format!("{directory}/{LOCK}");
        if node.paths.at(&lock).exists() {
            return Ok(());
        }
        Err(not_begun(
            format!("{VARIABLE} names {directory}, where no guard has been: {lock} is missing"),
            "install the guard on the node, and mount its directory in this container at the same path",
        ))
    }

    /// Waits for the end of a swap that a killed container requested.
    pub(crate) fn await_earlier(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        if !self.is_busy() {
            return Ok(());
        }
        self.node.log.step("an earlier container asked the guard for a swap: waiting for its end");
        match self.follow(signals) {
            Err(error @ Error::Interrupted(_)) => Err(error),
            // The loaded modules show the outcome, so a failure is only logged.
            result => {
                self.node.log.warn_of(result);
                Ok(())
            }
        }
    }

    /// Requests a swap, and waits for its end. Fails if the guard refused or undid the swap.
    pub(crate) fn swap(&self, swap: &Swap<'_>, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, directory, name } = self;
        self.check_installed()?;
        let new = node.paths.at(&format!("{directory}/{name}.new"));
        let request = self.at("");
        let write = Error::on("write", format!("{directory}/{name}.new"));
        for old in [&new, &request] {
            files::if_exists(fs::remove_dir_all(old)).map_err(&write)?;
        }
        let filled = self.write_request(&new, swap);
        let filled = filled.and_then(|()| fs::rename(&new, &request).map_err(&write));
        // The modules' files take memory, and a lack of memory may be the cause.
        filled.inspect_err(|_| drop(fs::remove_dir_all(&new))).map_err(as_transient)?;
        node.log.step(format!("asked the guard for the swap: {directory}/{name}"));
        self.follow(signals)
    }

    /// Writes the modules' files, and then the request.
    fn write_request(&self, directory: &Path, swap: &Swap<'_>) -> Result<(), Error> {
        let Swap { digest, limit, unload, new_modules, old_modules } = swap;
        let current = Loaded::read(&self.node.paths)?;
        let staying = current.without(unload);
        let expected =
            unload.iter().filter_map(|name| Some((name.clone(), current.identity(&self.node.paths, name)?)));
        let (loader, names, optional) = new_modules;
        let all: Vec<String> = names.iter().chain(optional).cloned().collect();
        let required = plan(loader, names, &staying)?;
        let is_optional =
            |step: &Step| step.optional || !required.iter().any(|other| other.name == step.name);
        let load = self.write_modules(&directory.join(NEW), &plan(loader, &all, &staying)?, |step| {
            let parameters = Some(loader.parameters.of(&step.name)).filter(|text| !text.is_empty());
            (is_optional(step), parameters.into_iter().collect())
        })?;
        let (loader, names) = old_modules;
        let steps = plan(loader, names, &staying)?;
        let restore = self.write_modules(&directory.join(OLD), &steps, |step| {
            (step.optional, self.restore_parameters(loader, &step.name))
        })?;
        let request = Request {
            digest: digest.clone(),
            limit: *limit,
            unload: unload.to_vec(),
            expect: expected.collect(),
            load,
            restore,
        };
        let path = directory.join(REQUEST);
        fs::write(&path, request.to_text()).map_err(Error::on("write", path.to_string_lossy()))
    }

    /// Writes uncompressed modules into a new directory that only root can read.
    fn write_modules(
        &self,
        directory: &Path,
        steps: &[Step],
        options: impl Fn(&Step) -> (bool, Vec<String>),
    ) -> Result<Vec<Module>, Error> {
        let create = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        create.map_err(Error::on("create", directory.to_string_lossy()))?;
        let mut modules = Vec::new();
        for step in steps {
            let (optional, parameters) = options(step);
            let module = Module { name: step.name.clone(), optional, parameters };
            let source = self.node.paths.container_path(&step.file.path);
            let bytes = step.file.read().map_err(Error::on("read", source))?;
            let path = directory.join(format!("{}.ko", step.name));
            fs::write(&path, bytes).map_err(Error::on("write", path.to_string_lossy()))?;
            modules.push(module);
        }
        Ok(modules)
    }

    /// Parameter strings to try when a module is restored, in this order: the configured parameters with the current
    /// values, the configured parameters, no parameters. A module may refuse a value that it reports.
    fn restore_parameters(&self, loader: &Loader<'_>, name: &str) -> Vec<String> {
        let configured = loader.parameters.of(name);
        let directory = self.node.paths.at(&format!("/sys/module/{name}/parameters"));
        let current = entries(directory).into_iter().filter_map(|path| {
            let value = text(&path)?;
            let is_plain = !value.is_empty() && value != "(null)" && !value.contains(['"', '\n']);
            let value = if value.contains(' ') { format!("\"{value}\"") } else { value };
            is_plain.then(|| format!("{}={value}", files::name_of(&path)))
        });
        let configured_first = Some(configured.clone()).filter(|text| !text.is_empty());
        let all: Vec<String> = configured_first.into_iter().chain(current).collect();
        let mut attempts = vec![all.join(" "), configured, String::new()];
        attempts.dedup();
        attempts
    }

    /// Logs the guard's messages until the swap has ended. At a signal, withdraws a request that no guard has begun.
    fn follow(&self, signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, directory, .. } = self;
        let (mut logged, mut polls_without_guard) = (0, 0);
        loop {
            // Read the journal after this check: the guard records the last phase before it finishes the request.
            let is_finished = !self.is_busy();
            let journal = self.journal();
            self.log_messages(&mut logged);
            let is_over = is_finished || polls_without_guard > MAX_POLLS_WITHOUT_GUARD;
            if let Some(phase) = journal.phase().filter(|phase| phase.is_final() && is_over) {
                self.log_messages(&mut logged);
                return result_of(phase, &journal);
            }
            if is_finished {
                return Err(not_begun(
                    "the guard could not begin the swap, and nothing was touched",
                    "journalctl --unit farrier-swap-guard on the node has the reason: /run may be full",
                ));
            }
            if let Err(error) = signals.check() {
                self.withdraw();
                return Err(error);
            }
            polls_without_guard =
                if has_guard(&node.paths.at(directory)) { 0 } else { polls_without_guard + 1 };
            if polls_without_guard > 0 && polls_without_guard % MAX_POLLS_WITHOUT_GUARD == 0 {
                node.log.warn(format!(
                    "no guard works on {directory}: waiting until the DaemonSet of the guard starts it"
                ));
            }
            if polls_without_guard > MAX_POLLS_WITHOUT_GUARD && self.withdraw() {
                return Err(not_begun(
                    format!("no guard serves {directory}"),
                    "systemctl status farrier-swap-guard on the node shows why; the DaemonSet of the guard starts it again",
                ));
            }
            node.kernel.pause(POLL_INTERVAL);
        }
    }

    fn log_messages(&self, logged: &mut usize) {
        let text = fs::read_to_string(self.at(LOG)).unwrap_or_default();
        let end = text.rfind('\n').map_or(0, |end| end + 1);
        for line in text.get(*logged..end).unwrap_or_default().lines() {
            // Each line of the guard's log begins with a time, which this container's log adds as well.
            let message = line.split_once(' ').map_or(line, |(_, message)| message);
            self.node.log.step(format!("guard: {message}"));
        }
        *logged = end.max(*logged);
    }

    /// Withdraws a request that no guard has begun. Returns whether the request was withdrawn.
    pub(super) fn withdraw(&self) -> bool {
        let lock = lock_request(&self.at(""));
        let is_withdrawn =
            lock.is_some() && self.journal().phase().is_none() && fs::remove_file(self.at(REQUEST)).is_ok();
        if is_withdrawn {
            self.node.log.warn_of(remove_modules(&self.at("")));
        }
        is_withdrawn
    }

    fn journal(&self) -> Journal {
        Journal::parse(&fs::read(self.at(JOURNAL)).unwrap_or_default())
    }

    fn at(&self, file: &str) -> PathBuf {
        self.node.paths.at(&format!("{}/{}", self.directory, self.name)).join(file)
    }
}

fn result_of(phase: Phase, journal: &Journal) -> Result<(), Error> {
    let reason =
        |failure: Option<&Failure>| failure.map(|failure| failure.reason.clone()).unwrap_or_default();
    let (cause, state) = (reason(journal.failure()), reason(journal.last_failure()));
    let (state, message) = match phase {
        Phase::Committed => return Ok(()),
        Phase::Refused => (None, format!("the guard refused the swap: {cause}")),
        Phase::PartlyUndone => {
            (Some(format!("the guard could not undo the swap: {state}")), format!("the swap failed: {cause}"))
        }
        Phase::Lost => (
            None,
            format!(
                "the node was cut off even after the guard undid the swap: {state}; the swap failed: {cause}"
            ),
        ),
        _ => (None, format!("the guard undid the swap: {cause}")),
    };
    let may_succeed = phase == Phase::Undone && journal.failure().is_some_and(|failure| failure.transient);
    // After a refusal, nothing was tried.
    let transient = may_succeed || phase == Phase::Refused;
    let hint = "the guard's messages are above, and on the node: journalctl --unit farrier-swap-guard";
    Err(Error::Guard { state, message, hint, transient })
}

/// Marks an I/O error as transient, because it says nothing about the image.
fn as_transient(error: Error) -> Error {
    match error {
        Error::Io { .. } => not_begun(
            error.to_string(),
            "the swap was not begun: make room in /run, or check the volumes of the pod",
        ),
        error => error,
    }
}

/// Error of a swap that was not begun: the same swap may succeed later.
fn not_begun(message: impl Into<String>, hint: &'static str) -> Error {
    Error::Guard { state: None, message: message.into(), hint, transient: true }
}

/// Plans the load of several modules, each once.
fn plan(loader: &Loader<'_>, names: &[String], staying: &Loaded) -> Result<Vec<Step>, Error> {
    let mut steps: Vec<Step> = Vec::new();
    for name in names {
        for step in loader.plan(name, staying)? {
            if !steps.iter().any(|other| other.name == step.name) {
                steps.push(step);
            }
        }
    }
    Ok(steps)
}
