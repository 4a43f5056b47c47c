/* Preloaded into a command: changes of files below a folder fail from some change on, as on a broken disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[4096];
static int fault;
static long passing;

/* Let changes below `folder` fail with `error` after `count` changes. EROFS concerns names and opened files, too. */
void fail_changes(const char *folder, int error, long count) {
    snprintf(below, sizeof below, "%s", folder);
    passing = count;
    fault = error;
}

static int fails(const char *path) {
    if (!fault || strncmp(path, below, strlen(below)) || __atomic_fetch_sub(&passing, 1, __ATOMIC_SEQ_CST) > 0)
        return 0;
    errno = fault;
    return 1;
}

static int descriptor_fails(int fd) {
    char link[64], path[4096];
    if (!fault)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(path);
}

static int name_fails(int folder, const char *name) {
    char link[64], path[8192];
    if (fault != EROFS)
        return 0;
    if (name[0] == '/' || folder == AT_FDCWD)
        return fails(name);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, path, 4096);
    if (length < 0)
        return 0;
    snprintf(path + length, sizeof path - length, "/%s", name);
    return fails(path);
}

static int open_fails(int folder, const char *name, int flags) {
    return (flags & (O_WRONLY | O_RDWR | O_CREAT)) && name_fails(folder, name);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define DESCRIPTOR(type, name, fd, parameters, arguments) \
    type name parameters { return descriptor_fails(fd) ? -1 : NEXT(name) arguments; }
#define NAME(name, folder, path, parameters, arguments) \
    int name parameters { return name_fails(folder, path) ? -1 : NEXT(name) arguments; }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        return open_fails(AT_FDCWD, path, flags) ? -1 : NEXT(name)(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        return open_fails(folder, path, flags) ? -1 : NEXT(name)(folder, path, flags, mode); \
    }
#define FOPEN(name) \
    FILE *name(const char *path, const char *how) { \
        return strpbrk(how, "wa+") && name_fails(AT_FDCWD, path) ? NULL : NEXT(name)(path, how); \
    }

DESCRIPTOR(ssize_t, write, fd, (int fd, const void *data, size_t size), (fd, data, size))
DESCRIPTOR(ssize_t, pwrite, fd, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
DESCRIPTOR(ssize_t, pwrite64, fd, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
DESCRIPTOR(ssize_t, writev, fd, (int fd, const struct iovec *parts, int count), (fd, parts, count))
DESCRIPTOR(ssize_t, sendfile, fd, (int fd, int source, off_t *at, size_t size), (fd, source, at, size))
DESCRIPTOR(ssize_t, copy_file_range, fd,
    (int source, off64_t *from, int fd, off64_t *at, size_t size, unsigned flags), (source, from, fd, at, size, flags))
DESCRIPTOR(int, fsync, fd, (int fd), (fd))
DESCRIPTOR(int, fdatasync, fd, (int fd), (fd))
DESCRIPTOR(int, ftruncate64, fd, (int fd, off64_t size), (fd, size))
size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    return descriptor_fails(fileno(file)) ? 0 : NEXT(fwrite)(data, size, count, file);
}
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
NAME(mkdir, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
NAME(mkdirat, folder, path, (int folder, const char *path, mode_t mode), (folder, path, mode))
NAME(rmdir, AT_FDCWD, path, (const char *path), (path))
NAME(unlink, AT_FDCWD, path, (const char *path), (path))
NAME(unlinkat, folder, path, (int folder, const char *path, int flags), (folder, path, flags))
NAME(rename, AT_FDCWD, new, (const char *old, const char *new), (old, new))
NAME(renameat2, at, new, (int folder, const char *old, int at, const char *new, unsigned flags),
    (folder, old, at, new, flags))
NAME(link, AT_FDCWD, new, (const char *old, const char *new), (old, new))
NAME(symlink, AT_FDCWD, new, (const char *old, const char *new), (old, new))
NAME(chmod, AT_FDCWD, path, (const char *path, mode_t mode), (path, mode))
