//! Runs a build in a pod (`farrier-runner pod`), and sends the build's messages to farrier (`farrier-runner follow OFFSET`).
//!
//! The container's root file system is the rootfs of the build, and the runner is process 1 of the container. The runner
//! opens no connection to farrier, but keeps its messages in a file. farrier reads the messages through the API server's `exec`
//! of `follow OFFSET` in the pod, which prints the messages from a byte offset onward.
//!
//! Steps run as the same user as both programs, but cannot reach the messages:
//!
//! - The message file has no name that a step could open.
//! - The seccomp filter (`filter`) lets no step create a socket to the runner.
//! - Neither program is dumpable, so that no step can access its memory or descriptors.

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
    pod::{CONTEXT, HEARTBEAT, PLAN, RESULT_TTL},
    wire::{Canary, Message, Outcome, decode},
};
use rustix::{
    fs::Mode,
    process::{DumpableBehavior, set_dumpable_behavior, umask},
};

use crate::{
    canary,
    messages::{Context as _, Messages, StandardOutput},
    restrictions::Restrictions,
    rooted::Root,
    sandbox::confine,
    steps::{self, BuildPaths},
    sys,
};

/// Abstract name of the runner's socket in the pod's network namespace.
const SOCKET: &[u8] = b"farrier-runner";
/// Time without progress after which a follower counts as disconnected.
const FOLLOWER_TIMEOUT: Duration = Duration::from_mins(1);
/// Number of builds whose processes fit into the resource limit. All builds run as the same user, and the kernel counts the
/// processes of a user on the whole node. The monitor enforces the limit of each build.
const BUILDS_PER_NODE: u64 = 8;

/// Runs the build, and then waits until farrier has fetched the result and deletes the pod. Fails if the pod still runs after
/// [`RESULT_TTL`].
pub fn run() -> io::Result<()> {
    sys::remove_signal_handlers();
    protect_from_steps()?;
    umask(Mode::from_raw_mode(0o022));
    let file = unlinked_file(Path::new("/tmp/.farrier-messages"))?;
    let messages = Arc::new(Messages::in_file(file.try_clone()?));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
    let (shared_messages, file) = (Arc::clone(&messages), Arc::new(file));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (messages, file) = (Arc::clone(&shared_messages), Arc::clone(&file));
            thread::spawn(move || serve_follower(&messages, &file, stream));
        }
    });
    let outcome = build(&messages).unwrap_or_else(|error| Outcome::Broken(error.to_string()));
    messages.send(&Message::End(outcome))?;
    thread::sleep(RESULT_TTL);
    Err(io::Error::other("the result was not fetched in time"))
}

fn build(messages: &Messages) -> io::Result<Outcome> {
    let plan: Plan = fs::read(PLAN).and_then(|bytes| decode(&bytes)).context(PLAN)?;
    let processes = plan.limits.processes.map(|limit| limit.saturating_mul(BUILDS_PER_NODE));
    let landlock = confine(processes, &Restrictions::BOTH)?;
    messages.send(&Message::Canary(Canary { refused: canary::attempt_all(true)?, landlock }))?;
    steps::run(
        messages,
        &plan,
        &BuildPaths { root: Root::open(Path::new("/"))?, context: CONTEXT, write_dir: None },
    )
}

/// Protects this process from steps: makes it non-dumpable, and closes every descriptor except standard input, output and error.
/// Must run before anything else.
///
/// The runner's file in the image is unreadable, which makes the process non-dumpable too, except on nodes where
/// `fs.suid_dumpable` is 1.
fn protect_from_steps() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    sys::close_inherited(None)
}

/// Creates a file and unlinks it at once, so that only this process can access the file.
fn unlinked_file(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    let file = file.context("create a file for messages below /tmp")?;
    fs::remove_file(path)?;
    Ok(file)
}

