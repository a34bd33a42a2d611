//! `generic MODULE...`: loads modules, says that they are there, and unloads them at the end.

use crate::{
    error::Error,
    files,
    lock::Lock,
    modules::{index::Index, is_module_name, kernel_name, load::Loader, parameters::Parameters, unload},
    node::Node,
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
    /// `[--keep] MODULE...`; `None` where there is anything else.
    pub(crate) fn parse(arguments: &[&str]) -> Option<Self> {
        let mut options = Self { modules: Vec::new(), keep: false };
        for argument in arguments {
            match *argument {
                "--keep" => options.keep = true,
                name if is_module_name(name) && !name.starts_with(['-', '_']) => {
                    options.modules.push(kernel_name(name));
                }
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
            stop(node, &options.modules, &loaded)
        }
        Err(error) => {
            node.log.warn_of(stop(node, &[], &loaded));
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
        ending.go_on()?;
        let new = from.load(name)?;
        if !new.contains(name) {
            node.log.step(format!("module {name} is there already"));
        }
        loaded.extend(new);
    }
    Ok(())
}

/// The modules that were asked for, last first, and then what was loaded for their sake, where nothing else uses it.
fn stop(node: &Node<'_>, modules: &[String], loaded: &[String]) -> Result<(), Error> {
    for name in modules.iter().rev() {
        unload::unload(node, name)?;
    }
    for name in loaded.iter().rev() {
        match unload::unload(node, name) {
            Err(Error::Held { .. } | Error::InUse { .. }) => {
                node.log.step(format!("module {name} stays: something else uses it"));
            }
            other => {
                other?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, EndsWhenReady};

    fn bench() -> Bench {
        let bench = Bench::new();
        bench.host_module("firmware_class", "");
        bench.image_module("mst_pci", "firmware_class");
        bench.image_module("mst_pciconf", "mst_pci");
        bench
    }

    fn live(bench: &Bench, arguments: &[&str], mut look: impl FnMut()) -> Result<(), Error> {
        run(&bench.node(), &Options::parse(arguments).unwrap(), &mut EndsWhenReady(&mut look))
    }

    #[test]
    fn modules_are_loaded_until_the_end() {
        let bench = bench();
        live(&bench, &["mst-pciconf"], || {
            assert_eq!(bench.text("/run/farrier/mst_pciconf.ready").as_deref(), Some(""));
        })
        .unwrap();
        assert_eq!(bench.text("/run/farrier/mst_pciconf.ready"), None);
        assert_eq!(
            bench.calls(),
            [
                "load firmware_class of the host",
                "load mst_pci of the image",
                "load mst_pciconf of the image",
                "unload mst_pciconf",
                "unload mst_pci",
                "unload firmware_class",
            ]
        );
    }

    #[test]
    fn they_stay_where_asked_to() {
        let bench = bench();
        live(&bench, &["--keep", "mst_pci", "mst_pciconf"], || {}).unwrap();
        assert_eq!(bench.loaded().len(), 3);
        assert_eq!(bench.text("/run/farrier/mst_pci.ready"), None);
    }

    #[test]
    fn what_was_loaded_goes_when_a_later_one_does_not_come() {
        let bench = bench();
        let error = live(&bench, &["mst_pci", "absent"], || panic!("it became ready")).unwrap_err();
        assert!(error.to_string().starts_with("module absent is not there for kernel"), "{error}");
        assert_eq!(bench.loaded(), Vec::<String>::new());
    }

    #[test]
    fn a_killed_one_is_followed_by_one_that_ends_clean() {
        let bench = bench();
        live(&bench, &["--keep", "mst_pciconf"], || {}).unwrap();
        live(&bench, &["mst_pciconf"], || {}).unwrap();
        assert!(bench.log().contains("module mst_pciconf is there already"));
        assert_eq!(bench.loaded(), ["host-firmware_class", "image-mst_pci"], "it is unknown whose they are");
    }

    #[test]
    fn only_names_of_modules_are_taken() {
        for arguments in [&[][..], &["--keep"], &["../x"], &["--force", "x"], &["a b"]] {
            assert_eq!(Options::parse(arguments), None, "{arguments:?}");
        }
    }
}
