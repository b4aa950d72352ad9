"""Confines a child process that runs what strangers wrote: chat templates and tokenizers. Standard library alone.

The child imports and reads all it will need, calls :func:`confine`, and only then touches what a stranger wrote. From
then on it computes, allocates memory, and reads and writes the pipes that it has. The kernel refuses each other system
call with ``EPERM``. So it opens no file, makes no socket, starts no program or process and signals no other. An import
fails too: modules that are loaded late must be loaded before.

A child that knows no path of ours loads this module by its file, as ``chat_templates/sandbox/worker/__main__.py`` does.
"""

import ctypes
import errno
import os
import resource
import sys
import threading
import time
from functools import cache

LIBRARY = "libseccomp.so.2"
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000  # Actions of libseccomp. The errno is added to the second.
_TSYNC, _OPTIMIZE = 4, 8  # Attributes of libseccomp: the filter holds for all threads; it is a tree, not a list.
_EQUAL, _MASKED_EQUAL = 4, 7
_CLONE_THREAD = 0x00010000

_CALLS = (
    # pipes that are open
    "read", "readv", "write", "writev", "lseek", "fstat", "close", "poll", "ppoll", "select", "pselect6",
    # memory
    "brk", "madvise", "mmap", "mprotect", "mremap", "munmap",
    # threads and locks
    "futex", "gettid", "membarrier", "rseq", "sched_getaffinity", "sched_yield", "set_robust_list", "sigaltstack",
    # time
    "clock_getres", "clock_gettime", "clock_nanosleep", "gettimeofday", "nanosleep", "restart_syscall", "times",
    # this process
    "exit", "exit_group", "getpid", "getppid", "getrandom", "getrlimit", "getrusage", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sysinfo",
)


class _Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp``: what one argument of a call must be."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


@cache
def _library() -> ctypes.CDLL | None:
    """libseccomp, if it is installed and this kernel can filter all threads of a process."""
    try:
        library = ctypes.CDLL(LIBRARY)
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_rule_add_array.argtypes = (
            ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison)
        )
        library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
        library.seccomp_load.argtypes = (ctypes.c_void_p,)
        library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
        return library if library.seccomp_api_get() >= 2 else None
    except (OSError, AttributeError):
        return None


def missing() -> str:
    """What this machine lacks for :func:`confine`, as a sentence; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no seccomp, which refuses system calls to a child process."
    if _library() is None:
        return f"{LIBRARY} was not found, or the kernel does not let it filter system calls."
    return ""


def _filter_calls(library: ctypes.CDLL, threads: bool) -> bool:
    """Whether the kernel took the filter. libseccomp sets ``no_new_privs`` with it."""
    rules = ctypes.c_void_p(library.seccomp_init(_REFUSE | errno.EPERM))

    def add(name: str, *conditions: _Comparison, action: int = _ALLOW) -> bool:
        number = library.seccomp_syscall_resolve_name(name.encode())
        compared = (_Comparison * len(conditions))(*conditions)
        return library.seccomp_rule_add_array(rules, action, number, len(conditions), compared) == 0

    for name in _CALLS:
        add(name)  # a name that this kind of processor does not have is no fault: it stays refused
    own, read_only = _Comparison(0, _EQUAL, 0), _Comparison(2, _EQUAL, 0)
    limits_itself = add("prlimit64", own, read_only) and all(
        add("prlimit64", own, _Comparison(1, _EQUAL, kind)) for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS)
    )
    aborts_itself = add("tgkill", _Comparison(0, _EQUAL, os.getpid()))
    # The flags of clone3 lie in memory, where no filter sees them. Told that it is unknown, the C library uses clone.
    hides = add("clone3", action=_REFUSE | errno.ENOSYS)
    starts = not threads or add("clone", _Comparison(0, _MASKED_EQUAL, _CLONE_THREAD, _CLONE_THREAD))
    library.seccomp_attr_set(rules, _OPTIMIZE, 2)
    synced = library.seccomp_attr_set(rules, _TSYNC, 1) == 0
    return all((limits_itself, aborts_itself, hides, starts, synced)) and library.seccomp_load(rules) == 0


def _end_with_parent() -> None:
    """End this process soon after its parent has ended, because nobody reads its pipe then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def confine(memory: int, threads: bool = False) -> str:
    """Confine this process for the rest of its life; returns what is missing as a sentence, or an empty text.

    ``memory``: bytes of address space beyond what is mapped now; the process may lower that later, and not raise it.
    ``threads``: whether threads may be started later.
    The process ends within two seconds after its parent. Time is limited by the caller with ``RLIMIT_CPU``, which a
    confined process may still set. Where something is missing, the limits hold without the filter of system calls.
    """
    _end_with_parent()
    lacks = missing()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, 16)
    if sys.platform.startswith("linux"):
        with open("/proc/self/statm", "rb") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, mapped + memory)
    if not threads:
        _limit(resource.RLIMIT_NPROC, 0)
    library = None if lacks else _library()
    if library is not None and not _filter_calls(library, threads):
        lacks = "The kernel did not take the filter of system calls."
    return lacks
