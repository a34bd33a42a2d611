//! A build in a pod: the container's root is the build's, and the runner is its process 1. It has no network, so that what it
//! says is kept until farrier fetches it: `runner follow OFFSET`, which farrier has the API server run beside it, prints it from any
//! place on.
//!
//! The kept messages have no name that a step could open, and no step can make a socket to ask for them (`filter`). Both programs
//! have the user of the steps: neither is dumpable, so that no step gets at their memory and their descriptors.

use std::{
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::FileExt as _,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::Path,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use runner::{
    plan::Plan,
    pod::{BEAT, CONTEXT, HOLD, PLAN},
    wire::{Canary, Message, Outcome, decode},
};
use rustix::{
    fs::Mode,
    process::{DumpableBehavior, set_dumpable_behavior, umask},
};

use crate::{
    canary,
    messages::{Messages, StandardOutput, said},
    rooted::Root,
    sandbox::confine,
    steps::{self, Place},
    sys,
    walls::Walls,
};

/// The name of the socket, in the pod's network namespace.
const SOCKET: &[u8] = b"farrier-runner";
/// How long nothing may be taken of what is offered: whoever followed has gone.
const PATIENCE: Duration = Duration::from_mins(1);

/// Runs the build, and waits until its result was fetched: farrier ends the pod then.
pub fn run() -> io::Result<()> {
    sys::handle_no_signals();
    close_to_steps()?;
    umask(Mode::from_raw_mode(0o022));
    let kept = without_name(Path::new("/tmp/.farrier-messages"))?;
    let messages = Arc::new(Messages::kept(kept.try_clone()?));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
    let (hands_out, kept) = (Arc::clone(&messages), Arc::new(kept));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (messages, kept) = (Arc::clone(&hands_out), Arc::clone(&kept));
            thread::spawn(move || hand_out(&messages, &kept, stream));
        }
    });
    let outcome = build(&messages).unwrap_or_else(|error| Outcome::Broken(error.to_string()));
    messages.send(&Message::End(outcome))?;
    thread::sleep(HOLD);
    Err(io::Error::other("the result was not fetched in time"))
}

fn build(messages: &Messages) -> io::Result<Outcome> {
    let plan = fs::read(PLAN).and_then(|bytes| decode::<Plan>(&bytes)).map_err(|error| said(PLAN, error))?;
    let landlock = confine(plan.limits.processes, &Walls::BOTH)?;
    messages.send(&Message::Canary(Canary { refused: canary::look(true)?, landlock }))?;
    steps::run(messages, &plan, &Place { root: Root::open(Path::new("/"))?, context: CONTEXT, written: None })
}

/// Before anything else: no step reaches this process, and it has nothing open but standard input, output and error. The image's
/// runner is unreadable, so that it is not dumpable before either; where the node's `fs.suid_dumpable` is 1 only this call holds.
fn close_to_steps() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::close_inherited(None)
}

/// A file that only this process has.
fn without_name(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(|error| said("keep messages below /tmp", error))?;
    fs::remove_file(path)?;
    Ok(file)
}

/// Gives one follower what it has not got, to the last message.
fn hand_out(messages: &Messages, kept: &File, mut to: UnixStream) -> io::Result<()> {
    to.set_read_timeout(Some(PATIENCE))?;
    to.set_write_timeout(Some(PATIENCE))?;
    let mut place = [0; 8];
    to.read_exact(&mut place)?;
    let mut place = u64::from_be_bytes(place);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let written = messages.wait_for_more(place, BEAT);
        if place < written.length {
            let most = usize::try_from(written.length - place).unwrap_or(usize::MAX).min(buffer.len());
            let read = kept.read_at(&mut buffer[..most], place)?;
            to.write_all(&buffer[..read])?;
            place += read as u64;
        } else if written.is_whole {
            return Ok(());
        } else {
            to.write_all(&0_u32.to_be_bytes())?;
        }
    }
}

/// Prints what the build has said from a place on. The container runtime does not end a process whose reader has gone: it ends
/// itself when nothing was taken for a while.
pub fn follow(place: &str) -> io::Result<()> {
    close_to_steps()?;
    let place: u64 = place.parse().map_err(|_| io::Error::other("the place is no number"))?;
    // Process 1 listens before there is a step, and until the pod ends: nobody else has this name.
    let address = SocketAddr::from_abstract_name(SOCKET)?;
    let mut from = UnixStream::connect_addr(&address).map_err(|error| said("ask the runner", error))?;
    // From here on it can do no more than a step.
    confine(None, &Walls::BOTH)?;
    from.write_all(&place.to_be_bytes())?;
    let goes_on = Arc::new(AtomicBool::new(true));
    let looked_at = Arc::clone(&goes_on);
    thread::spawn(move || {
        while looked_at.swap(false, Ordering::Relaxed) {
            thread::sleep(PATIENCE);
        }
        process::exit(1);
    });
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            read => StandardOutput.write_all(&buffer[..read])?,
        }
        goes_on.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use runner::wire::{frame, read_frame};
    use rustix::process::dumpable_behavior;

    use super::*;

    /// In a process of its own: what other tests have open is not for this one to close.
    #[test]
    fn a_process_beside_steps_is_not_dumpable_and_has_nothing_open() {
        const INSIDE: &str = "FARRIER_TEST_INSIDE";
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        if std::env::var_os(INSIDE).is_some() {
            let _leaked = std::mem::ManuallyDrop::new(File::open("/proc/self/status").unwrap());
            assert!(open() > 4);
            close_to_steps().unwrap();
            assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
            // The three, and the directory while it is read.
            assert_eq!(open(), 4);
            return;
        }
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside
            .args(["--exact", "in_pod::tests::a_process_beside_steps_is_not_dumpable_and_has_nothing_open"])
            .env(INSIDE, "1");
        let inside = inside.output().unwrap();
        assert!(inside.status.success(), "{}", String::from_utf8_lossy(&inside.stdout));
        assert!(String::from_utf8_lossy(&inside.stdout).contains("1 passed"));
    }

    #[test]
    fn followers_get_all_from_any_place_on() {
        let dir = tempfile::tempdir().unwrap();
        let kept = without_name(&dir.path().join("messages")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let messages = Messages::kept(kept.try_clone().unwrap());
        let sent = [Message::Step(0), Message::Payload(vec![7; 600_000]), Message::Step(1)];
        let end = Message::End(Outcome::Done { size: 1, sha256: [0; 32] });
        thread::scope(|scope| {
            let follow = |place: u64| {
                let (near, far) = UnixStream::pair().unwrap();
                let (messages, kept) = (&messages, &kept);
                scope.spawn(move || hand_out(messages, kept, far));
                (&near).write_all(&place.to_be_bytes()).unwrap();
                near
            };
            let mut first = follow(0);
            for message in &sent {
                messages.send(message).unwrap();
                assert_eq!(&read_frame::<Message>(&mut first).unwrap(), message);
            }
            drop(first);
            // Behind the first message.
            let mut second = follow(frame(&Message::Step(0)).unwrap().len() as u64);
            messages.send(&end).unwrap();
            for message in sent[1..].iter().chain([&end]) {
                assert_eq!(&read_frame::<Message>(&mut second).unwrap(), message);
            }
            assert_eq!(second.read(&mut [0]).unwrap(), 0);
        });
    }
}
