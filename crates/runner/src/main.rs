//! `farrier-runner`: runs the steps of a build where farrier put their root file system. `sandbox` makes namespaces of its own
//! for that; farrier starts it, and talks to it as [`runner::wire`] says.

mod canary;
mod copy;
mod filter;
mod glob;
mod messages;
mod payload;
mod root;
mod sandbox;
mod steps;
mod watch;

use std::process::ExitCode;

use messages::Messages;
use runner::wire::{Message, Outcome};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let messages = Messages::default();
    let outcome = match words.as_slice() {
        ["sandbox"] => sandbox::enter(&messages),
        ["init", scratch, lowers @ ..] => sandbox::init(&messages, scratch, lowers).map(Some),
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
        Err(error) => messages.send(&Message::End(Outcome::Broken { why: error.to_string() })),
    };
    // Whoever is gone hears nothing.
    if last.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
