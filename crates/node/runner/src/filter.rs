//! The seccomp filter: an allow-list of system calls, some of which are allowed only with certain arguments.
//!
//! An unlisted system call fails with `ENOSYS`, so that programs use their fallback for older kernels. System calls that a
//! hostile step would try are in a second list and fail with `EPERM`. The self-test (`canary`) uses this error to
//! distinguish a refused call from a call that the kernel does not implement.

use std::{collections::BTreeMap, io};

use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch, apply_filter,
};

/// Array of system call numbers from their names in libc.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// `CLONE_NEW*` flags, which are refused: a step in a new namespace could gain capabilities.
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

/// System calls that any step may make.
const ALLOWED: &[i64] = calls![
    // Files and directories.
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2
    SYS_pwritev2 SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_lseek SYS_fstat SYS_newfstatat
    SYS_statx SYS_statfs SYS_fstatfs SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_getdents64 SYS_getcwd
    SYS_chdir SYS_fchdir SYS_umask SYS_mkdirat SYS_mknodat SYS_unlinkat SYS_renameat SYS_renameat2
    SYS_linkat SYS_symlinkat SYS_fchmod SYS_fchmodat SYS_utimensat SYS_ftruncate SYS_fallocate
    SYS_fadvise64 SYS_readahead SYS_fsync SYS_fdatasync SYS_sync SYS_syncfs SYS_sync_file_range
    SYS_copy_file_range SYS_sendfile SYS_splice SYS_tee SYS_vmsplice SYS_flock SYS_fcntl SYS_ioctl SYS_dup
    SYS_dup3 SYS_pipe2 SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch SYS_setxattr
    SYS_lsetxattr SYS_fsetxattr SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr
    SYS_flistxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr
    // Memory of the process. `refused` forbids anonymous shared memory.
    SYS_brk SYS_mmap SYS_munmap SYS_mremap SYS_mprotect SYS_madvise SYS_mincore SYS_msync SYS_mlock
    SYS_mlock2 SYS_munlock SYS_mlockall SYS_munlockall SYS_membarrier SYS_pkey_alloc SYS_pkey_free
    SYS_pkey_mprotect SYS_mseal SYS_get_mempolicy SYS_set_mempolicy SYS_mbind
    // Processes, threads and signals.
    SYS_clone SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_getpid SYS_getppid
    SYS_gettid SYS_getpgid SYS_setpgid SYS_getsid SYS_setsid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid
    SYS_getresuid SYS_getresgid SYS_getgroups SYS_setuid SYS_setgid SYS_setreuid SYS_setregid
    SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid SYS_setgroups SYS_capget SYS_capset SYS_prctl
    SYS_seccomp SYS_personality SYS_futex SYS_futex_waitv SYS_set_tid_address SYS_set_robust_list
    SYS_get_robust_list SYS_rseq SYS_restart_syscall SYS_kill SYS_tkill SYS_tgkill SYS_pidfd_open
    SYS_pidfd_send_signal SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigpending SYS_rt_sigtimedwait
    SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_rt_sigsuspend SYS_rt_sigreturn SYS_sigaltstack
    SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getparam SYS_sched_setparam
    SYS_sched_getscheduler SYS_sched_setscheduler SYS_sched_getattr SYS_sched_setattr
    SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_sched_rr_get_interval SYS_getpriority
    SYS_setpriority SYS_ioprio_get SYS_ioprio_set SYS_getrlimit SYS_setrlimit SYS_getrusage
    SYS_times SYS_getcpu
    // Waiting, time and system information.
    SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_eventfd2
    SYS_signalfd4 SYS_timerfd_create SYS_timerfd_settime SYS_timerfd_gettime SYS_timer_create
    SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete SYS_getitimer SYS_setitimer
    SYS_nanosleep SYS_clock_nanosleep SYS_clock_gettime SYS_clock_getres SYS_gettimeofday SYS_getrandom
    SYS_uname SYS_sysinfo
    // Pairs of connected sockets, which act as bidirectional pipes. No other socket can be created.
    SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg SYS_recvmmsg SYS_shutdown SYS_getsockname
    SYS_getpeername SYS_getsockopt SYS_setsockopt
    // Semaphores and message queues of the sandbox's IPC namespace.
    SYS_semget SYS_semop SYS_semctl SYS_semtimedop SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl
];

/// Allowed legacy system calls, which newer architectures such as arm64 do not have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_LEGACY: &[i64] = calls![
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_readlink SYS_getdents SYS_mkdir SYS_rmdir
    SYS_mknod SYS_unlink SYS_rename SYS_link SYS_symlink SYS_chmod SYS_utime SYS_utimes SYS_futimesat
    SYS_dup2 SYS_pipe SYS_inotify_init SYS_fork SYS_vfork SYS_getpgrp SYS_arch_prctl SYS_alarm SYS_pause
    SYS_time SYS_poll SYS_select SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_LEGACY: &[i64] = &[];

