/* Attacks of a hostile build step. Each line of the output is `PLACE: ATTACK: RESULT`, where PLACE is the position in the build
 * and RESULT is
 *   denied    nothing was reached;
 *   metadata  only a call that Landlock does not cover had an effect, such as stat or chmod of a file outside;
 *   allowed   the seccomp filter is off, and the call alone is no escape;
 *   ESCAPED   any other outcome.
 *
 *   attack all PLACE KEY=VALUE...    every attack that does not change the build itself
 *   attack walk PLACE                looks for canaries in the current directory and its parents
 *   attack memory KIND MIB | disk MIB | inodes COUNT | sparse FILE MIB | deep LEVELS | forks COUNT | linger
 *   attack restore                   acts as the interpreter of a script: makes /tmp a directory again
 *   attack true | capabilities       exits with 0; `capabilities` only if the program has a capability
 *   attack user ID COMMAND...        starts a command as an ordinary user
 *   attack delegate DIRECTORY        marks a control group as delegated
 *   attack caller FILE COMMAND...    starts a command as a careless caller would: with the canary of FILE in descriptor 9, in
 *                                    the environment, and in the session keyring; as root with a supplementary group, and in
 *                                    a mount namespace for the caller's own mounts
 *
 * Keys: `outside` and `home` (directories with canaries), `abstract` (a socket), `port` (on loopback), `filter=off`,
 * `leak` (number of a leaked descriptor), `below` (path of the canaries' directory relative to it). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define CANARY "CANARY-"
#define NAME "farrier-canary"
#define MARK "farrier-escaped"
#define KEY "farrier-canary"

enum result { DENIED, METADATA, ALLOWED, ESCAPED };

static const char *place = "", *outside = "/nowhere", *home = "/nowhere", *abstract = "none", *below = ".";
static int filter = 1, leak = -1, port = 1;

static void report(const char *attack, enum result result) {
    static const char *const words[] = {"denied", "metadata", "allowed", "ESCAPED"};
    printf("%s: %s: %s\n", place, attack, words[result]);
    fflush(stdout);
}

/* Reports an attack that succeeds if it reaches a canary. */
static void reach(const char *attack, int reached) { report(attack, reached ? ESCAPED : DENIED); }

/* Reports a system call that the seccomp filter must refuse. Without the filter, the call alone is no escape. */
static void call(const char *attack, long result) {
    report(attack, result < 0 ? DENIED : filter ? ESCAPED : ALLOWED);
}

/* Reports a call that must fail with and without the filter. */
static void never(const char *attack, long result) { reach(attack, result >= 0); }

/* Reports a call that can only affect metadata. */
static void touch(const char *attack, long result) { report(attack, result < 0 ? DENIED : METADATA); }

/* Whether a descriptor is the pipe of this program's output. A process can open it for reading in /proc. */
static int is_output(int fd) {
    struct stat one, output;
    return fstat(fd, &one) == 0 && fstat(1, &output) == 0 && one.st_dev == output.st_dev && one.st_ino == output.st_ino;
}

static int has_canary(int fd) {
    /* A read would take away lines that the harness has not read yet. */
    if (fd >= 0 && is_output(fd)) return 0;
    char text[256] = "";
    ssize_t length = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    if (length < 0 && fd >= 0) length = read(fd, text, sizeof text - 1);
    return length > 0 && memmem(text, length, CANARY, strlen(CANARY)) != NULL;
}

/* Whether a file can be read and contains a canary. */
static int reads(int at, const char *path) {
    int fd = openat(at, path, O_RDONLY | O_NONBLOCK | O_NOCTTY), found = has_canary(fd);
    if (fd >= 0) close(fd);
    return found;
}

static int opens(const char *path, int flags) {
    int fd = open(path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return 0;
    close(fd);
    return 1;
}

/* Whether a directory reveals a canary, by its content or by its name in a listing. */
static int shows(int directory) {
    if (reads(directory, NAME) || reads(directory, "keys/" NAME)) return 1;
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), found = 0;
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (list == NULL) {
        if (fd >= 0) close(fd);
        return 0;
    }
    for (struct dirent *entry; (entry = readdir(list)) != NULL;) found |= strcmp(entry->d_name, NAME) == 0;
    closedir(list);
    return found;
}

