"""The filter of system calls, executed here instruction by instruction, for both kinds of processor.

What it does to a real process is tested in `test_sandbox`, on the processor that there is.
"""

from __future__ import annotations

import platform
import struct
import sys

import pytest

from asyncllm_nb import seccomp

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x0005000D
FORBIDDEN = {
    "x86_64": {
        "close": 3, "rt_sigaction": 13, "ioctl": 16, "dup": 32, "socket": 41, "sendmsg": 46,
        "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "kill": 62, "ptrace": 101, "prctl": 157,
        "tgkill": 234, "process_vm_writev": 311, "seccomp": 317, "bpf": 321,
        "io_uring_setup": 425, "pidfd_getfd": 438, "clone3": 435, "openat2": 437,
    },
    "aarch64": {
        "dup": 23, "ioctl": 29, "close": 57, "ptrace": 117, "kill": 129, "tgkill": 131,
        "rt_sigaction": 134, "prctl": 167, "socket": 198, "sendmsg": 211, "clone": 220, "execve": 221,
        "process_vm_writev": 271, "seccomp": 277, "bpf": 280, "io_uring_setup": 425, "clone3": 435,
        "openat2": 437, "pidfd_getfd": 438,
    },
}  # fmt: skip


def decide(machine: seccomp.Machine, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter says to a system call."""
    audit = machine.audit if audit is None else audit
    values = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, audit, 0, *(v & (2**64 - 1) for v in values))
    steps = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    register, at = 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:  # load a word
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x15:  # jump if equal
            at += if_true if register == value else if_false
        elif code == 0x45:  # jump if any bit is set
            at += if_true if register & value else if_false
        else:
            assert code == 0x06  # return
            return int(value)


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_filter_allows_and_refuses_what_is_listed_and_kills_for_anything_else(name: str) -> None:
    machine = seccomp.MACHINES[name]
    checked = {machine.read, machine.write, machine.mmap, machine.mprotect}
    free, refused = set(machine.free.values()), set(machine.refused.values())
    assert len(free | refused | checked) == len(machine.free) + len(machine.refused) + len(checked)
    for number in set(range(1000)) - checked:
        expected = ALLOW if number in free else REFUSE if number in refused else KILL
        assert decide(machine, number) == expected, number
    assert "openat" in machine.refused
    for call, number in FORBIDDEN[name].items():
        assert decide(machine, number) == KILL, call


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_filter_looks_at_descriptors_and_at_executable_memory(name: str) -> None:
    machine = seccomp.MACHINES[name]
    high = 5 << 32  # the upper half of a register is not part of a descriptor
    assert [decide(machine, machine.read, fd) for fd in (0, high, 1, 2, 3, -1)] == [ALLOW] * 2 + [KILL] * 4
    assert [decide(machine, machine.write, fd) for fd in (1, 2, 0, 3, -1)] == [ALLOW] * 2 + [KILL] * 3
    for number in (machine.mmap, machine.mprotect):
        assert [decide(machine, number, 7, 7, protection) for protection in (0, 1, 3)] == [ALLOW] * 3
        assert [decide(machine, number, 0, 0, protection) for protection in (4, 5, 7)] == [KILL] * 3


def test_filter_kills_for_calls_of_another_processor_or_calling_convention() -> None:
    machine = seccomp.MACHINES["x86_64"]
    i386 = 0x40000003
    assert decide(machine, machine.free["getpid"], audit=i386) == KILL
    x32 = 0x40000000
    assert decide(machine, machine.free["getpid"] | x32) == KILL
    assert decide(machine, machine.write | x32, 1) == KILL


def test_unavailable_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        patch.setattr(platform, "system", lambda: "Darwin")
        assert seccomp.unavailable() == "it needs Linux, and this is Darwin"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "linux")
        patch.setattr(platform, "machine", lambda: "riscv64")
        assert "x86_64 and aarch64" in str(seccomp.unavailable())
        assert "riscv64" in str(seccomp.unavailable())
