"""A clock that is wrong for a whole process: each of its questions for the time goes through this library."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) { const char *text = getenv("CLOCK_SHIFT"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += shift();
    return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""


def wrong_clock(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a process whose clock is ahead by so much."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler makes the library that moves the clock of a process")
    library = folder / "clock.so"
    if not library.exists():
        source = folder / "clock.c"
        source.write_text(SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(seconds)}