/// Sends a follower all messages from its requested offset up to the last message.
fn serve_follower(messages: &Messages, file: &File, mut stream: UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(FOLLOWER_TIMEOUT))?;
    stream.set_write_timeout(Some(FOLLOWER_TIMEOUT))?;
    let mut offset = [0; 8];
    stream.read_exact(&mut offset)?;
    let mut offset = u64::from_be_bytes(offset);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let progress = messages.wait_for_more(offset, HEARTBEAT);
        if offset < progress.length {
            let length = usize::try_from(progress.length - offset).unwrap_or(usize::MAX).min(buffer.len());
            let read = file.read_at(&mut buffer[..length], offset)?;
            stream.write_all(&buffer[..read])?;
            offset += read as u64;
        } else if progress.is_complete {
            return Ok(());
        } else {
            stream.write_all(&0_u32.to_be_bytes())?;
        }
    }
}

/// Prints the build's messages from a byte offset onward. Exits after [`FOLLOWER_TIMEOUT`] without progress, because the
/// container runtime does not end a process whose reader has disconnected.
pub fn follow(offset: &str) -> io::Result<()> {
    protect_from_steps()?;
    let offset: u64 = offset.parse().map_err(|_| io::Error::other("the offset is not a number"))?;
    // No step can take the name of the socket, because process 1 binds it before the first step and until the pod ends.
    let address = SocketAddr::from_abstract_name(SOCKET)?;
    let mut stream = UnixStream::connect_addr(&address).context("ask the runner")?;
    // From here on this process has no more privileges than a step.
    confine(None, &Restrictions::BOTH)?;
    stream.write_all(&offset.to_be_bytes())?;
    let has_progress = Arc::new(AtomicBool::new(true));
    let watched = Arc::clone(&has_progress);
    thread::spawn(move || {
        while watched.swap(false, Ordering::Relaxed) {
            thread::sleep(FOLLOWER_TIMEOUT);
        }
        process::exit(1);
    });
    let mut buffer = vec![0; 256 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            read => StandardOutput.write_all(&buffer[..read])?,
        }
        has_progress.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use runner::wire::{frame, read_frame};
    use rustix::process::dumpable_behavior;

    use super::*;

    /// Runs in a separate process, because other tests' open files must not be closed.
    #[test]
    fn a_process_beside_steps_is_not_dumpable_and_has_nothing_open() {
        const INSIDE: &str = "FARRIER_TEST_INSIDE";
        let open = || fs::read_dir("/proc/self/fd").unwrap().count();
        if std::env::var_os(INSIDE).is_some() {
            let _leaked = std::mem::ManuallyDrop::new(File::open("/proc/self/status").unwrap());
            assert!(open() > 4);
            protect_from_steps().unwrap();
            assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
            // Standard input, output and error, and the directory during the count.
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
    fn followers_receive_all_messages_from_any_offset() {
        let dir = tempfile::tempdir().unwrap();
        let kept = unlinked_file(&dir.path().join("messages")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let messages = Messages::in_file(kept.try_clone().unwrap());
        let sent = [Message::Step(0), Message::Payload(vec![7; 600_000]), Message::Step(1)];
        let end = Message::End(Outcome::Done { size: 1, sha256: [0; 32] });
        thread::scope(|scope| {
            let follow = |offset: u64| {
                let (near, far) = UnixStream::pair().unwrap();
                let (messages, kept) = (&messages, &kept);
                scope.spawn(move || serve_follower(messages, kept, far));
                (&near).write_all(&offset.to_be_bytes()).unwrap();
                near
            };
            let mut first = follow(0);
            for message in &sent {
                messages.send(message).unwrap();
                assert_eq!(&read_frame::<Message>(&mut first).unwrap(), message);
            }
            drop(first);
            // Start after the first message.
            let mut second = follow(frame(&Message::Step(0)).unwrap().len() as u64);
            messages.send(&end).unwrap();
            for message in sent[1..].iter().chain([&end]) {
                assert_eq!(&read_frame::<Message>(&mut second).unwrap(), message);
            }
            assert_eq!(second.read(&mut [0]).unwrap(), 0);
        });
    }
}