/* Whether a directory or one of its parents reveals a canary. */
static int leads_out(int directory) {
    int current = openat(directory, ".", O_PATH | O_DIRECTORY | O_CLOEXEC), found = 0;
    for (int level = 0; level < 24 && current >= 0 && !found; level++) {
        found = shows(current);
        int above = openat(current, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
        close(current);
        current = above;
    }
    if (current >= 0) close(current);
    return found;
}

static int path_leads_out(const char *path) {
    int fd = open(path, O_PATH | O_CLOEXEC), found = 0;
    if (fd < 0) return 0;
    found = has_canary(fd) || leads_out(fd);
    close(fd);
    return found || reads(AT_FDCWD, path);
}

/* Runs an attempt in a child process, because the attempt may be fatal. */
static int in_child(int (*attempt)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(attempt() == 0 ? 0 : 1);
    if (child < 0 || waitpid(child, &status, 0) < 0) return 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Inherited descriptors. */

static void forge(int fd) {
    char frames[16384];
    int file = open("/frames", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, frames, sizeof frames);
    if (file >= 0) close(file);
    if (length > 0 && write(fd, frames, length) < 0) return;
    /* Where the frames end up in the output, the next line must not follow them directly. */
    if (write(fd, "\n", 1) < 0) return;
}

static void descriptors(void) {
    int any = 0, out = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct stat found;
        if (fd == leak || fcntl(fd, F_GETFD) < 0) continue;
        any = 1;
        if (fstat(fd, &found) != 0) continue;
        if (S_ISDIR(found.st_mode)) out |= leads_out(fd) || fchdir(fd) == 0;
        if (S_ISREG(found.st_mode)) out |= has_canary(fd);
        if (S_ISFIFO(found.st_mode) || S_ISSOCK(found.st_mode)) forge(fd);
    }
    reach("an inherited descriptor", any);
    reach("a canary by an inherited descriptor", out);
    out = 0;
    for (int fd = 0; fd < 3; fd++) out |= leads_out(fd);
    reach("out by standard input and output", out);
    reach("the caller's environment", getenv("FARRIER_CANARY") != NULL);
}

static void directory_of_this_step(void) {
    char path[4096] = "";
    long length = syscall(SYS_getcwd, path, sizeof path);
    reach("a working directory outside", length < 0 || path[0] != '/');
    reach(".. from the working directory", leads_out(AT_FDCWD));
}

/* Every visible process. */

static const char *const OF_PROCESS[] = {"root", "cwd", "exe", "mem", "environ", "maps", "smaps", "numa_maps", "pagemap", "auxv",
    "syscall", "stack", "io", "personality", "map_files", "fdinfo", "ns/mnt", "ns/user", "ns/net", "ns/pid"};
static const char *const WRITES[] = {"mem", "comm", "uid_map", "gid_map", "setgroups", "projid_map", "clear_refs", "attr/current",
    "timerslack_ns", "make-it-fail"};
/* Files that the kernel lets each user write for its own processes: a build can at most harm itself. */
static const char *const SETTINGS[] = {"oom_score_adj", "coredump_filter", "sched", "autogroup"};

/* Whether a file yields at least one byte, or a directory one entry. */
static int gives(const char *path) {
    char byte;
    DIR *list = opendir(path);
    if (list != NULL) {
        int entries = 0;
        while (readdir(list) != NULL) entries++;
        closedir(list);
        return entries > 2;
    }
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    int found = fd >= 0 && !is_output(fd) && read(fd, &byte, 1) > 0;
    if (fd >= 0) close(fd);
    return found;
}

static int takes(const char *path) {
    int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    int written = fd >= 0 && write(fd, "0", 1) > 0;
    if (fd >= 0) close(fd);
    return written;
}

static int is_number(const char *name) { return name[0] != 0 && strspn(name, "0123456789") == strlen(name); }

static int descriptors_lead_out(const char *process) {
    int found = 0;
    char path[512];
    for (int fd = 0; fd < 64; fd++) {
        snprintf(path, sizeof path, "/proc/%s/fd/%d", process, fd);
        if (fd != leak) found |= path_leads_out(path);
    }
    return found;
}

static int seizes_process_1(void) { return ptrace(PTRACE_SEIZE, 1, 0, 0) == 0 ? 0 : 1; }

static int attaches_to_process_1(void) { return ptrace(PTRACE_ATTACH, 1, 0, 0) == 0 ? 0 : 1; }

/* Whether a step can change the scheduling of a thread. Undoes what the other attacks need of process 1. A call without any effect
 * succeeds as well, and musl has no functions for some of these calls. */
static int schedules(int thread) {
    struct sched_param none = {0};
    cpu_set_t all, one, now;
    int nice = getpriority(PRIO_PROCESS, thread), lowest = 2 << 13 | 7 /* best effort */;
    setpriority(PRIO_PROCESS, thread, nice + 1);
    setpriority(PRIO_USER, 0, nice + 1);
    int changed = getpriority(PRIO_PROCESS, thread) != nice;
    syscall(SYS_sched_setscheduler, thread, SCHED_BATCH, &none);
    changed |= syscall(SYS_sched_getscheduler, thread) == SCHED_BATCH;
    syscall(SYS_sched_setscheduler, thread, SCHED_OTHER, &none);
    syscall(SYS_ioprio_set, 1 /* IOPRIO_WHO_PROCESS */, thread, lowest);
    changed |= syscall(SYS_ioprio_get, 1, thread) == lowest;
    if (sched_getaffinity(thread, sizeof all, &all) != 0) return changed;
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0 && cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &one);
    sched_setaffinity(thread, sizeof one, &one);
    sched_getaffinity(thread, sizeof now, &now);
    changed |= !CPU_EQUAL(&now, &all);
    sched_setaffinity(thread, sizeof all, &all);
    return changed;
}

/* Whether a step can take the processors from process 1, which measures the build. The threads of process 1 have the first
 * numbers of the namespace. */
static int schedules_process_1(void) {
    int any = 0;
    for (int thread = 1; thread < 8; thread++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/1/task/%d", thread);
        any |= access(path, F_OK) == 0 && schedules(thread);
    }
    return any ? 0 : -1;
}

