/* Loaded ahead of libc: counts the steps that a process takes with some files, and kills it there.

   A step is a write, a sync, a truncation or an unlinking of a file whose path begins as it was
   said to `crash_arm`, or of a temporary file beside them. Steps are counted across all threads. At
   step `at` the process dies: before it, or, where `is_half`, in the middle of it, when half of the
   bytes are written; what has no middle is done, and then it dies. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char files[PATH_MAX];
static _Atomic long *steps; /* memory that outlives the process */
static long at;
static int is_half;

void crash_arm(const char *prefix, long *counter, long step, int half)
{
    strncpy(files, prefix, sizeof files - 1);
    at = step;
    is_half = half;
    steps = (_Atomic long *)counter;
}

static int is_path_ours(const char *path)
{
    return steps && strncmp(path, files, strlen(files)) == 0;
}

static int is_ours(int fd)
{
    char link[64], path[PATH_MAX] = "";
    if (!steps)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && is_path_ours(path);
}

static void die(void)
{
    for (;;)
        kill(getpid(), SIGKILL);
}

/* Counts a step, and dies where it is due before that. Whether it is due in the middle. */
static int step(void)
{
    if (atomic_fetch_add(steps, 1) + 1 != at)
        return 0;
    if (!is_half)
        die();
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WRITING(name, offset_type)                                                       \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset)              \
    {                                                                                    \
        if (is_ours(fd) && step()) {                                                     \
            REAL(name)(fd, data, size / 2, offset);                                      \
            die();                                                                       \
        }                                                                                \
        return REAL(name)(fd, data, size, offset);                                       \
    }

#define DOING(name, parameters, ours, arguments)                                         \
    int name parameters                                                                  \
    {                                                                                    \
        if (ours && step()) {                                                            \
            REAL(name) arguments;                                                        \
            die();                                                                       \
        }                                                                                \
        return REAL(name) arguments;                                                     \
    }

WRITING(pwrite, off_t)
WRITING(pwrite64, off64_t)
DOING(fsync, (int fd), is_ours(fd), (fd))
DOING(fdatasync, (int fd), is_ours(fd), (fd))
DOING(ftruncate, (int fd, off_t size), is_ours(fd), (fd, size))
DOING(ftruncate64, (int fd, off64_t size), is_ours(fd), (fd, size))
DOING(unlink, (const char *path), is_path_ours(path), (path))
DOING(link, (const char *from, const char *to), is_path_ours(to), (from, to))

ssize_t write(int fd, const void *data, size_t size)
{
    if (is_ours(fd) && step()) {
        REAL(write)(fd, data, size / 2);
        die();
    }
    return REAL(write)(fd, data, size);
}
