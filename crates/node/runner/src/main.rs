//! `farrier-runner` runs the steps of a build in the root file system that farrier prepared.
//!
//! - `sandbox` creates namespaces for the steps. farrier starts this command, and communicates with it as [`runner::wire`]
//!   describes.
//! - `pod` runs the steps in the container that was created for them.

mod canary;
mod copy;
mod filter;
mod glob;
mod in_pod;
mod landlock_wall;
mod messages;
mod payload;
mod root;
mod rooted;
mod sandbox;
mod steps;
mod sys;
mod usage;
mod usage_monitor;
#[cfg_attr(feature = "breakable", path = "testing/walls.rs")]
mod walls;

use std::{io, process::ExitCode};

use messages::Messages;
use runner::wire::{Message, Outcome};
use walls::Walls;

fn exit_code(ended: io::Result<()>) -> ExitCode {
    let Err(error) = ended else { return ExitCode::SUCCESS };
    let _ = rustix::io::write(rustix::stdio::stderr(), format!("farrier-runner: {error}\n").as_bytes());
    ExitCode::FAILURE
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let messages = Messages::default();
    let outcome = match arguments.as_slice() {
        ["pod"] => return exit_code(in_pod::run()),
        ["follow", offset] => return exit_code(in_pod::follow(offset)),
        ["map-owners", arguments @ ..] => return exit_code(sandbox::map_owners(arguments)),
        ["sandbox", options @ ..] if let Some(walls) = Walls::from_options(options) => {
            sandbox::enter(&messages, &walls)
        }
        ["init", scratch, lowers, options @ ..] if let Some(walls) = Walls::from_options(options) => {
            sandbox::init(&messages, scratch, lowers, &walls).map(Some)
        }
        _ => {
            let _ = rustix::io::write(
                rustix::stdio::stderr(),
                b"farrier-runner is started by farrier: farrier-runner sandbox\n",
            );
            return ExitCode::from(2);
        }
    };
    let last = match outcome {
        Ok(Some(outcome)) => messages.send(&Message::End(outcome)),
        Ok(None) => Ok(()),
        Err(error) => messages.send(&Message::End(Outcome::Broken(error.to_string()))),
    };
    // An error means that farrier no longer runs.
    if last.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
