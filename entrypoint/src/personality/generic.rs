//! `generic MODULE...`: loads modules, says that they are there, and unloads them at the end.

use crate::{
    files,
    lock::Lock,
    modules::{error::ModuleError, index::Index, kernel_name, load::Loader, parameters::Parameters, unload},
    node::Node,
    personality::Error,
    signals::Ending,
};

/// What the arguments after `generic` say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// In the order in which they are loaded.
    modules: Vec<String>,
    /// They stay loaded when the container ends.
    keep: bool,
}

impl Options {
    /// `[--keep] MODULE...`; what else there is, is none of it.
    pub(crate) fn parse(arguments: &[&str]) -> Option<Self> {
        let mut options = Self { modules: Vec::new(), keep: false };
        for argument in arguments {
            match *argument {
                "--keep" => options.keep = true,
                name if is_module_name(name) => options.modules.push(kernel_name(name)),
                _ => return None,
            }
        }
        (!options.modules.is_empty()).then_some(options)
    }

    /// The first module names the container: `/run/farrier/<module>.ready`, and `.lock` beside it.
    fn file(&self, ending: &str) -> String {
        format!("/run/farrier/{}.{ending}", self.modules.first().map_or("none", String::as_str))
    }
}

fn is_module_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphanumeric())
        && name.chars().all(|character| character.is_ascii_alphanumeric() || "_-".contains(character))
}

/// From start to stop.
pub(crate) fn run(node: &Node<'_>, options: &Options, ending: &mut dyn Ending) -> Result<(), Error> {
    let _lock = Lock::take(node, &options.file("lock"))?;
    let ready = options.file("ready");
    files::clear_ready(node, &ready)?;
    let mut loaded = Vec::new();
    match start(node, options, ending, &mut loaded) {
        Ok(()) => {
            files::set_ready(node, &ready)?;
            let signal = ending.wait();
            node.log.step(format!("{signal}: stopping"));
            files::clear_ready(node, &ready)?;
            if options.keep {
                node.log.step("the modules stay loaded (--keep)");
                return Ok(());
            }
            // Those that were there before us too: a container that was killed left them.
            Ok(stop(node, &options.modules, &loaded)?)
        }
        Err(error) => {
            if let Err(second) = stop(node, &[], &loaded) {
                node.log.warn(second);
            }
            Err(error)
        }
    }
}

fn start(
    node: &Node<'_>,
    options: &Options,
    ending: &mut dyn Ending,
    loaded: &mut Vec<String>,
) -> Result<(), Error> {
    let index = Index::of_node(node)?;
    let parameters = Parameters::read(&node.paths);
    let from = Loader { node, index: &index, parameters: &parameters };
    for name in &options.modules {
        if let Some(signal) = ending.asked() {
            return Err(Error::Ended { signal });
        }
        let new = from.load(name)?;
        if !new.contains(name) {
            node.log.step(format!("module {name} is there already"));
        }
        loaded.extend(new);
    }
    Ok(())
}

/// The modules that were asked for, last first, and then what was loaded for their sake, where nothing else uses it.
fn stop(node: &Node<'_>, modules: &[String], loaded: &[String]) -> Result<(), ModuleError> {
    for name in modules.iter().rev() {
        unload::unload(node, name)?;
    }
    for name in loaded.iter().rev() {
        match unload::unload(node, name) {
            Err(ModuleError::Held { .. } | ModuleError::InUse { .. }) => {
                node.log.step(format!("module {name} stays: something else uses it"));
            }
            other => {
                other?;
            }
        }
    }
    Ok(())
}
