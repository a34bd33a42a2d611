//! Runs the attacks in a virtual machine with Debian 12's kernel, which has another version of Landlock, and with control
//! groups.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use crate::{
    check,
    host::{PLAYED, USER, User, pack, words},
    kit::Kit,
    player::Barriers,
    support::{
        node_vm::{machine::Machine, tree::NodeTree},
        packages::{kernel_image, releases, run},
    },
    table::{Row, Table},
};

/// Memory of the machine in MiB: for the programs and for the attacks on memory.
const MEMORY: u32 = 2048;
/// Timeout for one user and one state of the barriers, with software emulation.
const PLAY: Duration = Duration::from_mins(15);

/// Users and barriers to play with. Each barrier stands alone once; the other tests play every combination on this machine's kernel.
const PLAYS: [(User, Barriers); 4] = [
    (User::Root, Barriers::Both),
    (User::Ordinary, Barriers::Both),
    (User::Ordinary, Barriers::IsolationOnly),
    (User::Root, Barriers::LeakOfRoot),
];

/// Boots the machine and plays these combinations in turn.
#[test]
fn debian_12s_kernel_holds() {
    let release = releases("6.1.0-", "-amd64").pop().expect("the host's suites have a 6.1 kernel");
    let tree = NodeTree::new(&kernel_image(&release), &["crc32c_generic", "ext4", "loop"]);
    let programs = tempfile::tempdir().unwrap();
    fill(programs.path());
    tree.image("kit", programs.path());
    let kernel = kernel_image(&release).vmlinuz;
    let (directory, initramfs) = tree.pack();
    let mut machine = Machine::boot(&kernel, directory, initramfs, MEMORY, &[]);
    let prepared = machine.run(include_str!("guest.sh"), Duration::from_mins(2));
    assert_eq!(prepared.status, 0, "{}", prepared.text);
    for (user, barriers) in PLAYS {
        let output = machine.run(&script(user, barriers), PLAY);
        let is_whole = output.status == 0 && output.text.lines().any(|line| line == PLAYED);
        let table = Table::new(output.text.lines().filter_map(Row::printed));
        let title = format!("{release}, {}, {}", user.name(), barriers.name());
        println!("{title}:\n{table}");
        assert!(is_whole, "{title}: {}\n{}", output.status, output.text);
        check(&table, barriers);
        if barriers == Barriers::Both {
            for confined in ["landlock: 2", "\"memory\": \"cgroup v2\"", "\"processes\": \"cgroup v2\""] {
                assert!(output.text.contains(confined), "{title}: {confined}\n{}", output.text);
            }
        }
    }
}

/// Script that starts the player as the only process of its control group.
fn script(user: User, barriers: Barriers) -> String {
    let kit = Kit::at(Path::new("/work/kit"));
    let id = if user == User::Root { 0 } else { USER };
    let program = kit.attack().display().to_string();
    let words = words(&kit).join(" ");
    format!(
        // An earlier player's farrier has moved itself into the child group `farrier`.
        "group=/sys/fs/cgroup/{id}; [ ! -d $group/farrier ] || group=$group/farrier\n\
         echo $$ > $group/cgroup.procs || exit 1\n\
         export HOME=/work/{id}/home TMPDIR=/work/{id} ESCAPE_KIT=/work/kit ESCAPE_SCALE=small ESCAPE_BARRIERS='{}'\n\
         exec {program} user {id} {words}\n",
        barriers.name()
    )
}

/// Fills a directory with the kit, `mke2fs`, and the libraries of both.
fn fill(directory: &Path) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    let (programs, libraries) = (directory.join("programs"), directory.join("libraries"));
    fs::create_dir_all(&programs).unwrap();
    let kit = pack(&programs);
    // The file may be a hard link to the running program.
    let stripped = directory.join("stripped");
    run(Command::new("strip").arg("-o").arg(&stripped).arg(kit.player()));
    fs::remove_file(kit.player()).unwrap();
    fs::rename(stripped, kit.player()).unwrap();
    let mke2fs = ["/usr/sbin/mke2fs", "/sbin/mke2fs"].into_iter().find(|path| Path::new(path).exists());
    let mke2fs = Path::new(mke2fs.expect("install e2fsprogs"));
    let place = libraries.join("sbin/mke2fs");
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::copy(mke2fs, place).unwrap();
    for program in [mke2fs, &kit.player()] {
        for library in needed(program) {
            let place = libraries.join(library.strip_prefix("/").unwrap());
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::copy(&library, place).unwrap();
        }
    }
}

/// Returns the shared libraries of a program, including its loader.
fn needed(program: &Path) -> Vec<PathBuf> {
    let printed = run(Command::new("ldd").arg(program));
    let words = printed.split_whitespace().filter(|word| word.starts_with('/'));
    words.map(PathBuf::from).collect()
}
