/* A hostile build step in a pod. It attacks the runner: process 1, and the `follow` processes that farrier has the
 * container runtime start there, as the same user as the steps.
 *
 * Each line of the output is an attack and `denied` or `ESCAPED`; the last line is the number of attacks. The exit status
 * is 66 if any attack succeeded, and 65 if no follower appeared that could be attacked.
 *
 * Compiled by the toolchain of a build, without any options. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ESCAPED 66
#define NO_FOLLOWER 65
/* Number of followers that are attacked from their first instruction on. The test must start at least this many. */
#define FOLLOWERS 6
/* Range of process IDs within which those followers are expected. */
#define NUMBERS 256
/* Timeout for the start of a follower, in seconds. */
#define PATIENCE 60

static int attacks, escapes;

static void report(const char *target, const char *attack, int escaped) {
    attacks++;
    escapes += escaped != 0;
    printf("%s: %s %s\n", target, attack, escaped ? "ESCAPED" : "denied");
    fflush(stdout);
}

static int opens(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC);
    if (fd >= 0) close(fd);
    return fd >= 0;
}

static const char *of(int pid, const char *what) {
    static char path[4096];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, what);
    return path;
}

static int lists(const char *path) {
    DIR *directory = opendir(path);
    if (directory) closedir(directory);
    return directory != NULL;
}

static int links(const char *path) {
    char target[4096];
    return readlink(path, target, sizeof target) >= 0;
}

/* Whether a process is a follower: its first argument is `follow`. */
static int follows(int pid) {
    char words[256];
    int fd = open(of(pid, "cmdline"), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t length = read(fd, words, sizeof words - 1);
    close(fd);
    if (length <= 0) return 0;
    words[length] = 0;
    size_t first = strlen(words) + 1;
    return first < (size_t)length && strcmp(words + first, "follow") == 0;
}

/* Waits for a follower with a process ID above this one, which therefore started later. Returns 0 on timeout. */
static int follower(int above) {
    time_t end = time(NULL) + PATIENCE;
    while (time(NULL) < end) {
        int found = 0;
        DIR *processes = opendir("/proc");
        for (struct dirent *entry; processes && (entry = readdir(processes));) {
            int pid = atoi(entry->d_name);
            if (pid > above && follows(pid)) found = pid;
        }
        if (processes) closedir(processes);
        if (found) return found;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return 0;
}

static void attack_process(const char *target, int pid) {
    static const char *const read[] = {"mem", "exe", "environ", "auxv", "maps", "smaps", "pagemap", "stack", "syscall", "personality",
                                       "io", "root/etc/passwd", "cwd/etc/passwd", "fd/0", "fd/1", "fd/2", "fd/3", "fd/4", "fd/5",
                                       "fd/6", "fd/7", "fd/8", "fd/9", "ns/mnt", "ns/pid", "ns/user"};
    static const char *const written[] = {"mem", "fd/0", "fd/1", "fd/2", "fd/3", "fd/4", "fd/5", "fd/6", "fd/7", "fd/8", "fd/9",
                                          "clear_refs", "oom_score_adj", "coredump_filter", "uid_map", "setgroups"};
    static const char *const listed[] = {"fd", "fdinfo", "map_files", "cwd", "root"};
    static const char *const linked[] = {"exe", "cwd", "root", "fd/1", "ns/mnt"};
    char attack[256], task[256];
    char byte = 0;
    struct iovec here = {&byte, 1}, there = {&attacks, 1};

    for (size_t i = 0; i < sizeof read / sizeof *read; i++) {
        snprintf(attack, sizeof attack, "read %s", read[i]);
        report(target, attack, opens(of(pid, read[i]), O_RDONLY | O_NONBLOCK));
    }
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) {
        snprintf(attack, sizeof attack, "write %s", written[i]);
        report(target, attack, opens(of(pid, written[i]), O_WRONLY | O_NONBLOCK));
    }
    for (size_t i = 0; i < sizeof listed / sizeof *listed; i++) {
        snprintf(attack, sizeof attack, "list %s", listed[i]);
        report(target, attack, lists(of(pid, listed[i])));
    }
    for (size_t i = 0; i < sizeof linked / sizeof *linked; i++) {
        snprintf(attack, sizeof attack, "follow the link %s", linked[i]);
        report(target, attack, links(of(pid, linked[i])));
    }
    snprintf(task, sizeof task, "task/%d/mem", pid);
    report(target, "write the memory of its thread", opens(of(pid, task), O_RDWR));
    snprintf(task, sizeof task, "task/%d/fd/1", pid);
    report(target, "write the output of its thread", opens(of(pid, task), O_WRONLY | O_NONBLOCK));

    report(target, "attach", ptrace(PTRACE_ATTACH, pid, 0, 0) == 0);
    report(target, "seize", ptrace(PTRACE_SEIZE, pid, 0, 0) == 0);
    report(target, "read its memory by number", process_vm_readv(pid, &here, 1, &there, 1, 0) >= 0);
    report(target, "write its memory by number", process_vm_writev(pid, &here, 1, &there, 1, 0) >= 0);
    long pidfd = syscall(SYS_pidfd_open, pid, 0);
    for (int fd = 0; fd < 10; fd++) {
        snprintf(attack, sizeof attack, "take its descriptor %d", fd);
        report(target, attack, pidfd >= 0 && syscall(SYS_pidfd_getfd, pidfd, fd, 0) >= 0);
    }
    report(target, "enter its namespaces", pidfd >= 0 && syscall(SYS_setns, pidfd, 0x20000) == 0);
    if (pidfd >= 0) close(pidfd);
}

/* State of a process: R, S, T, ...; 0 if the process is gone. */
static char state(int pid) {
    char line[512];
    FILE *file = fopen(of(pid, "stat"), "re");
    if (!file) return 0;
    char *name = fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    fclose(file);
    return name && name[1] ? name[2] : 0;
}

static void signal_process_1(void) {
    static const int signals[] = {SIGKILL, SIGSTOP, SIGTERM, SIGINT, SIGHUP, SIGTSTP, SIGUSR1, SIGALRM};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) kill(1, signals[i]);
    char seen = state(1);
    report("process 1", "end or stop it by signals", seen == 0 || seen == 'T' || seen == 'Z' || seen == 'X');
}