static void processes(void) {
    DIR *all = opendir("/proc");
    int by_link = 0, by_descriptor = 0;
    for (struct dirent *entry; all != NULL && (entry = readdir(all)) != NULL;) {
        char path[1024];
        if (!is_number(entry->d_name)) continue;
        for (int i = 0; i < 3; i++) {
            snprintf(path, sizeof path, "/proc/%s/%s", entry->d_name, OF_PROCESS[i]);
            by_link |= path_leads_out(path);
            snprintf(path, sizeof path, "/proc/%s/task/%s/%s", entry->d_name, entry->d_name, OF_PROCESS[i]);
            by_link |= path_leads_out(path);
            snprintf(path, sizeof path, "/proc/%s/root%s/" NAME, entry->d_name, outside);
            by_link |= reads(AT_FDCWD, path);
            snprintf(path, sizeof path, "/proc/%s/cwd/../../../../../../../..%s/" NAME, entry->d_name, outside);
            by_link |= reads(AT_FDCWD, path);
        }
        by_descriptor |= descriptors_lead_out(entry->d_name);
    }
    if (all != NULL) closedir(all);
    reach("out by links of /proc/PID", by_link);
    reach("out by /proc/PID/fd", by_descriptor);
    char path[256];
    int files = 0, written = 0, forged = 0;
    for (size_t i = 0; i < sizeof OF_PROCESS / sizeof *OF_PROCESS; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", OF_PROCESS[i]);
        files |= gives(path);
        snprintf(path, sizeof path, "/proc/1/task/1/%s", OF_PROCESS[i]);
        files |= gives(path);
    }
    for (size_t i = 0; i < sizeof WRITES / sizeof *WRITES; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", WRITES[i]);
        written |= takes(path);
    }
    int set = 0;
    for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", SETTINGS[i]);
        set |= takes(path);
    }
    for (int fd = 0; fd < 64; fd++) {
        snprintf(path, sizeof path, "/proc/1/fd/%d", fd);
        int open_one = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
        if (open_one >= 0) {
            forge(open_one);
            forged = 1;
            close(open_one);
        }
    }
    snprintf(path, sizeof path, "/proc/1/root%s/" NAME, outside);
    /* If the attack works, the forged messages precede the next line on the same stream. */
    if (forged) printf("\n");
    reach("root of process 1", reads(AT_FDCWD, path));
    reach("files of process 1", files);
    touch("settings of process 1", set ? 0 : -1);
    touch("numbers of process 1's descriptors", gives("/proc/1/fd") ? 0 : -1);
    reach("write to files of process 1", written);
    reach("write to descriptors of process 1", forged);
    char word[16] = "";
    struct iovec here = {word, sizeof word}, there = {(void *)0x400000, sizeof word};
    never("ptrace", in_child(seizes_process_1) ? 0 : -1);
    never("ptrace attach", in_child(attaches_to_process_1) ? 0 : -1);
    /* In a container both work, and would leave process 1 stopped. */
    kill(1, SIGCONT);
    never("process_vm_readv", syscall(SYS_process_vm_readv, 1, &here, 1, &there, 1, 0));
    never("process_vm_writev", syscall(SYS_process_vm_writev, 1, &here, 1, &there, 1, 0));
    never("kcmp", syscall(SYS_kcmp, getpid(), 1, 0, 0, 0));
    int process = syscall(SYS_pidfd_open, 1, 0);
    int taken = 0;
    for (int fd = 0; process >= 0 && fd < 64; fd++) taken |= syscall(SYS_pidfd_getfd, process, fd, 0) >= 0;
    reach("pidfd_getfd", taken);
    call("scheduling of process 1", schedules_process_1());
    struct rlimit limit;
    touch("resource limit of process 1", prlimit(1, RLIMIT_NOFILE, NULL, &limit));
    for (int number = 1; number < 64; number++)
        if (number != SIGCONT) kill(1, number);
    if (process >= 0) syscall(SYS_pidfd_send_signal, process, SIGKILL, 0, 0);
    /* Process 1 and the caller must survive; the harness checks that. */
    for (int pid = 2; pid < 70000; pid++)
        if (kill(pid, 0) == 0 && kill(pid, SIGCONT) != 0) break;
    report("signals", DENIED);
}

/* Paths, mounts and changed roots. */

static void paths(void) {
    char path[4096];
    const char *const places[] = {outside, home};
    int read_one = 0, linked = 0, wrote = 0;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/" NAME, places[i]);
        read_one |= reads(AT_FDCWD, path);
        linked |= link(path, "/tmp/linked") == 0;
        wrote |= opens(path, O_WRONLY);
        snprintf(path, sizeof path, "/..//../../../../../../../..%s/" NAME, places[i]);
        read_one |= reads(AT_FDCWD, path);
        symlink(path, "/tmp/symbolic");
        read_one |= reads(AT_FDCWD, "/tmp/symbolic");
        linked |= linkat(AT_FDCWD, "/tmp/symbolic", AT_FDCWD, "/tmp/linked", AT_SYMLINK_FOLLOW) == 0;
        unlink("/tmp/symbolic");
    }
    reach("open the secret", read_one);
    reach("write the secret", wrote);
    reach("hard link to the secret", linked);
    int up = 0;
    FILE *mounts = fopen("/proc/self/mountinfo", "r");
    for (char line[8192]; mounts != NULL && fgets(line, sizeof line, mounts) != NULL;) {
        char mount[4096];
        if (sscanf(line, "%*s %*s %*s %*s %4095s", mount) == 1) up |= path_leads_out(mount);
    }
    if (mounts != NULL) fclose(mounts);
    reach(".. from every mount", up);
    reach(".. from the root", path_leads_out("/"));
}

static int double_chroot(void) {
    mkdir("/tmp/inner", 0755);
    if (chroot("/tmp/inner") != 0) return -1;
    for (int i = 0; i < 64; i++)
        if (chdir("..") != 0) return -1;
    if (chroot(".") != 0) return -1;
    char path[4096];
    snprintf(path, sizeof path, "%s/" NAME, outside);
    return reads(AT_FDCWD, path) ? 0 : -1;
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, text, strlen(text)) < 0) perror(path);
    close(fd);
}

/* Creates a user namespace with every capability in it, and looks below the mounts and above the root. */
static int tour_of_a_user_namespace(void) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return -1;
    put("/proc/self/setgroups", "deny");
    put("/proc/self/uid_map", "0 0 1");
    put("/proc/self/gid_map", "0 0 1");
    if (double_chroot() == 0) return 0;
    const char *const mounts[] = {"/dev/shm", "/dev/null", "/dev", "/proc", "/tmp", "/context", "/"};
    int out = 0;
    for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++) {
        if (umount2(mounts[i], MNT_DETACH) == 0) out |= path_leads_out(mounts[i]);
        if (mount(mounts[i], "/tmp", NULL, MS_BIND | MS_REC, NULL) == 0) out |= path_leads_out("/tmp");
    }
    if (mount("proc", "/tmp", "proc", 0, NULL) == 0) out |= path_leads_out("/tmp/1/root") || path_leads_out("/tmp/1/cwd");
    if (syscall(SYS_pivot_root, ".", ".") == 0) out |= path_leads_out("..");
    return out ? 0 : -1;
}

