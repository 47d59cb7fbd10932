/*
 * slow_fsync.c - fsync() and fdatasync() as of a disk under control; for LD_PRELOAD.
 *
 * $SLOW_FSYNC is a file of two 32-bit numbers that may change at any time: microseconds, and per cent. A call takes
 * the time that the kernel takes, between half and one and a half times the microseconds more, and then that
 * many per cent of both.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { LATE = 60000 }; /* ns by which a sleep may end too late: so much is waited for in a loop */

static const volatile uint32_t *control;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("SLOW_FSYNC");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page;

    if (fd < 0)
        return;
    page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        control = page;
    close(fd);
}

static int64_t now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void until(int64_t end)
{
    int64_t most = end - now() - LATE;

    if (most > 0) {
        struct timespec t = {most / 1000000000, most % 1000000000};

        prctl(PR_SET_TIMERSLACK, 1UL);
        nanosleep(&t, NULL);
    }
    while (now() < end)
        ;
}

static int slow(const char *name, int fd)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int64_t began = now(), end;
    int result = real(fd), error = errno;

    if (control && (control[0] || control[1])) {
        /* Any number that is not the same each time. */
        uint64_t chance = (uint64_t)began * UINT64_C(0x9e3779b97f4a7c15) >> 40;

        end = now() + (int64_t)(control[0] * UINT64_C(1000) * (chance + (1 << 23)) >> 24);
        until(end + (end - began) * control[1] / 100);
    }
    errno = error;
    return result;
}

int fsync(int fd) { return slow("fsync", fd); }
int fdatasync(int fd) { return slow("fdatasync", fd); }
