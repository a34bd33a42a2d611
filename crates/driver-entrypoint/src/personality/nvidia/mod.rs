//! `nvidia-driver`: the GPU driver's container, and nvidia-peermem's.

use std::process::ExitCode;

use crate::{
    modules::index::{Index, Origin},
    node::Node,
    personality::{self, Error, peer_memory::PeerMemory, watch::Owner},
};

mod daemons;
mod driver;
mod firmware;
mod init;
mod options;
mod parameters;
mod selinux;
pub(crate) mod state;

pub(crate) use driver::index;
pub(crate) use options::Settings;
use options::{Command, USAGE};

/// Runs `nvidia-driver` with the words after it, or says how it is to be used.
pub(crate) fn main(
    arguments: &[&str],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<ExitCode, String> {
    let command = Command::parse(arguments).map_err(|error| format!("{error}\n{USAGE}"))?;
    let settings = Settings::from(variable);
    Ok(personality::run(|node, signals| match &command {
        Command::Init => init::run(node, &settings, signals),
        Command::Update { kernel } => update(node, kernel.as_deref()),
        Command::ReloadPeermem => {
            let peer_memory = PeerMemory {
                module: "nvidia_peermem",
                owner: Owner::Others,
                ready_file: None,
                host_ofed: settings.host_ofed,
            };
            parameters::check(node, &["nvidia-peermem"])?;
            // The GPU driver's container unloads it, in the same pod.
            peer_memory.run(node, signals)
        }
        Command::ProbePeermem => probe(node),
    }))
}

/// Other images compile the driver for a kernel that was just installed. Here that is farrier's work, and done
/// before the kernel boots; all that is left to say is whether this image has it.
fn update(node: &Node<'_>, kernel: Option<&str>) -> Result<(), Error> {
    let release = kernel.map_or_else(|| node.kernel.release(), str::to_owned);
    let index = Index::read(&release, &[(Origin::Image, node.paths.image_modules(&release))])?;
    if index.find("nvidia").is_some() {
        node.log.step(format!("this image has the NVIDIA driver for kernel {release}: nothing to do"));
        return Ok(());
    }
    Err(Error::Precondition {
        message: format!("this image has no NVIDIA driver for kernel {release}, and compiles none"),
        hint: format!(
            "announce kernel {release} to farrier, which builds its image: farrier status shows it"
        ),
    })
}

fn probe(node: &Node<'_>) -> Result<(), Error> {
    match state::probe(node)? {
        state::Probe::Loaded => Ok(()),
        state::Probe::WithoutOfed => {
            node.log.step("OFED is not loaded: nothing to probe");
            Ok(())
        }
        state::Probe::Missing => Err(Error::Precondition {
            message: "nvidia_peermem is not loaded, and OFED is".to_owned(),
            hint: "the log of nvidia-peermem-ctr says why".to_owned(),
        }),
    }
}