static int enters_a_user_namespace(void) { return unshare(CLONE_NEWUSER); }

static int user_namespace_by_clone(void) {
    long child = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (child == 0) _exit(0);
    return child > 0 ? 0 : -1;
}

static int user_namespace_by_clone3(void) {
    uint64_t words[11] = {CLONE_NEWUSER, 0, 0, 0, SIGCHLD};
    long child = syscall(SYS_clone3, words, sizeof words);
    if (child == 0) _exit(0);
    return child > 0 ? 0 : -1;
}

static int joins_a_namespace(void) {
    const char *const names[] = {"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"};
    for (int i = 0; i < 7; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/1/ns/%s", names[i]);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0 && setns(fd, 0) == 0) return 0;
    }
    return -1;
}

static void namespaces(void) {
    reach("double chroot", in_child(double_chroot));
    never("chroot", chroot("/tmp"));
    never("mount", mount("none", "/tmp", "tmpfs", 0, ""));
    never("bind mount", mount("/", "/tmp", 0, MS_BIND, 0));
    never("remount", mount("none", "/", 0, MS_REMOUNT, 0));
    never("umount", umount2("/proc", MNT_DETACH));
    never("pivot_root", syscall(SYS_pivot_root, ".", "."));
    never("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
    never("fspick", syscall(SYS_fspick, AT_FDCWD, "/", 0));
    never("open_tree", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
    never("move_mount", syscall(SYS_move_mount, AT_FDCWD, "/proc", AT_FDCWD, "/tmp", 0));
    never("mount_setattr", syscall(SYS_mount_setattr, AT_FDCWD, "/", 0, (uint64_t[4]){0}, 32));
    never("memory device", mknod("/tmp/mem", S_IFCHR | 0600, makedev(1, 1)));
    never("disk device", mknod("/tmp/disk", S_IFBLK | 0600, makedev(254, 0)));
    call("user namespace", in_child(enters_a_user_namespace) ? 0 : -1);
    call("user namespace by clone", in_child(user_namespace_by_clone) ? 0 : -1);
    call("user namespace by clone3", in_child(user_namespace_by_clone3) ? 0 : -1);
    reach("out of a user namespace", in_child(tour_of_a_user_namespace));
    reach("namespaces of process 1", in_child(joins_a_namespace));
    struct { unsigned bytes; int type; char handle[128]; } handle = {128, 0, ""};
    int number;
    call("name_to_handle", syscall(SYS_name_to_handle_at, AT_FDCWD, "/", &handle, &number, 0));
    never("open_by_handle", syscall(SYS_open_by_handle_at, AT_FDCWD, &handle, O_RDONLY));
}

/* Other processes on the machine, and interfaces of the kernel. */

static int connects(int family, const void *address, socklen_t length) {
    int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int connected = fd >= 0 && connect(fd, address, length) == 0;
    if (fd >= 0) close(fd);
    return connected;
}

static void sockets(void) {
    int any = 0, packet = 0;
    for (int family = 0; family < 64; family++)
        for (int type = 1; type < 6; type++) {
            int fd = socket(family, type, 0);
            if (fd < 0) continue;
            any = 1;
            packet |= family == AF_PACKET;
            close(fd);
        }
    call("sockets", any ? 0 : -1);
    reach("packet socket", packet);
    call("netlink", socket(AF_NETLINK, SOCK_RAW, 0));
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    strncpy(local.sun_path + 1, abstract, sizeof local.sun_path - 2);
    reach("abstract socket", connects(AF_UNIX, &local, offsetof(struct sockaddr_un, sun_path) + 1 + strlen(abstract)));
    memset(local.sun_path, 0, sizeof local.sun_path);
    snprintf(local.sun_path, sizeof local.sun_path, "%s/socket", outside);
    reach("path socket", connects(AF_UNIX, &local, sizeof local));
    int tcp = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    reach("loopback", tcp >= 0 && connect(tcp, (struct sockaddr *)&loopback, sizeof loopback) == 0);
    struct sockaddr_vm machine = {.svm_family = AF_VSOCK, .svm_port = port, .svm_cid = 1};
    int vsock = socket(AF_VSOCK, SOCK_STREAM, 0);
    call("vsock", vsock);
    reach("a port by vsock", connects(AF_VSOCK, &machine, sizeof machine));
}

#ifdef __x86_64__
static int socket_of_i386(void) {
    long result, words[3] = {AF_INET, SOCK_STREAM, 0};
    /* socketcall(SYS_SOCKET, words): the pointer need not be valid, since the call itself must be refused. */
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(102), "b"(1), "c"(words) : "memory");
    return result >= 0 || result == -EFAULT ? 0 : -1;
}
static int pid_of_i386(void) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory");
    return result > 0 ? 0 : -1;
}
static int socket_of_x32(void) { return syscall(0x40000000 | SYS_socket, AF_INET, SOCK_STREAM, 0) >= 0 ? 0 : -1; }
static int pid_of_x32(void) { return syscall(0x40000000 | SYS_getpid) > 0 ? 0 : -1; }
#endif

