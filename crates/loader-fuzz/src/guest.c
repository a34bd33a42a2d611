/* Init of the virtual machine: loads mutants of /plan, and reports the kernel's answers to the device of the first argument.
 *
 * The plan consists of 32-bit little-endian words and of bytes:
 *
 *     number of bases; for each base: length, bytes
 *     for each mutant up to the end: number, index of the base, length, number of edits;
 *         for each edit: offset, length, bytes
 *
 * Lines of the report:
 *
 *     W               init waits for a line with the offset in the plan of the first mutant to load; repeated
 *     B NUMBER        before a load
 *     K TEXT          a kernel message during the load
 *     R NUMBER ERRNO  after the load; 0 if it succeeded
 *     S NUMBER        the module cannot be unloaded, and the machine restarts
 *     X TEXT          init failed
 *     E               end of the report */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static FILE *report;
static int kmsg;

static void give_up(const char *what) {
    fprintf(report ? report : stderr, "X %s: %s\n", what, strerror(errno));
    fflush(NULL);
    sync();
    reboot(RB_AUTOBOOT);
    for (;;) pause();
}

static uint32_t word(FILE *plan) {
    unsigned char bytes[4];
    if (fread(bytes, 4, 1, plan) != 1) give_up("read a word of the plan");
    return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static unsigned char *bytes(FILE *plan, size_t length) {
    unsigned char *content = malloc(length + 1);
    if (!content) give_up("allocate");
    if (length && fread(content, length, 1, plan) != 1) give_up("read bytes of the plan");
    return content;
}

/* Reads all new kernel messages. If asked to, reports the first 12 of them. Writes a message first, because the kernel completes a
 * message without a line feed only when the next one follows. */
static void read_messages(int report_them) {
    static const char last[] = "end of messages";
    char record[8192];
    if (write(kmsg, last, sizeof last - 1) < 0) give_up("write to /dev/kmsg");
    int count = 0;
    for (;;) {
        ssize_t length = read(kmsg, record, sizeof record - 1);
        if (length < 0 && errno == EPIPE) continue;
        if (length <= 0) return;
        record[length] = 0;
        char *text = strchr(record, ';');
        if (!text || !report_them || ++count > 12) continue;
        text[1 + strcspn(text + 1, "\n")] = 0;
        if (!strcmp(text + 1, last)) continue;
        fprintf(report, "K %.200s\n", text + 1);
    }
}

/* Unloads the module that was loaded last. */
static int unload(void) {
    char name[64] = "";
    FILE *modules = fopen("/proc/modules", "r");
    if (!modules) give_up("open /proc/modules");
    int found = fscanf(modules, "%63s", name);
    fclose(modules);
    return found == 1 && syscall(SYS_delete_module, name, O_NONBLOCK) == 0;
}

int main(int argc, char **argv) {
    mkdir("/dev", 0755);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    if (mount("devtmpfs", "/dev", "devtmpfs", 0, NULL) || mount("proc", "/proc", "proc", 0, NULL) ||
        mount("sysfs", "/sys", "sysfs", 0, NULL))
        give_up("mount");
    FILE *limit = fopen("/proc/sys/kernel/printk_devkmsg", "w");
    if (!limit || fputs("on\n", limit) < 0 || fclose(limit)) give_up("allow many messages");
    report = fopen(argc > 1 ? argv[1] : "/dev/console", "w");
    kmsg = open("/dev/kmsg", O_RDWR | O_NONBLOCK);
    FILE *plan = fopen("/plan", "r"), *input = fopen(argc > 1 ? argv[1] : "/dev/console", "r");
    if (!report || kmsg < 0 || !plan || !input) give_up("open the report, /dev/kmsg or /plan");
    uint32_t count = word(plan), *lengths = calloc(count, sizeof *lengths);
    unsigned char **bases = calloc(count, sizeof *bases);
    for (uint32_t i = 0; i < count; i++) {
        lengths[i] = word(plan);
        bases[i] = bytes(plan, lengths[i]);
    }
    struct pollfd answer = {.fd = fileno(input), .events = POLLIN};
    do {
        fprintf(report, "W\n");
        fflush(report);
    } while (poll(&answer, 1, 100) == 0);
    long start;
    if (fscanf(input, "%ld", &start) != 1 || fseek(plan, start, SEEK_SET)) give_up("read where to start");
    for (int next; (next = getc(plan)) != EOF;) {
        ungetc(next, plan);
        uint32_t number = word(plan), base = word(plan), length = word(plan), edits = word(plan);
        if (base >= count) give_up("find the base of a mutant");
        unsigned char *module = calloc(1, length > lengths[base] ? length : lengths[base] + 1);
        memcpy(module, bases[base], lengths[base]);
        while (edits-- > 0) {
            uint32_t offset = word(plan), size = word(plan);
            unsigned char *content = bytes(plan, size);
            memcpy(module + offset, content, size);
            free(content);
        }
        read_messages(0);
        fprintf(report, "B %u\n", number);
        fflush(report);
        int error = syscall(SYS_init_module, module, (unsigned long)length, "") ? errno : 0;
        read_messages(1);
        fprintf(report, "R %u %d\n", number, error);
        fflush(report);
        free(module);
        if (!error && !unload()) {
            fprintf(report, "S %u\n", number);
            fflush(report);
            sync();
            reboot(RB_AUTOBOOT);
        }
    }
    fprintf(report, "E\n");
    fflush(report);
    sync();
    reboot(RB_AUTOBOOT);
    for (;;) pause();
}
