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
mod landlock_rules;
mod messages;
mod payload;
#[cfg_attr(feature = "breakable", path = "testing/restrictions.rs")]
mod restrictions;
mod root;
mod rooted;
mod sandbox;
mod steps;
mod sys;
mod usage;
mod usage_monitor;

use std::{io, process::ExitCode};

use messages::Messages;
use restrictions::Restrictions;
use runner::wire::{Message, Outcome};

fn exit_code(result: io::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
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
        ["map-owners", arguments @ ..] => return exit_code(sandbox::map_owners_helper(arguments)),
        ["sandbox", options @ ..] if let Some(enabled) = Restrictions::parse(options) => {
            sandbox::enter(&messages, &enabled)
        }
        ["init", scratch, lowers, options @ ..] if let Some(enabled) = Restrictions::parse(options) => {
            sandbox::init(&messages, scratch, lowers, &enabled).map(Some)
        }
        _ => {
            let _ = rustix::io::write(
                rustix::stdio::stderr(),
                b"farrier-runner is started by farrier: farrier-runner sandbox\n",
            );
            return ExitCode::from(2);
        }
    };
    let sent = match outcome {
        Ok(Some(outcome)) => messages.send(&Message::End(outcome)),
        Ok(None) => Ok(()),
        Err(error) => messages.send(&Message::End(Outcome::Broken(error.to_string()))),
    };
    // An error means that farrier no longer runs.
    if sent.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