static void kernel(void) {
#ifdef __x86_64__
    call("socket of i386", in_child(socket_of_i386) ? 0 : -1);
    call("call of i386", in_child(pid_of_i386) ? 0 : -1);
    call("socket of x32", in_child(socket_of_x32) ? 0 : -1);
    call("call of x32", in_child(pid_of_x32) ? 0 : -1);
#endif
    char ring[256] = "";
    call("io_uring", syscall(SYS_io_uring_setup, 8, ring));
    call("userfaultfd", syscall(SYS_userfaultfd, 1 /* UFFD_USER_MODE_ONLY */));
    never("bpf", syscall(SYS_bpf, 0, (char[128]){0}, 128));
    uint32_t event[32] = {1 /* PERF_TYPE_SOFTWARE */, 128};
    call("perf", syscall(SYS_perf_event_open, event, 0, -1, -1, 0));
    call("fanotify", syscall(SYS_fanotify_init, 0x200 /* FAN_REPORT_FID */, O_RDONLY));
    long key = syscall(SYS_keyctl, 10 /* KEYCTL_SEARCH */, -3 /* session */, "user", KEY, 0);
    char secret[256] = "";
    if (key > 0) syscall(SYS_keyctl, 11 /* KEYCTL_READ */, key, secret, sizeof secret - 1);
    reach("the caller's session keyring", strstr(secret, CANARY) != NULL);
    call("keyctl", syscall(SYS_keyctl, 0 /* KEYCTL_GET_KEYRING_ID */, -3, 0));
    call("add_key", syscall(SYS_add_key, "user", "x", "y", 1, -3));
    key = syscall(SYS_request_key, "user", KEY, 0, 0);
    call("request_key", key);
    never("init_module", syscall(SYS_init_module, "", 0, ""));
    never("finit_module", syscall(SYS_finit_module, 0, "", 0));
    never("delete_module", syscall(SYS_delete_module, "none", O_NONBLOCK));
    never("kexec", syscall(SYS_kexec_load, 0, 0, 0, 0));
    never("swapon", syscall(SYS_swapon, "/frames", 0));
    never("acct", syscall(SYS_acct, "/frames"));
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    never("set the time", syscall(SYS_clock_settime, CLOCK_REALTIME, &now));
    never("set the host's name", sethostname("escaped", 7));
    never("kernel log", syscall(SYS_syslog, 3, secret, sizeof secret));
    never("terminal input", ioctl(0, TIOCSTI, "x"));
    never("terminal paste", ioctl(0, 0x541c /* TIOCLINUX */, "\3"));
#ifdef __x86_64__
    never("iopl", syscall(SYS_iopl, 3));
    never("ioperm", syscall(SYS_ioperm, 0, 1, 1));
    call("modify_ldt", syscall(SYS_modify_ldt, 0, secret, sizeof secret));
#endif
}

/* Whether a file is a setting of this step's own namespaces, or a trigger that only affects its own waiter. */
static int is_own(const char *path) {
    const char *const own[] = {"/proc/sys/kernel/shm", "/proc/sys/kernel/msg", "/proc/sys/kernel/sem", "/proc/sys/kernel/auto_msgmni",
        "/proc/sys/fs/mqueue/", "/proc/sys/net/", "/proc/sys/user/", "/proc/sys/kernel/pid_max",
        "/proc/sys/kernel/ns_last_pid", "/proc/pressure/"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (strncmp(path, own[i], strlen(own[i])) == 0) return 1;
    return 0;
}

/* Whether any file below a directory can be opened for writing. */
static int writes_below(const char *directory, int depth) {
    DIR *list = depth > 8 ? NULL : opendir(directory);
    int any = 0;
    for (struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        char path[4096];
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || entry->d_type == DT_LNK) continue;
        if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) continue;
        if (depth == 0 && (is_number(name) || strcmp(name, "thread-self") == 0)) continue;
        if (entry->d_type == DT_DIR) any |= writes_below(path, depth + 1);
        else if (!is_own(path) && opens(path, O_WRONLY)) any = 1;
    }
    if (list != NULL) closedir(list);
    return any;
}

static void interfaces(void) {
    reach("core pattern", opens("/proc/sys/kernel/core_pattern", O_WRONLY));
    reach("write below /proc", writes_below("/proc", 0));
    reach("write below /sys", writes_below("/sys", 1));
    reach("sysrq", opens("/proc/sysrq-trigger", O_WRONLY));
    reach("kernel's log", opens("/proc/kmsg", O_RDONLY) || opens("/dev/kmsg", O_RDWR));
    reach("kernel's memory", opens("/proc/kcore", O_RDONLY) || opens("/dev/mem", O_RDONLY));
    never("a device in /dev", mknod("/dev/x", S_IFIFO | 0600, 0));
    never("a file in /dev", open("/dev/x", O_CREAT | O_WRONLY, 0600));
    never("rename a device", rename("/dev/null", "/dev/zero"));
    never("replace a device", unlink("/dev/null"));
    struct stat found;
    touch("mode of a device", stat("/dev/null", &found) == 0 ? chmod("/dev/null", found.st_mode) : -1);
    static const char *const harmless[] = {"null", "zero", "full", "random", "urandom", "tty"};
    DIR *list = opendir("/dev");
    int other = 0;
    for (struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        int known = entry->d_type != DT_CHR && entry->d_type != DT_BLK;
        for (size_t i = 0; i < 6; i++) known |= strcmp(entry->d_name, harmless[i]) == 0;
        other |= !known;
    }
    if (list != NULL) closedir(list);
    reach("another device", other);
}

/* Programs that gain privileges on execution. */

static int has_capabilities(void) {
    char text[4096] = "";
    int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC), held = 0;
    if (fd < 0 || read(fd, text, sizeof text - 1) < 0) return 1;
    for (char *line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n"))
        if (strncmp(line, "Cap", 3) == 0) held |= strtoull(strchr(line, ':') + 1, NULL, 16) != 0;
    return held;
}

static int starts_with_capabilities(const char *program) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, "capabilities", NULL);
        _exit(1);
    }
    return child > 0 && waitpid(child, &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void copy(const char *from, const char *to, mode_t mode) {
    static char buffer[1 << 16];
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0755);
    for (ssize_t length; in >= 0 && out >= 0 && (length = read(in, buffer, sizeof buffer)) > 0;)
        if (write(out, buffer, length) != length) break;
    fchmod(out, mode);
    close(in);
    close(out);
}

