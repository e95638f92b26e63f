"""Locks a process in: no privileges, hard limits, and a filter that lets few system calls through.

Knows Linux, on x86-64 and 64-bit ARM, and the standard library only. Knows nothing about what runs
inside afterwards. Needs no root and no installed library: the filter is a few dozen instructions for
the kernel's packet filter machine (seccomp), which are written out here.

What is allowed is a list; whatever is not on it ends the process with the signal SIGSYS. There is no
socket, no fork, no exec, no kill and no signal handler on it. Reads are from the standard input and
writes to the standard output (or the standard error) only, and no memory becomes executable. Looking for
a file or opening one is refused with an error, as it is where a user may not: Python itself looks for
files now and then, for a source line say, and goes on without.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Numbers of system calls on one kind of processor."""

    audit: int  # the kernel's name for it: AUDIT_ARCH_...
    seccomp: int
    free: dict[str, int]  # allowed with any arguments
    refused: dict[str, int]  # fail with EACCES
    read: int
    write: int
    mmap: int
    mprotect: int


MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        seccomp=317,
        free={
            "poll": 7,
            "munmap": 11,
            "brk": 12,
            "rt_sigreturn": 15,
            "sched_yield": 24,
            "mremap": 25,
            "madvise": 28,
            "nanosleep": 35,
            "getpid": 39,
            "exit": 60,
            "gettimeofday": 96,
            "gettid": 186,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "clock_getres": 229,
            "clock_nanosleep": 230,
            "exit_group": 231,
            "ppoll": 271,
            "getrandom": 318,
        },
        refused={
            "open": 2,
            "stat": 4,
            "lstat": 6,
            "access": 21,
            "getcwd": 79,
            "readlink": 89,
            "openat": 257,
            "newfstatat": 262,
            "readlinkat": 267,
            "faccessat": 269,
            "statx": 332,
            "faccessat2": 439,
        },
        read=0,
        write=1,
        mmap=9,
        mprotect=10,
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        seccomp=277,
        free={
            "ppoll": 73,
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "nanosleep": 101,
            "clock_gettime": 113,
            "clock_getres": 114,
            "clock_nanosleep": 115,
            "sched_yield": 124,
            "restart_syscall": 128,
            "rt_sigreturn": 139,
            "gettimeofday": 169,
            "getpid": 172,
            "gettid": 178,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "madvise": 233,
            "getrandom": 278,
        },
        refused={
            "getcwd": 17,
            "faccessat": 48,
            "openat": 56,
            "readlinkat": 78,
            "newfstatat": 79,
            "statx": 291,
            "faccessat2": 439,
        },
        read=63,
        write=64,
        mmap=222,
        mprotect=226,
    ),
}

# Instructions of the machine that the filter runs on: one register, jumps forwards only.
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EACCES
# Where the filter finds what it decides on: struct seccomp_data, little-endian.
_NUMBER, _AUDIT, _ARGUMENTS = 0, 4, 16
_PROT_EXEC = 4

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER, _SECCOMP_GET_ACTION_AVAIL = 2, 2
_CAPABILITY_VERSION_3 = 0x20080522
_SIGKILL = 9


def unavailable() -> str | None:
    """Why no process can be locked in on this machine; None if it can, as far as can be told."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {platform.system() or sys.platform}"
    if platform.machine() not in MACHINES or sys.maxsize < 2**32:
        return (
            f"it knows the system calls of {' and '.join(MACHINES)} in 64-bit Python, "
            f"and this is {platform.machine()} in {64 if sys.maxsize > 2**32 else 32}-bit Python"
        )
    action = ctypes.c_uint32(_KILL_PROCESS)
    libc = _libc()
    number = ctypes.c_long(MACHINES[platform.machine()].seccomp)
    ask = ctypes.c_long(_SECCOMP_GET_ACTION_AVAIL)
    if libc.syscall(number, ask, ctypes.c_long(0), ctypes.byref(action)) == 0:
        return None
    reason = os.strerror(ctypes.get_errno())
    return f"the kernel ({platform.release()}) offers no seccomp filters that end a process ({reason})"


def program(machine: Machine) -> bytes:
    """The filter, as the kernel takes it: 8 bytes for each instruction."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def argument(index: int) -> bytes:  # its lower half: all that is looked at are small numbers
        return step(_LOAD, _ARGUMENTS + 8 * index)

    allow, kill = step(_RETURN, _ALLOW), step(_RETURN, _KILL_PROCESS)
    steps = [step(_LOAD, _AUDIT), step(_JUMP_IF_EQUAL, machine.audit, 1, 0), kill, step(_LOAD, _NUMBER)]
    for number in machine.free.values():
        steps += [step(_JUMP_IF_EQUAL, number, 0, 1), allow]
    for number in machine.refused.values():
        steps += [step(_JUMP_IF_EQUAL, number, 0, 1), step(_RETURN, _REFUSE)]
    for number, descriptors in ((machine.read, (0,)), (machine.write, (1, 2))):
        known = [part for fd in descriptors for part in (step(_JUMP_IF_EQUAL, fd, 0, 1), allow)]
        steps += [step(_JUMP_IF_EQUAL, number, 0, len(known) + 2), argument(0), *known, kill]
    for number in (machine.mmap, machine.mprotect):
        steps += [step(_JUMP_IF_EQUAL, number, 0, 4), argument(2)]
        steps += [step(_JUMP_IF_ANY_BIT, _PROT_EXEC, 0, 1), kill, allow]
    return b"".join([*steps, kill])


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when process `parent`, which started it, is gone."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:  # gone before that
        os._exit(1)


def limit(memory_bytes: int, cpu_seconds: int) -> None:
    """Set this process' limits for good: memory, CPU time, and no new process, file or open file."""
    import resource

    free = os.dup(0)  # the lowest free number: whatever is below is open, and nothing more will be
    os.close(free)
    limits = (
        (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        # The soft limit sends SIGXCPU, which tells a watching parent what happened.
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, free, free),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    )
    for which, soft, hard in limits:
        _, most = resource.getrlimit(which)
        cap = most if most != resource.RLIM_INFINITY else max(soft, hard)
        resource.setrlimit(which, (min(soft, cap), min(hard, cap)))


def lock_in() -> None:
    """Give up all privileges for good and install the filter. From here on there is no way back.

    Raises OSError with the kernel's reason, and then not everything is locked.
    """
    libc = _libc()
    # A child of root is root; without capabilities that is a name only.
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise _error("capset")
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    code = program(MACHINES[platform.machine()])
    kept = ctypes.create_string_buffer(code, len(code))
    described = _Program(len(code) // 8, ctypes.addressof(kept))
    address = ctypes.addressof(described)
    _prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address)


def prove() -> None:
    """Lock this process in, open a file, which has to fail, and do what it has to die of."""
    lock_in()
    try:
        os.open("/", os.O_RDONLY)
    except PermissionError:
        os.getuid()
    os._exit(0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("address", ctypes.c_void_p)]


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(name: str, option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc().prctl(ctypes.c_int(option), *words) != 0:
        raise _error(name)


def _error(what: str) -> OSError:
    number = ctypes.get_errno() or errno.EPERM
    return OSError(number, f"{what}: {os.strerror(number)}")