/// `fchmodat2`, which some versions of libc do not define for every architecture.
const FCHMODAT2: i64 = 452;

/// `kexec_file_load`, which musl's libc does not define for arm64.
const KEXEC_FILE_LOAD: i64 = if cfg!(target_arch = "x86_64") { 320 } else { 294 };

/// Refused system calls that exist only on x86-64.
#[cfg(target_arch = "x86_64")]
const REFUSED_X86_64: &[i64] = calls![SYS_iopl SYS_ioperm SYS_modify_ldt];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_X86_64: &[i64] = &[];

/// System calls that are refused whatever their arguments.
const REFUSED: &[i64] = calls![
    // Sockets: a build has no network, and must not reach another process through a socket. Socket pairs act as pipes and
    // stay allowed.
    SYS_socket
    // Access to other processes, and interfaces through which the kernel acts on a process's behalf.
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_process_madvise SYS_kcmp SYS_pidfd_getfd
    SYS_userfaultfd SYS_bpf SYS_perf_event_open SYS_fanotify_init
    // Kernel keyrings, which no namespace isolates.
    SYS_keyctl SYS_add_key SYS_request_key
    // Mounts, roots and namespaces.
    SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_move_mount SYS_open_tree SYS_fsopen SYS_fsconfig
    SYS_fsmount SYS_fspick SYS_mount_setattr SYS_setns SYS_unshare SYS_open_by_handle_at
    SYS_name_to_handle_at
    // Machine-wide state: modules, kexec, swap and clocks.
    SYS_init_module SYS_finit_module SYS_delete_module SYS_kexec_load SYS_reboot SYS_swapon
    SYS_swapoff SYS_acct SYS_quotactl SYS_syslog SYS_settimeofday SYS_clock_settime
    SYS_clock_adjtime SYS_adjtimex SYS_vhangup
];

/// System calls that report success without any effect. A sandbox has a single user, but steps unpack archives whose files
/// have other owners.
const FEIGNED: &[i64] = &[
    libc::SYS_fchown,
    libc::SYS_fchownat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
];

/// System calls that set the scheduling of the thread in the first argument, where 0 is the caller.
const SET_SCHEDULING: &[i64] =
    calls![SYS_sched_setaffinity SYS_sched_setparam SYS_sched_setscheduler SYS_sched_setattr];

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// Installs the seccomp filter in this process and its children. None of them can gain new privileges afterwards. System
/// calls of another instruction set kill the caller.
///
/// `truncate(2)` is allowed only if `allow_truncate` is set, which requires that Landlock restricts the call.
pub fn install(allow_truncate: bool) -> io::Result<()> {
    for program in programs(allow_truncate).map_err(io::Error::other)? {
        apply_filter(&program).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Compiles one BPF program for each errno: `ENOSYS`, `EPERM`, and 0 for feigned success. The first program allows the calls that
/// the other two decide. If several programs set an errno for a call, the program that was installed last wins.
fn programs(allow_truncate: bool) -> Result<[BpfProgram; 3], Error> {
    let errno = |number: libc::c_int| SeccompAction::Errno(number.unsigned_abs());
    Ok([
        compile(allowed(allow_truncate)?, errno(libc::ENOSYS), SeccompAction::Allow)?,
        compile(refused()?, SeccompAction::Allow, errno(libc::EPERM))?,
        compile(feigned()?, SeccompAction::Allow, errno(0))?,
    ])
}

fn compile(rules: Rules, default: SeccompAction, matched: SeccompAction) -> Result<BpfProgram, Error> {
    Ok(SeccompFilter::new(rules, default, matched, ARCH)?.try_into()?)
}

fn allowed(allow_truncate: bool) -> Result<Rules, Error> {
    let mut rules = unconditional(
        &[ALLOWED, ALLOWED_LEGACY, &[FCHMODAT2, KEXEC_FILE_LOAD], REFUSED, REFUSED_X86_64, FEIGNED].concat(),
    );
    if allow_truncate {
        rules.insert(libc::SYS_truncate, Vec::new());
    }
    // Allow only pid 0, the caller itself. Otherwise a step could kill process 1 by lowering the limits of process 1.
    rules.insert(libc::SYS_prlimit64, vec![compared(0, Compare::Eq, 0)?]);
    // Datagram socket pairs stay forbidden, because such sockets can send to any socket that has a path.
    let pair = |kind| rule(&[(0, u32::MAX, libc::AF_UNIX), (1, 0xf, kind)]);
    rules.insert(libc::SYS_socketpair, vec![pair(libc::SOCK_STREAM)?, pair(libc::SOCK_SEQPACKET)?]);
    Ok(rules)
}

fn refused() -> Result<Rules, Error> {
    let mut rules = unconditional(&[REFUSED, REFUSED_X86_64, &[KEXEC_FILE_LOAD]].concat());
    let has_bits = |argument, bits: libc::c_int| rule(&[(argument, bits.unsigned_abs(), bits)]);
    let namespaces = NAMESPACES.iter().map(|flag| has_bits(0, *flag));
    rules.insert(libc::SYS_clone, namespaces.collect::<Result<_, _>>()?);
    // Requests that inject input into a terminal as if its user had typed it.
    let requests = [TIOCSTI, TIOCLINUX].map(|request| compared(1, Compare::Eq, request));
    rules.insert(libc::SYS_ioctl, requests.into_iter().collect::<Result<_, _>>()?);
    // Memory that no per-process counter includes: anonymous shared memory and huge pages.
    let mappings =
        [libc::MAP_SHARED | libc::MAP_ANONYMOUS, libc::MAP_HUGETLB].map(|flags| has_bits(3, flags));
    rules.insert(libc::SYS_mmap, mappings.into_iter().collect::<Result<_, _>>()?);
    Ok(rules)
}

/// Calls of [`FEIGNED`], and calls that set:
///
/// - The scheduling of another thread. A step could keep process 1 from measuring the build. A filter cannot tell process 1 from
///   the caller's own threads, whose scheduling programs set as well.
/// - The core limit. A limit of 0 lets the kernel start the host's program for core dumps.
fn feigned() -> Result<Rules, Error> {
    let mut rules = unconditional(FEIGNED);
    for call in SET_SCHEDULING {
        rules.insert(*call, vec![compared(0, Compare::Ne, 0)?]);
    }
    for (call, process) in [(libc::SYS_setpriority, PRIO_PROCESS), (libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS)]
    {
        // A process group or a user may include process 1.
        rules.insert(call, vec![compared(0, Compare::Ne, process)?, compared(1, Compare::Ne, 0)?]);
    }
    rules.insert(libc::SYS_setrlimit, vec![compared(0, Compare::Eq, RLIMIT_CORE)?]);
    let is_core = Condition::new(1, Width::Dword, Compare::Eq, RLIMIT_CORE)?;
    let sets = Condition::new(2, Width::Qword, Compare::Ne, 0)?;
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![is_core, sets])?]);
    Ok(rules)
}