static void rights(void) {
    reach("a capability", has_capabilities());
    copy("/bin/attack", "/tmp/setuid", 06755);
    reach("a setuid file of this step", starts_with_capabilities("/tmp/setuid"));
    reach("a setuid file of the toolchain", starts_with_capabilities("/bin/setuid"));
    /* All capabilities, effective, as a version 2 attribute. */
    uint32_t all[5] = {0x02000001, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff};
    never("a file capability", setxattr("/tmp/setuid", "security.capability", all, sizeof all, 0));
    reach("a start with file capabilities", starts_with_capabilities("/tmp/setuid"));
    never("a trusted attribute", setxattr("/tmp/setuid", "trusted.overlay.redirect", "/x", 2, 0));
    setxattr("/tmp/setuid", "user.overlay.redirect", "/../../..", 9, 0);
    unlink("/tmp/setuid");
    never("another user", setresuid(65534, 65534, 65534));
    never("another group", setresgid(65534, 65534, 65534));
    never("groups", syscall(SYS_setgroups, 1, (gid_t[1]){0}));
    reach("the caller's supplementary groups", syscall(SYS_getgroups, 0, NULL) > 0);
}

/* With a core limit of 0 the kernel starts the host's program for core dumps; with 1 it does not. */
static int has_core_limit_of_0(void) {
    struct rlimit limit = {0, 0};
    if (getrlimit(RLIMIT_CORE, &limit) != 0 || limit.rlim_cur == 0) return -1;
    limit.rlim_cur = 0;
    return setrlimit(RLIMIT_CORE, &limit) == 0 && getrlimit(RLIMIT_CORE, &limit) == 0 && limit.rlim_cur == 0 ? 0 : -1;
}

/* A step that restricts itself must not affect other processes. */
static int restricts_itself(void) {
    uint64_t handled[1] = {0x1fff};
    int set = syscall(SYS_landlock_create_ruleset, handled, 8, 0);
    if (set < 0) return -1;
    return syscall(SYS_landlock_restrict_self, set, 0) == 0 && !opens("/bin/attack", O_RDONLY) ? 0 : -1;
}

static void restrictions(void) {
    call("core dump to a program", in_child(has_core_limit_of_0) ? 0 : -1);
    in_child(restricts_itself);
    reach("a restriction that stays", !opens("/bin/attack", O_RDONLY));
}

/* Attacks through a leaked descriptor of a directory of the machine. */

static const char *within(const char *name) {
    static char paths[4][4096];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, 4096, "%s/%s", below, name);
    return path;
}
static const char *by_magic_link(const char *name) {
    static char path[8192];
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", leak, within(name));
    return path;
}

static int leaked_program(void) {
    char *words[] = {"attack", "true", NULL}, *none[] = {NULL};
    syscall(SYS_execveat, leak, within("program"), words, none, 0);
    execve(by_magic_link("program"), words, none);
    return -1;
}

static int leaked_socket(void) {
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || fchdir(leak) != 0 || chdir(below) != 0) return -1;
    strcpy(local.sun_path, MARK "-socket");
    return bind(fd, (struct sockaddr *)&local, sizeof local);
}

static int leaked_listener(void) {
    struct sockaddr_un local = {.sun_family = AF_UNIX};
    if (fchdir(leak) != 0 || chdir(below) != 0) return -1;
    strcpy(local.sun_path, "socket");
    return connects(AF_UNIX, &local, sizeof local) ? 0 : -1;
}

static int walks_from_leak(void) {
    if (fchdir(leak) != 0 || chdir(below) != 0) return -1;
    return leads_out(AT_FDCWD) || reads(AT_FDCWD, NAME) ? 0 : -1;
}

static int mapped(void) {
    int fd = openat(leak, within(NAME), O_RDONLY);
    return fd >= 0 && mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED ? 0 : -1;
}

