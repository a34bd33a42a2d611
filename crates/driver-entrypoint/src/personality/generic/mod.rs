//! `generic MODULE...`: loads modules, in the place of the host's where it is asked to, says that they are there, and
//! unloads them at the end.

mod options;

use std::{process::Command, time::Duration};

use options::Condition;
pub(crate) use options::{Options, USAGE};

use crate::{
    blacklist::Blacklist,
    error::Error,
    files,
    firmware::Firmware,
    forecast,
    lock::Lock,
    modules::{index::Index, load::Loader, loaded::Loaded, parameters::Parameters, unload},
    node::Node,
    signals::Ending,
    taken_out::TakenOut,
};

/// How often the node is looked at while something is waited for.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// From start to stop.
pub(crate) fn run(node: &Node<'_>, options: &Options, ending: &mut dyn Ending) -> Result<(), Error> {
    let options = &options.complete(node)?;
    let _lock = Lock::take(node, &options.file("lock"))?;
    let ready = options.file("ready");
    files::clear_ready(node, &ready)?;
    let (index, host) = (Index::of_node(node)?, Index::of_host(node)?);
    let parameters = Parameters::read(&node.paths);
    let container = Container {
        node,
        options,
        loader: Loader { node, index: &index, parameters: &parameters },
        taken_out: TakenOut {
            host: Loader { node, index: &host, parameters: &parameters },
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
            // Those that were there before us too: a container that was killed left them.
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
            let files = self.firmware().provide(node)?;
            node.log.step(format!("firmware: {files} file(s) copied to {}", self.firmware_path));
            self.firmware().set_search_path(node)?;
        }
        // A container that was killed may have left it.
        self.blacklist().remove()?;
        let leaving = self.leaving()?;
        if leaving.is_empty() {
            self.load(ending, loaded)?;
        } else {
            forecast::announce(node, &leaving)?;
            self.taken_out.add(&self.of_the_host(&Loaded::read(&node.paths)?, &leaving)?)?;
            self.blacklist().write()?;
            let replaced = unload::unload_all(node, &leaving).and_then(|_| self.load(ending, loaded));
            self.blacklist().remove()?;
            replaced?;
        }
        if let Some(program) = &options.then {
            self.run_after(program)?;
        }
        self.wait(&options.ready_when, "get ready", ending)
    }

    /// The modules that were asked for, last first, and then what was loaded for their sake, where nothing else uses it. What
    /// made way for them comes back.
    fn stop(&self, modules: &[String], loaded: &[String]) -> Result<(), Error> {
        let node = self.node;
        // A dkms.conf may name what uses a module before it.
        let leaving = Loaded::read(&node.paths)?.with_holders(modules.iter().rev());
        for name in leaving.iter().filter(|name| modules.contains(name)) {
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
        let (taken_out, there) = (self.taken_out.names(), Loaded::read(&node.paths)?);
        for name in &self.options.modules {
            if self.is_ours(&there, name)? {
                node.log.step(format!(
                    "module {name} of the image stays loaded: the host's do not come back yet"
                ));
                return Ok(());
            }
        }
        if !taken_out.is_empty() {
            node.log.step("putting back the host's modules");
            self.taken_out.load(&taken_out)?;
            self.taken_out.forget()?;
        }
        if self.options.firmware {
            self.firmware().restore_search_path(node)?;
        }
        Ok(())
    }

    fn load(&self, ending: &mut dyn Ending, loaded: &mut Vec<String>) -> Result<(), Error> {
        for name in &self.options.modules {
            ending.go_on()?;
            let new = self.loader.load(name)?;
            if !new.contains(name) {
                let ours = self.is_ours(&Loaded::read(&self.node.paths)?, name)?;
                let which =
                    if ours { "" } else { ", and is not the image's: --replace would take it away first" };
                self.node.log.step(format!("module {name} is there already{which}"));
            }
            loaded.extend(new);
        }
        Ok(())
    }

    /// What is unloaded first, in this order: the host's modules that make way, and the image's that use them, which a container
    /// that was killed left. What cannot go, and what cannot come, is found before anything is touched.
    fn leaving(&self) -> Result<Vec<String>, Error> {
        let Self { node, options, .. } = self;
        let loaded = Loaded::read(&node.paths)?;
        let order = loaded.with_holders(self.of_the_host(&loaded, &options.replace)?);
        for name in &order {
            if !options.replace.contains(name) && !options.modules.contains(name) {
                return Err(Error::new(
                    format!("module {name} uses what is to be replaced: {}", options.replace.join(", ")),
                    format!(
                        "add --replace {name}: it goes first, and comes back at the end; or unload it on the node"
                    ),
                ));
            }
            unload::check_users(node, name)?;
        }
        let staying = loaded.without(&order);
        for name in &options.modules {
            self.loader.plan(name, &staying)?;
        }
        Ok(order)
    }

    /// Without the image's.
    fn of_the_host(&self, loaded: &Loaded, names: &[String]) -> Result<Vec<String>, Error> {
        let mut theirs = Vec::new();
        for name in names {
            if !self.is_ours(loaded, name)? {
                theirs.push(name.clone());
            }
        }
        Ok(theirs)
    }

    /// Is the module that is loaded under this name the image's?
    fn is_ours(&self, loaded: &Loaded, name: &str) -> Result<bool, Error> {
        let Some(file) = self.loader.index.of_image(name) else { return Ok(false) };
        Ok(loaded.is(&self.node.paths, name, &file.info()?))
    }

    /// Until all of them hold.
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

    /// What it prints is in the container's log.
    fn run_after(&self, program: &str) -> Result<(), Error> {
        let status = Command::new(program).args(&self.options.modules).status();
        let status = status.map_err(|error| {
            Error::new(format!("run {program}: {error}"), "the image has to have it there")
        })?;
        if status.success() {
            self.node.log.step(format!("{program} is done"));
            return Ok(());
        }
        Err(Error::new(format!("{program} failed: {status}"), "what it printed is in this log"))
    }

    fn firmware(&self) -> Firmware<'_> {
        Firmware { host_path: &self.firmware_path, part: "" }
    }

    fn blacklist(&self) -> Blacklist<'_> {
        let name = format!("farrier-{}.conf", self.options.name());
        Blacklist { node: self.node, name, link: None, modules: self.options.replace.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt as _,
        panic::{AssertUnwindSafe, catch_unwind},
    };

    use rustix::io::Errno;

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
    fn without_a_name_they_are_those_of_the_conf() {
        let bench = bench();
        let error = live(&bench, &["--keep"], || {}).unwrap_err().to_string();
        assert_eq!(error, "no module is named, and the image has no modules.order for this kernel");
        let order = format!("/lib/modules/{}/modules.order", crate::testing::RELEASE);
        bench.file(&order, "updates/dkms/mst_pciconf.ko\nreadme\nupdates/dkms/mst_pci.ko\n");
        live(&bench, &[], || assert!(bench.at("/run/farrier/mst_pciconf.ready").exists())).unwrap();
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

    const REPLACE: [&str; 5] = ["--replace", "acme_net", "--replace", "acme", "acme"];

    /// In-tree modules, one of which uses the other, and an image that replaces the first.
    fn in_tree() -> Bench {
        let bench = Bench::new();
        bench.host_module("acme", "");
        bench.host_module("acme_net", "acme");
        bench.image_module("acme", "");
        bench.loaded_from_host(&["acme", "acme_net"]);
        fs::create_dir_all(bench.at("/host/run/modprobe.d")).unwrap();
        bench
    }

    fn is_as_before(bench: &Bench) {
        assert_eq!(bench.loaded(), ["host-acme", "host-acme_net"], "{}", bench.log());
        assert_eq!(files::entries(bench.at("/host/run/modprobe.d")), Vec::<std::path::PathBuf>::new());
        assert_eq!(bench.text("/run/farrier/acme.replaced"), None);
    }

    #[test]
    fn the_host_s_modules_make_way_and_come_back() {
        let bench = in_tree();
        live(&bench, &REPLACE, || assert_eq!(bench.loaded(), ["image-acme"])).unwrap();
        let calls = ["unload acme_net", "unload acme", "load acme of the image"];
        let back = ["unload acme", "load acme of the host", "load acme_net of the host"];
        assert_eq!(bench.calls(), [calls, back].concat());
        assert!(bench.log().contains("wrote /host/run/modprobe.d/farrier-acme.conf"), "{}", bench.log());
        is_as_before(&bench);
    }

    #[test]
    fn one_that_is_killed_at_any_step_is_followed_by_one_that_ends_as_it_began() {
        for takes_place in [false, true] {
            for step in 0.. {
                let bench = in_tree();
                bench.kernel.killed_at.set(Some((step, takes_place)));
                let first = catch_unwind(AssertUnwindSafe(|| live(&bench, &REPLACE, || {})));
                if first.is_ok() {
                    assert!(step > 4, "it was killed at each of its steps");
                    break;
                }
                bench.kernel.killed_at.set(None);
                live(&bench, &REPLACE, || assert_eq!(bench.loaded(), ["image-acme"])).unwrap();
                is_as_before(&bench);
            }
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_found_before_anything_is_touched() {
        let bench = in_tree();
        let refused = |arguments: &[&str]| {
            let error = live(&bench, arguments, || panic!("it became ready")).unwrap_err();
            assert_eq!(bench.calls(), Vec::<String>::new());
            is_as_before(&bench);
            error
        };
        let error = refused(&["--replace", "acme", "acme"]);
        assert_eq!(error.to_string(), "module acme_net uses what is to be replaced: acme");
        assert!(error.hint().starts_with("add --replace acme_net"), "{}", error.hint());
        let error = refused(&["--replace", "acme_net", "--replace", "acme", "acme", "absent"]);
        assert!(error.to_string().starts_with("module absent is not there for kernel"), "{error}");
    }

    #[test]
    fn what_the_kernel_refuses_is_undone() {
        let bench = in_tree();
        bench.image_module("acme_more", "acme");
        bench.kernel.refuses.borrow_mut().insert("acme_more".to_owned(), Errno::NOEXEC);
        live(&bench, &[&REPLACE[..], &["acme_more"]].concat(), || panic!("it became ready")).unwrap_err();
        is_as_before(&bench);
    }

    #[test]
    fn what_went_before_one_that_stays_comes_back() {
        let bench = in_tree();
        // No process that this container sees: only the kernel knows.
        bench.kernel.users.borrow_mut().insert("acme".to_owned(), 1);
        let error = live(&bench, &REPLACE, || panic!("it became ready")).unwrap_err();
        assert!(error.to_string().starts_with("unload acme: 1 reference(s)"), "{error}");
        assert_eq!(bench.calls(), ["unload acme_net", "load acme_net of the host"]);
        is_as_before(&bench);
    }

    #[test]
    fn the_host_s_modules_are_not_forgotten_while_the_image_s_stay() {
        let bench = in_tree();
        live(&bench, &[&["--keep"], &REPLACE[..]].concat(), || {}).unwrap();
        assert_eq!(bench.loaded(), ["image-acme"]);
        live(&bench, &[&REPLACE[..], &["absent"]].concat(), || panic!("it became ready")).unwrap_err();
        assert_eq!(bench.loaded(), ["image-acme"], "{}", bench.log());
        live(&bench, &REPLACE, || {}).unwrap();
        is_as_before(&bench);
    }

    #[test]
    fn a_module_of_another_build_is_told() {
        let bench = in_tree();
        live(&bench, &["--keep", "acme"], || {}).unwrap();
        let expected =
            "module acme is there already, and is not the image's: --replace would take it away first";
        assert!(bench.log().contains(expected), "{}", bench.log());
    }

    #[test]
    fn firmware_is_there_while_the_container_runs() {
        const SEARCH_PATH: &str = "/sys/module/firmware_class/parameters/path";
        let bench = in_tree();
        bench.image_module("mst", "");
        bench.file(SEARCH_PATH, "");
        bench.file("/lib/firmware/acme/card.fw", "firmware");
        live(&bench, &["--firmware", "mst"], || {
            let directory = bench.text(SEARCH_PATH).unwrap();
            assert_eq!(directory, "/run/farrier/mst.firmware");
            assert_eq!(bench.text(&format!("{directory}/acme/card.fw")).as_deref(), Some("firmware"));
        })
        .unwrap();
        assert_eq!(bench.text(SEARCH_PATH).as_deref(), Some("\0"));
    }

    /// A device that shows at the third look.
    struct Appears<'a>(&'a Bench, u32);

    impl Ending for Appears<'_> {
        fn asked(&mut self) -> Option<&'static str> {
            self.1 += 1;
            if self.1 == 3 {
                self.0.file("/sys/class/acme/state", "up\n");
            }
            (self.1 > 20).then_some("SIGTERM")
        }

        fn wait(&mut self) -> &'static str {
            "SIGTERM"
        }
    }

    #[test]
    fn a_device_is_waited_for() {
        let bench = bench();
        let start = |arguments: &[&str]| {
            run(&bench.node(), &Options::parse(arguments).unwrap(), &mut Appears(&bench, 0))
        };
        start(&["--wait-for", "/sys/class/acme", "--ready-when", "/sys/class/acme/state=up", "mst_pci"])
            .unwrap();
        assert!(bench.log().contains("waiting for /sys/class/acme, to load"), "{}", bench.log());
        let error = start(&["--ready-when", "/sys/class/acme/state=down", "mst_pci"]).unwrap_err();
        assert_eq!(error.to_string(), "SIGTERM came before the drivers were ready");
        assert_eq!(bench.loaded(), Vec::<String>::new());
    }

    #[test]
    fn a_program_runs_after_the_modules_are_loaded() {
        let bench = bench();
        let program = bench.at("/setup").to_str().unwrap().to_owned();
        bench.file("/setup", "#!/bin/sh\necho \"$@\" > \"$0.done\"; exit $(cat \"$0.code\")\n");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        bench.file("/setup.code", "0");
        live(&bench, &["--then", &program, "mst_pci", "mst_pciconf"], || {
            assert_eq!(bench.text("/setup.done").as_deref(), Some("mst_pci mst_pciconf\n"));
        })
        .unwrap();
        bench.file("/setup.code", "3");
        let error = live(&bench, &["--then", &program, "mst_pci"], || panic!("it became ready")).unwrap_err();
        assert_eq!(error.to_string(), format!("{program} failed: exit status: 3"));
        assert_eq!(bench.loaded(), Vec::<String>::new());
    }
}