static int exists(const char *path) {
    struct stat found;
    return lstat(path, &found) == 0;
}

/* Whether a program succeeds; used to run the runner from a step. */
static int runs(const char *program, const char *word, const char *more) {
    pid_t child = fork();
    int status = 1;
    if (child == 0) {
        int nowhere = open("/dev/null", O_RDWR);
        dup2(nowhere, 1);
        dup2(nowhere, 2);
        execl(program, program, word, more, NULL);
        _exit(127);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void attack_files(void) {
    const char *target = "the runner's files";
    struct stat before, after;
    lstat("/.farrier", &before);
    report(target, "read the runner", opens("/.farrier/runner", O_RDONLY));
    report(target, "write the runner", opens("/.farrier/runner", O_WRONLY));
    report(target, "write the plan", opens("/.farrier/plan", O_WRONLY));
    report(target, "truncate the plan", truncate("/.farrier/plan", 0) == 0);
    report(target, "make a file beside it", opens("/.farrier/.new", O_WRONLY | O_CREAT));
    report(target, "make a file in the context", opens("/.farrier/context/.new", O_WRONLY | O_CREAT));
    report(target, "remove the runner", unlink("/.farrier/runner") == 0);
    report(target, "remove the plan", unlink("/.farrier/plan") == 0);
    report(target, "move the runner", rename("/.farrier/runner", "/tmp/.runner") == 0);
    report(target, "move the directory", rename("/.farrier", "/tmp/.farrier-moved") == 0);
    report(target, "move the context", rename("/.farrier/context", "/tmp/.context") == 0);
    symlink("/tmp", "/tmp/.farrier-link");
    report(target, "replace the directory", rename("/tmp/.farrier-link", "/.farrier") == 0);
    report(target, "replace the runner", rename("/tmp/.farrier-link", "/.farrier/runner") == 0);
    report(target, "replace the root's entries", symlink("/tmp", "/.farrier-new") == 0);
    report(target, "exchange the directory",
           mkdir("/tmp/.exchanged", 0755) == 0 && syscall(SYS_renameat2, AT_FDCWD, "/tmp/.exchanged", AT_FDCWD, "/.farrier", 2) == 0);
    report(target, "open the directory to all", chmod("/.farrier", 0777) == 0);
    report(target, "open the runner to all", chmod("/.farrier/runner", 0777) == 0);
    report(target, "mount over them", mount("/tmp", "/.farrier", NULL, MS_BIND, NULL) == 0);
    /* The seccomp filter fakes success, so check the actual owner. */
    if (chown("/.farrier", getuid(), getgid()) != 0) errno = 0;
    report(target, "own the directory", lstat("/.farrier", &after) != 0 || after.st_uid != before.st_uid || after.st_uid == getuid());
    report(target, "ask the runner", runs("/.farrier/runner", "follow", "0"));
    report(target, "be a second runner", runs("/.farrier/runner", "pod", NULL));
    report(target, "see the kept messages", exists("/tmp/.farrier-messages"));
}

/* Fills in the abstract address at which the runner serves its messages. */
static socklen_t runners_name(struct sockaddr_un *address) {
    static const char name[] = "farrier-runner";
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name, sizeof name - 1);
    return offsetof(struct sockaddr_un, sun_path) + 1 + sizeof name - 1;
}

static void attack_socket(void) {
    static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    const char *target = "the runner's socket";
    struct sockaddr_un address;
    socklen_t length = runners_name(&address);
    char attack[64];
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        snprintf(attack, sizeof attack, "a socket of type %d", types[i]);
        report(target, attack, socket(AF_UNIX, types[i], 0) >= 0);
        int pair[2] = {-1, -1};
        int made = socketpair(AF_UNIX, types[i], 0, pair) == 0;
        snprintf(attack, sizeof attack, "connect a pair of type %d", types[i]);
        report(target, attack, made && connect(pair[0], (struct sockaddr *)&address, length) == 0);
        snprintf(attack, sizeof attack, "send from a pair of type %d", types[i]);
        report(target, attack,
               made && types[i] == SOCK_DGRAM && sendto(pair[0], "", 1, MSG_NOSIGNAL, (struct sockaddr *)&address, length) >= 0);
        snprintf(attack, sizeof attack, "listen with a pair of type %d", types[i]);
        report(target, attack, made && listen(pair[0], 1) == 0);
        if (made) close(pair[0]), close(pair[1]);
    }
}