static void leaked_content(void) {
    reach("leak: read", reads(leak, within(NAME)) || reads(AT_FDCWD, by_magic_link(NAME)));
    int path = openat(leak, within(NAME), O_PATH | O_CLOEXEC), again = 0;
    char link_of_path[64];
    snprintf(link_of_path, sizeof link_of_path, "/proc/self/fd/%d", path);
    if (path >= 0) again = reads(AT_FDCWD, link_of_path) || reads(path, "");
    reach("leak: read by a path descriptor", again);
    touch("leak: open a path", path);
    reach("leak: map", in_child(mapped));
    reach("leak: walk", in_child(walks_from_leak));
    int list = openat(leak, below, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    reach("leak: read names", list >= 0);
    char names[4096];
    /* No access right is checked, because the descriptor is already open. */
    touch("leak: read names of the open directory", syscall(SYS_getdents64, leak, names, sizeof names));
    lseek(leak, 0, SEEK_SET);
    never("leak: write", openat(leak, within("keys/" NAME), O_WRONLY));
    never("leak: read and write", openat(leak, within("keys/" NAME), O_RDWR));
    never("leak: append", openat(leak, within("keys/" NAME), O_WRONLY | O_APPEND));
    never("leak: truncate by open", openat(leak, within("keys/truncated"), O_RDONLY | O_TRUNC));
    never("leak: truncate by open for writing", openat(leak, within("keys/truncated"), O_WRONLY | O_TRUNC));
    never("leak: truncate by path", truncate(by_magic_link("keys/truncated"), 0));
    never("leak: create", openat(leak, within(MARK), O_CREAT | O_WRONLY, 0666));
    never("leak: create without a name", openat(leak, below, O_TMPFILE | O_RDWR, 0600));
    never("leak: unlink", unlinkat(leak, within("keys/removed"), 0));
    never("leak: remove a directory", unlinkat(leak, within("keys/empty"), AT_REMOVEDIR));
    never("leak: rename", renameat(leak, within("keys/moved"), leak, within(MARK "-renamed")));
    never("leak: exchange", syscall(SYS_renameat2, leak, within("keys/moved"), leak, within("keys/" NAME), 2));
    never("leak: rename to the build", renameat(leak, within("keys/moved"), AT_FDCWD, "/tmp/moved"));
    close(open("/tmp/mine", O_CREAT | O_WRONLY, 0600));
    never("leak: rename from the build", renameat(AT_FDCWD, "/tmp/mine", leak, within(MARK "-mine")));
    never("leak: link", linkat(leak, within("keys/moved"), leak, within(MARK "-link"), 0));
    never("leak: link to the build", linkat(leak, within("keys/moved"), AT_FDCWD, "/tmp/linked", 0));
    never("leak: link from the build", linkat(AT_FDCWD, "/tmp/mine", leak, within(MARK "-linked"), 0));
    never("leak: mkdir", mkdirat(leak, within(MARK "-directory"), 0755));
    never("leak: symlink", symlinkat("/", leak, within(MARK "-symlink")));
    never("leak: mkfifo", mknodat(leak, within(MARK "-fifo"), S_IFIFO | 0600, 0));
    reach("leak: bind a socket", in_child(leaked_socket));
    reach("leak: connect to a socket", in_child(leaked_listener));
    reach("leak: start a program", in_child(leaked_program));
    never("leak: bind mount", mount(by_magic_link("."), "/tmp", NULL, MS_BIND, NULL));
    never("leak: open_tree", syscall(SYS_open_tree, leak, below, 1));
    never("leak: chroot", fchdir(leak) == 0 ? chroot(".") : -1);
    unlink("/tmp/mine");
    if (chdir("/") != 0) perror("/");
}

static void leaked_metadata(void) {
    struct stat found = {0};
    struct statfs system;
    char text[256];
    const char *file = within("keys/" NAME);
    touch("leak: stat", fstatat(leak, file, &found, 0));
    touch("leak: statfs", statfs(by_magic_link(NAME), &system));
    touch("leak: access", faccessat(leak, file, R_OK, 0));
    touch("leak: readlink", readlinkat(leak, within("link"), text, sizeof text));
    touch("leak: chdir", fchdir(leak));
    if (chdir("/") != 0) perror("/");
    touch("leak: chmod", found.st_mode == 0 ? -1 : fchmodat(leak, file, found.st_mode & 07777, 0));
    touch("leak: chown", fchownat(leak, file, found.st_uid, -1, 0) == 0 && filter == 0 ? 0 : -1);
    touch("leak: set times", utimensat(leak, file, (struct timespec[2]){found.st_atim, found.st_mtim}, 0));
    touch("leak: set an attribute", setxattr(by_magic_link("keys/" NAME), "user.farrier", "x", 1, 0));
    removexattr(by_magic_link("keys/" NAME), "user.farrier");
    touch("leak: list attributes", listxattr(by_magic_link("keys/" NAME), text, sizeof text));
    int watch = inotify_init1(IN_CLOEXEC);
    touch("leak: watch", watch < 0 ? -1 : inotify_add_watch(watch, by_magic_link("."), IN_CREATE));
    if (watch >= 0) close(watch);
}

/* Attacks on limits. Each one waits to be stopped. */

static void held(const char *attack) {
    for (int i = 0; i < 100; i++) nanosleep(&(struct timespec){0, 50000000}, NULL);
    report(attack, ESCAPED);
}

static char *shared_memory(const char *kind, size_t size) {
    int flags = MAP_SHARED;
    if (strcmp(kind, "private") == 0) return mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (strcmp(kind, "shared") == 0) return mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    if (strcmp(kind, "sysv") == 0) {
        int id = shmget(IPC_PRIVATE, size, IPC_CREAT | 0600);
        return id < 0 ? MAP_FAILED : shmat(id, NULL, 0);
    }
    int fd = strcmp(kind, "zero") == 0 ? open("/dev/zero", O_RDWR)
           : strcmp(kind, "dev-shm") == 0 ? open("/dev/shm/bomb", O_CREAT | O_RDWR, 0600)
           : strcmp(kind, "secret") == 0 ? (int)syscall(447 /* memfd_secret */, 0) : (int)syscall(SYS_memfd_create, "bomb", 0);
    if (fd < 0 || (strcmp(kind, "zero") != 0 && ftruncate(fd, size) != 0)) return MAP_FAILED;
    return mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0);
}

/* A write to a page for which there is no space raises SIGBUS. */
static void no_room(int number) {
    (void)number;
    report("memory", DENIED);
    _exit(0);
}

/* A thread that goes on after the main thread, whose end hides the memory of the process in /proc/PID/status. */
static void *fills(void *size) {
    char *bytes = shared_memory("private", *(size_t *)size);
    if (bytes != MAP_FAILED) memset(bytes, 1, *(size_t *)size);
    held("memory");
    return NULL;
}

static void memory(const char *kind, size_t size) {
    signal(SIGBUS, no_room);
    if (strcmp(kind, "small") == 0) {
        size_t each = 4 << 20;
        for (size_t taken = 0; taken < size; taken += each)
            if (fork() == 0) {
                char *bytes = shared_memory("private", each);
                if (bytes != MAP_FAILED) memset(bytes, 1, each);
                for (;;) pause();
            }
        held("memory");
        return;
    }
    pthread_t thread;
    if (strcmp(kind, "thread") == 0 && pthread_create(&thread, NULL, fills, &size) == 0) syscall(SYS_exit, 0);
    char *bytes = shared_memory(kind, size);
    if (bytes == MAP_FAILED) return report("memory", DENIED);
    memset(bytes, 1, size);
    if (strcmp(kind, "unmapped") == 0) munmap(bytes, size);
    held("memory");
}

