//! Programs of the image's author that run before and after the drivers are replaced. Their arguments are the names of the
//! affected interfaces.

use super::sriov;
use crate::{
    error::Error,
    files::{self, link_name, name_of},
    forecast,
    node::Node,
    program,
    signals::Signals,
};

pub(super) struct Hooks<'a> {
    pub(super) node: &'a Node<'a>,
    /// Programs that run before the replacement and after.
    pub(super) programs: &'a [Option<String>; 2],
    /// File with the interfaces and their devices. If this container is killed, the next one runs the second program.
    pub(super) file: String,
}

impl Hooks<'_> {
    /// Runs the program before the modules are unloaded. After a failure, the caller must not unload them.
    pub(super) fn run_before(&self, modules: &[String], signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, programs: [before, _], file } = self;
        let interfaces = forecast::interfaces_of(node, modules);
        let lines = interfaces.iter().map(|interface| {
            let device = link_name(interface.join("device")).unwrap_or_default();
            format!("{} {device}", name_of(interface))
        });
        // Keep the lines of interfaces that are missing because a killed container unloaded their driver.
        let missing = self.missing();
        let all: Vec<String> = missing.iter().cloned().chain(lines).collect();
        files::write(node, file, &all.join("\n"))?;
        let Some(program) = before else { return Ok(()) };
        let names: Vec<String> = interfaces.iter().map(|interface| name_of(interface)).collect();
        let result = program::run(node, program, &names, signals);
        if result.is_err() {
            self.keep(&missing)?;
        }
        result
    }

    /// Runs the program after the drivers were replaced, or after the host's drivers were restored. Does nothing without the
    /// file that [`run_before`](Self::run_before) writes. Keeps only the lines in `kept`, for the next container.
    pub(super) fn run_after(&self, kept: &[String], signals: &mut dyn Signals) -> Result<(), Error> {
        let Self { node, programs: [_, after], file } = self;
        let Some(text) = files::text(node.paths.at(file)) else { return Ok(()) };
        if let Some(program) = after {
            let names: Vec<String> = text.lines().filter_map(|line| self.current_name(line)).collect();
            program::run(node, program, &names, signals)?;
        }
        self.keep(kept)
    }

    /// Lines of interfaces that do not exist now.
    pub(super) fn missing(&self) -> Vec<String> {
        let mut lines = files::lines(self.node, &self.file);
        lines.retain(|line| self.current_name(line).is_none());
        lines
    }

    /// Reduces the file to these lines. Removes the file if there are none.
    fn keep(&self, lines: &[String]) -> Result<(), Error> {
        if lines.is_empty() {
            return files::remove(self.node, &self.file).map(|_| ());
        }
        files::write(self.node, &self.file, &lines.join("\n"))
    }

    /// Name that the interface of a line in the file has now; `None` if it does not exist.
    fn current_name(&self, line: &str) -> Option<String> {
        let (name, device) = line.split_once(' ').unwrap_or((line, ""));
        let interface = sriov::await_interface(self.node, &format!("pci/{device}"), 0);
        let interface = interface.unwrap_or_else(|| self.node.paths.at("/sys/class/net").join(name));
        interface.exists().then(|| name_of(&interface))
    }
}