/* Writes forged messages to every open descriptor of the step: the self-test's result, and the end of the build. */
static void write_frames(void) {
    static const char frames[] = "\0\0\0\4\1\1\1a" "\0\0\0\x09\5\4\6forged\n";
    char attack[64];
    for (int fd = 0; fd < 1024; fd++) {
        if (fcntl(fd, F_GETFD) < 0) continue;
        /* On the step's own output, forged messages are just output, and the build continues. */
        if (write(fd, frames, sizeof frames - 1) < 0) errno = 0;
        snprintf(attack, sizeof attack, "frames to descriptor %d", fd);
        report("descriptors", attack, fd > 2);
    }
    report("descriptors", "the message file by a name of its own", opens("/proc/self/fd/3", O_RDWR) || opens("/dev/fd/4", O_RDWR));
}

/* Attacks every new process as fast as possible until the other end of the pipe is closed. Only a process of another
 * process group was started by the container runtime. Process IDs ascend, so the followers' IDs are among the next few. */
static void hammer(int result, int stop) {
    static const struct { const char *what; int flags; } places[] = {
        {"mem", O_RDWR}, {"fd/1", O_WRONLY | O_NONBLOCK}, {"exe", O_RDONLY}, {"environ", O_RDONLY}, {"maps", O_RDONLY}};
    unsigned char got = 0;
    char byte;
    fcntl(stop, F_SETFL, O_NONBLOCK);
    while (read(stop, &byte, 1) < 0)
        for (int pid = getpid() + 1; pid < getpid() + NUMBERS; pid++)
            for (size_t i = 0; kill(pid, 0) == 0 && i < sizeof places / sizeof *places; i++)
                if (opens(of(pid, places[i].what), places[i].flags) && getpgid(pid) >= 0 && getpgid(pid) != getpgrp()) got |= 1 << i;
    if (write(result, &got, 1) != 1) _exit(1);
    _exit(0);
}

/* Attacks followers from their first instruction on. */
static int attack_beginnings(int pid) {
    static const char *const names[] = {"write its memory", "write its output", "read its program", "read its environment",
                                        "read its addresses"};
    int result[2], stop[2];
    if (pipe2(result, O_CLOEXEC) != 0 || pipe2(stop, O_CLOEXEC) != 0) return 0;
    pid_t child = fork();
    if (child == 0) {
        close(stop[1]);
        hammer(result[1], stop[0]);
    }
    close(result[1]);
    for (int i = 0; i < FOLLOWERS && pid; i++) {
        /* If Landlock does not prevent the signal, it kills the follower, and farrier starts another one. */
        kill(pid, SIGSTOP);
        int ended = kill(pid, SIGKILL) == 0;
        if (i == 0) printf("signals %s the follower\n", ended ? "reach" : "do not reach");
        pid = follower(pid);
    }
    close(stop[1]);
    unsigned char got = 0xff;
    if (read(result[0], &got, 1) != 1) got = 0xff;
    waitpid(child, NULL, 0);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) report("a follower that begins", names[i], got >> i & 1);
    return pid;
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    write_frames();
    int pid = follower(1);
    if (pid) attack_process("the follower", pid);
    attack_process("process 1", 1);
    signal_process_1();
    attack_files();
    attack_socket();
    if (pid) pid = attack_beginnings(pid);
    printf("%d attacks\n", attacks);
    if (escapes) return ESCAPED;
    if (!pid) return puts("no follower came"), NO_FOLLOWER;
    return 0;
}
