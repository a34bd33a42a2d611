//! Which system calls a build step may make.
//!
//! The list names what is refused, because compilers and scripts call more than a list of what is allowed would foresee. With
//! the namespaces it is the second border in a sandbox; in a pod, where network policies come late, it is the first.

use std::{collections::BTreeMap, io};

use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// `CLONE_NEW*`: a namespace of a step's own is a way to capabilities.
const NAMESPACES: [libc::c_int; 8] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
    0x80, // CLONE_NEWTIME
];

/// System calls that are refused whatever their arguments are.
const REFUSED: &[i64] = &[
    // Sockets: a build has no network, and reaches no other process by one. Pairs are pipes, and stay.
    libc::SYS_socket,
    // Other processes, and what the kernel can be asked to do in a process's place.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_kcmp,
    libc::SYS_pidfd_getfd,
    libc::SYS_userfaultfd,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_fanotify_init,
    // Keys of the kernel's keyrings, which no namespace divides.
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // Mounts, roots and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    // The machine.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// System calls that are said not to exist: whoever makes them has another way.
const ABSENT: &[i64] =
    &[libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// System calls that are said to have worked: a sandbox has one owner, and archives are unpacked with others.
const FEIGNED: &[i64] = &[
    libc::SYS_fchown,
    libc::SYS_fchownat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
];

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// Installs the filter in this process and what it starts; it can get no new privileges either. Other instruction sets' system
/// calls kill who makes them.
pub fn install() -> io::Result<()> {
    for program in programs().map_err(io::Error::other)? {
        apply_filter(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

/// One program for each answer: of several the strictest counts.
fn programs() -> Result<Vec<BpfProgram>, Error> {
    let errno = |number: libc::c_int| SeccompAction::Errno(number.unsigned_abs());
    let always = |calls: &[i64]| calls.iter().map(|call| (*call, Vec::new())).collect::<Rules>();
    let mut refused = always(REFUSED);
    let bit = |argument, bit: libc::c_int| {
        let bit = u64::from(bit.unsigned_abs());
        SeccompRule::new(vec![Condition::new(argument, Width::Qword, Compare::MaskedEq(bit), bit)?])
    };
    refused.insert(libc::SYS_clone, NAMESPACES.iter().map(|flag| bit(0, *flag)).collect::<Result<_, _>>()?);
    // Words put into a terminal's input, as if its user had typed them.
    let injects =
        |request: u64| SeccompRule::new(vec![Condition::new(1, Width::Dword, Compare::Eq, request)?]);
    refused.insert(
        libc::SYS_ioctl,
        [libc::TIOCSTI, TIOCLINUX].into_iter().map(injects).collect::<Result<_, _>>()?,
    );
    [(refused, errno(libc::EPERM)), (always(ABSENT), errno(libc::ENOSYS)), (always(FEIGNED), errno(0))]
        .into_iter()
        .map(|(rules, answer)| {
            let filter = SeccompFilter::new(other_abi(rules), SeccompAction::Allow, answer, ARCH)?;
            Ok(filter.try_into()?)
        })
        .collect()
}

/// Requests to a virtual console, pasting among them.
const TIOCLINUX: libc::Ioctl = 0x541c;

/// The same for x32, whose system calls are those of x86-64 with one bit more.
fn other_abi(mut rules: Rules) -> Rules {
    if cfg!(target_arch = "x86_64") {
        let x32: Rules = rules.iter().map(|(call, rules)| (call | 0x4000_0000, rules.clone())).collect();
        rules.extend(x32);
    }
    rules
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_compile_and_name_each_call_once() {
        assert_eq!(programs().unwrap().len(), 3);
        let all = [REFUSED, ABSENT, FEIGNED].concat();
        let unique: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(all.len(), unique.len());
    }
}