static void disk(size_t size) {
    static char block[1 << 20];
    memset(block, 1, sizeof block);
    int fd = open("/tmp/full", O_CREAT | O_WRONLY, 0600);
    for (size_t written = 0; written < size; written += sizeof block)
        if (write(fd, block, sizeof block) < 0) return report("disk", DENIED);
    held("disk");
}

static void inodes(long count) {
    mkdir("/tmp/many", 0755);
    for (long i = 0; i < count; i++) {
        char path[64];
        if (i % 1000 == 0) {
            snprintf(path, sizeof path, "/tmp/many/%ld", i / 1000);
            mkdir(path, 0755);
        }
        snprintf(path, sizeof path, "/tmp/many/%ld/%ld", i / 1000, i);
        int fd = open(path, O_CREAT | O_WRONLY, 0600);
        if (fd < 0) return report("inodes", DENIED);
        close(fd);
    }
    held("inodes");
}

static void deep(long levels) {
    for (long i = 0; i < levels; i++)
        if (mkdir("d", 0755) != 0 || chdir("d") != 0) break;
    report("deep", DENIED);
}

static void forks(int count) {
    int made = 0;
    for (int i = 0; i < count; i++) {
        pid_t child = fork();
        if (child < 0) break;
        if (child == 0)
            for (;;) pause();
        made++;
    }
    reach("forks", made == count);
}

static int as_user(char **words) {
    gid_t id = atoi(words[0]);
    if (syscall(SYS_setgroups, 0, NULL) != 0 || setresgid(id, id, id) != 0 || setresuid(id, id, id) != 0)
        return perror("another user"), 1;
    execv(words[1], words + 1);
    perror(words[1]);
    return 1;
}

static int as_caller(char **words) {
    char secret[128] = "";
    int fd = open(words[0], O_RDONLY);
    if (fd < 0 || read(fd, secret, sizeof secret - 1) <= 0 || dup2(fd, 9) != 9) return perror(words[0]), 1;
    lseek(9, 0, SEEK_SET);
    if (fd != 9) close(fd);
    setenv("FARRIER_CANARY", secret, 1);
    if (syscall(SYS_keyctl, 1 /* KEYCTL_JOIN_SESSION_KEYRING */, NULL) < 0 ||
        syscall(SYS_add_key, "user", KEY, secret, strlen(secret), -3) < 0)
        return perror("a session keyring"), 1;
    /* A supplementary group, such as a file server's. Only root can join one here. */
    if (geteuid() == 0 && syscall(SYS_setgroups, 1, (gid_t[1]){48124}) < 0) return perror("a supplementary group"), 1;
    if (geteuid() == 0 && (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0))
        return perror("a mount namespace"), 1;
    execv(words[1], words + 1);
    perror(words[1]);
    return 1;
}

static void read_keys(char **words) {
    for (; *words != NULL; words++) {
        char *value = strchr(*words, '=');
        if (value == NULL) continue;
        *value++ = 0;
        if (strcmp(*words, "outside") == 0) outside = value;
        if (strcmp(*words, "home") == 0) home = value;
        if (strcmp(*words, "abstract") == 0) abstract = value;
        if (strcmp(*words, "port") == 0) port = atoi(value);
        if (strcmp(*words, "filter") == 0) filter = strcmp(value, "off") != 0;
        if (strcmp(*words, "leak") == 0) leak = atoi(value);
        if (strcmp(*words, "below") == 0) below = value;
    }
}

static void all(void) {
    directory_of_this_step();
    descriptors();
    paths();
    processes();
    namespaces();
    sockets();
    kernel();
    interfaces();
    rights();
    restrictions();
    if (leak >= 0) {
        reach("leak: it is there", fcntl(leak, F_GETFD) < 0);
        leaked_content();
        leaked_metadata();
    }
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "", *first = count > 2 ? words[2] : "";
    signal(SIGPIPE, SIG_IGN);
    place = first;
    if (strcmp(what, "all") == 0) read_keys(words + 3), all();
    else if (strcmp(what, "walk") == 0) {
        directory_of_this_step();
        int fd = open(MARK, O_CREAT | O_WRONLY, 0666);
        if (fd >= 0) close(fd);
    } else if (strcmp(what, "true") == 0) return 0;
    else if (strcmp(what, "restore") == 0) return unlink("/tmp") != 0 || mkdir("/tmp", 01777) != 0;
    else if (strcmp(what, "capabilities") == 0) return has_capabilities() ? 0 : 3;
    else if (strcmp(what, "user") == 0) return as_user(words + 2);
    else if (strcmp(what, "delegate") == 0) {
        /* An ordinary user can only read the second attribute. */
        return setxattr(first, "trusted.delegate", "1", 1, 0) != 0 || setxattr(first, "user.delegate", "1", 1, 0) != 0;
    }
    else if (strcmp(what, "caller") == 0) return as_caller(words + 2);
    else if (strcmp(what, "memory") == 0) memory(first, (size_t)atol(words[3]) << 20);
    else if (strcmp(what, "disk") == 0) disk((size_t)atol(first) << 20);
    else if (strcmp(what, "inodes") == 0) inodes(atol(first));
    else if (strcmp(what, "sparse") == 0) {
        int fd = open(first, O_CREAT | O_WRONLY, 0644);
        return fd < 0 || ftruncate(fd, (off_t)atol(words[3]) << 20) != 0;
    } else if (strcmp(what, "deep") == 0) deep(atol(first));
    else if (strcmp(what, "forks") == 0) forks(atoi(first));
    else if (strcmp(what, "linger") == 0)
        for (;;) pause();
    else return 2;
    return 0;
}
