/* A library for LD_PRELOAD that counts every call by which this process changes files under one folder, and at a given
 * one kills the process (in the middle, if it is a write) or lets the disk be full from then on.
 *
 * Not seen: writes through mmap. fsync is counted but not done: a killed process loses nothing that it wrote. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, FULL };
enum { MOST = 1 << 16 };

static char root[PATH_MAX];
static int armed, action, no_exchange;
static long count, target;
static char log_of[MOST][96];

/* Start to count, with nothing counted yet. `swaps` 0: the file system cannot exchange two names. */
void write_points_arm(const char *folder, int what, long at, int swaps) {
    strncpy(root, folder, sizeof root - 1);
    action = what, target = at, count = 0, no_exchange = !swaps, armed = 1;
}

long write_points_count(void) { return armed = 0, count; }
const char *write_points_name(long number) { return log_of[number]; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void locate(int folder, const char *path, char *out) {
    char link[64];
    ssize_t size = 0;
    out[0] = 0;
    if (path == NULL || path[0] != '/') {
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        size = readlink(link, out, PATH_MAX - 1);
        if (size < 0) size = 0;
        out[size] = 0;
    }
    if (path != NULL) snprintf(out + size, PATH_MAX - size, "%s%s", size ? "/" : "", path);
}

/* Count one call on `path`; 1 if the disk is full for it, 2 if the process is to be killed in its middle. */
static int point(const char *call, int folder, const char *path, int takes_space) {
    char full[2 * PATH_MAX];
    if (!armed) return 0;
    int before = errno;
    locate(folder, path, full);
    errno = before;
    if (strncmp(full, root, strlen(root)) != 0) return 0;
    if (++count < MOST) snprintf(log_of[count], sizeof log_of[0], "%s%c %s", call, takes_space ? '+' : ' ', full + strlen(root));
    if (action == KILL && count == target) {
        if (takes_space > 1) return 2;
        kill(getpid(), SIGKILL);
    }
    if (action == FULL && count >= target && takes_space) return errno = ENOSPC, 1;
    return 0;
}

#define POINT(call, folder, path, space, failed) if (point(call, folder, path, space)) return failed

static int creates(int folder, const char *path, int flags) {
    struct stat unused;
    if (flags & O_TRUNC) return 1;
    return (flags & O_CREAT) && fstatat(folder, path, &unused, 0) != 0;
}

#define MODE(flags) int mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }
#define OPEN(name)                                                                     \
    int name(const char *path, int flags, ...) {                                       \
        MODE(flags)                                                                    \
        if (armed && creates(AT_FDCWD, path, flags)) POINT("open", AT_FDCWD, path, 1, -1); \
        return REAL(name)(path, flags, mode);                                          \
    }
#define OPENAT(name)                                                                   \
    int name(int folder, const char *path, int flags, ...) {                           \
        MODE(flags)                                                                    \
        if (armed && creates(folder, path, flags)) POINT("open", folder, path, 1, -1);  \
        return REAL(name)(folder, path, flags, mode);                                  \
    }
#define FOPEN(name)                                                                    \
    FILE *name(const char *path, const char *mode) {                                   \
        if (mode[0] != 'r') POINT("open", AT_FDCWD, path, 1, NULL);                    \
        return REAL(name)(path, mode);                                                 \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)

#define WRITE(name, arguments, all, half)                                              \
    ssize_t name arguments {                                                           \
        int fault = point("write", fd, NULL, 2);                                       \
        if (fault == 1) return -1;                                                     \
        if (fault == 2) { (void)!REAL(name) half; kill(getpid(), SIGKILL); }           \
        return REAL(name) all;                                                         \
    }
WRITE(write, (int fd, const void *data, size_t size), (fd, data, size), (fd, data, size / 2))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), (fd, data, size / 2, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), (fd, data, size / 2, at))
WRITE(writev, (int fd, const struct iovec *parts, int n), (fd, parts, n), (fd, parts, n / 2))

#define BY_NAME(name, arguments, folder, space, all) \
    int name arguments { POINT(#name, folder, path, space, -1); return REAL(name) all; }
BY_NAME(unlink, (const char *path), AT_FDCWD, 0, (path))
BY_NAME(unlinkat, (int folder, const char *path, int flags), folder, 0, (folder, path, flags))
BY_NAME(rmdir, (const char *path), AT_FDCWD, 0, (path))
BY_NAME(mkdir, (const char *path, mode_t mode), AT_FDCWD, 1, (path, mode))
BY_NAME(mkdirat, (int folder, const char *path, mode_t mode), folder, 1, (folder, path, mode))
BY_NAME(rename, (const char *from, const char *path), AT_FDCWD, 0, (from, path))
BY_NAME(renameat, (int other, const char *from, int folder, const char *path), folder, 0, (other, from, folder, path))
BY_NAME(link, (const char *from, const char *path), AT_FDCWD, 1, (from, path))
BY_NAME(linkat, (int other, const char *from, int folder, const char *path, int flags), folder, 1,
        (other, from, folder, path, flags))
BY_NAME(symlink, (const char *from, const char *path), AT_FDCWD, 1, (from, path))

int renameat2(int other, const char *from, int folder, const char *path, unsigned flags) {
    if (armed && no_exchange && flags) return errno = EINVAL, -1;
    POINT("renameat2", folder, path, 0, -1);
    return REAL(renameat2)(other, from, folder, path, flags);
}

#define BY_FD(name, arguments, all, done) \
    int name arguments { POINT(#name, fd, NULL, 1, -1); return armed && done ? 0 : REAL(name) all; }
BY_FD(fsync, (int fd), (fd), 1)
BY_FD(fdatasync, (int fd), (fd), 1)
BY_FD(ftruncate, (int fd, off_t size), (fd, size), 0)
BY_FD(ftruncate64, (int fd, off64_t size), (fd, size), 0)
