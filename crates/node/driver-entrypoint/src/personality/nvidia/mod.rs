//! `nvidia-driver`: the containers of the GPU driver and of nvidia-peermem.

use std::{env, process::ExitCode};

use crate::{
    error::Error,
    module_file::Origin,
    modules::{index::Index, loaded::Loaded},
    node::Node,
    personality,
    signals::Signals,
};

pub(crate) mod companion;
mod daemons;
mod driver;
mod init;
mod labels;
mod options;
pub(crate) mod parameters;
mod state;
pub(crate) mod toolkit;
mod watch;

use companion::{Companion, Ofed};
use options::{Command, Settings, USAGE};
use watch::Owner;

/// Runs `nvidia-driver` with its arguments; the error contains the usage text.
pub(crate) fn main(
    arguments: &[&str],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<ExitCode, String> {
    let command = Command::parse(arguments).map_err(|error| format!("{error}\n{USAGE}"))?;
    let fabric_fields = options::fabric_fields(env::vars_os());
    let settings = Settings { fabric_fields, ..Settings::from(variable) };
    Ok(personality::run_with_message(|node, signals| run(node, &command, &settings, signals)))
}

/// Runs a command. The operator runs the probe in a running container, whose termination message is for the container's own error.
fn run(
    node: &Node<'_>,
    command: &Command,
    settings: &Settings,
    signals: &mut dyn Signals,
) -> Result<(), Error> {
    let result = match command {
        Command::Init => init::run(node, settings, signals),
        Command::Update(kernel) => update(node, kernel.as_deref()),
        Command::ReloadPeermem => {
            // The GPU driver's container, in the same pod, unloads the module.
            let (module, owner) = ("nvidia_peermem", Owner::DriverContainers);
            let ofed = Ofed::of(settings.host_ofed);
            let peer_memory = Companion { module, owner, ready_file: None, ofed };
            parameters::check(node, &["nvidia-peermem"]).and_then(|()| peer_memory.run(node, signals))
        }
        Command::ProbePeermem => return probe(node),
    };
    result.inspect_err(|error| personality::write_termination_message(node, error))
}

/// Reports whether this image has the driver for a kernel. Other images compile the driver for a newly installed kernel
/// here; farrier does that before the kernel boots.
fn update(node: &Node<'_>, kernel: Option<&str>) -> Result<(), Error> {
    let release = kernel.map_or_else(|| node.kernel.release(), str::to_owned);
    let index = Index::read(&release, &[(Origin::Image, node.paths.image_modules(&release))])?;
    if index.has("nvidia") {
        node.log.step(format!("this image has the NVIDIA driver for kernel {release}: nothing to do"));
        return Ok(());
    }
    Err(Error::new(
        format!("this image has no NVIDIA driver for kernel {release}, and compiles none"),
        format!("announce kernel {release} to farrier, which builds its image: farrier status shows it"),
    ))
}

/// Implements `probe_nvidia_peermem`: fails if OFED is loaded and nvidia-peermem is not. Without OFED the probe
/// succeeds, so that the container is not restarted.
fn probe(node: &Node<'_>) -> Result<(), Error> {
    let loaded = Loaded::read(&node.paths)?;
    if !loaded.contains("mlx5_core") {
        node.log.step("OFED is not loaded: nothing to probe");
    } else if !loaded.contains("nvidia_peermem") {
        return Err(Error::new(
            "nvidia_peermem is not loaded, and OFED is",
            "the log of nvidia-peermem-ctr says why",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, EndsNow};

    #[test]
    fn the_probe_leaves_the_termination_message_to_the_container() {
        let bench = Bench::new();
        bench.set_loaded_modules(&["mlx5_core"]);
        bench.write(personality::TERMINATION_MESSAGE, "");
        let fails = |command| {
            run(&bench.node(), &command, &Settings::default(), &mut EndsNow).unwrap_err();
            bench.read(personality::TERMINATION_MESSAGE).unwrap()
        };
        assert_eq!(fails(Command::ProbePeermem), "");
        assert!(fails(Command::Update(None)).starts_with("this image has no NVIDIA driver for kernel "));
    }

    #[test]
    fn the_probe_fails_only_where_ofed_is_and_peer_memory_is_not() {
        let probe = |modules: &[&str]| {
            let bench = Bench::new();
            bench.set_loaded_modules(modules);
            let probed = probe(&bench.node()).map_err(|error| error.to_string());
            (probed, bench.log())
        };
        let away = (Ok(()), "INFO  OFED is not loaded: nothing to probe".to_owned());
        assert_eq!(probe(&[]), away);
        assert_eq!(probe(&["nvidia_peermem"]), away);
        let missing = Err("nvidia_peermem is not loaded, and OFED is".to_owned());
        assert_eq!(probe(&["mlx5_core"]), (missing, String::new()));
        assert_eq!(probe(&["mlx5_core", "nvidia_peermem"]), (Ok(()), String::new()));
    }
}