fn unconditional(calls: &[i64]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

/// Returns a rule that compares the lower half of an argument with a value.
fn compared(argument: u8, compare: Compare, value: u64) -> Result<SeccompRule, Error> {
    Ok(SeccompRule::new(vec![Condition::new(argument, Width::Dword, compare, value)?])?)
}

/// Returns a rule of `(argument, mask, bits)` conditions, which matches if each argument masked with `mask` equals `bits`.
fn rule(arguments: &[(u8, u32, libc::c_int)]) -> Result<SeccompRule, Error> {
    let conditions = arguments.iter().map(|(argument, mask, bits)| {
        let compare = Compare::MaskedEq(u64::from(*mask));
        Condition::new(*argument, Width::Qword, compare, u64::from(bits.unsigned_abs()))
    });
    Ok(SeccompRule::new(conditions.collect::<Result<_, _>>()?)?)
}

/// The core limit. musl and glibc declare resources with different types.
const RLIMIT_CORE: u64 = 4;
/// First argument of `setpriority` for a single process.
const PRIO_PROCESS: u64 = 0;
/// First argument of `ioprio_set` for a single process.
const IOPRIO_WHO_PROCESS: u64 = 1;
/// `ioctl` request that adds a byte to a terminal's input. musl and glibc declare requests with different types.
const TIOCSTI: u64 = 0x5412;
/// `ioctl` request to a Linux virtual console. Its subcommands include pasting the selection as input.
const TIOCLINUX: u64 = 0x541c;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Process 1 measures the build, and the host's program for core dumps runs outside of the sandbox.
    #[test]
    fn scheduling_of_other_processes_and_core_limits_are_feigned() {
        let feigned = feigned().unwrap();
        let rules = |call: i64| feigned.get(&call).map_or(0, Vec::len);
        assert!(SET_SCHEDULING.iter().all(|call| rules(*call) == 1));
        assert_eq!([libc::SYS_setpriority, libc::SYS_ioprio_set].map(rules), [2, 2]);
        assert_eq!([libc::SYS_setrlimit, libc::SYS_prlimit64].map(rules), [1, 1]);
    }

    #[test]
    fn the_filters_compile_and_list_each_system_call_once() {
        assert!(programs(true).unwrap().iter().all(|program| program.len() < 4096));
        let all = [ALLOWED, ALLOWED_LEGACY, REFUSED, REFUSED_X86_64, FEIGNED].concat();
        let unique: BTreeSet<_> = all.iter().collect();
        assert_eq!(all.len(), unique.len());
        assert!(!all.contains(&libc::SYS_truncate));
        assert!(allowed(true).unwrap().contains_key(&libc::SYS_truncate));
    }
}
