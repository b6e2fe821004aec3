"""A filter of system calls for bubblewrap: what programs never need and kernels have often been attacked through.

Refused with EPERM: new namespaces, mounts, tracing, keys, bpf, perf, userfaultfd, io_uring, modules, and memory that belongs
to no process and no counted file system (memfd, System V). `clone3` is refused with ENOSYS, so that libraries fall back to
`clone`, whose flags a filter can read.
"""

from __future__ import annotations

import platform
import struct

_EPERM, _ENOSYS = 1, 38
_NAMESPACES = 0x7E020080  # CLONE_NEW*: user, pid, net, ipc, uts, mount, cgroup, and time
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
        "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "init_module": 175, "finit_module": 313, "kexec_load": 246, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
        "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282,
        "io_uring_setup": 425, "init_module": 105, "finit_module": 273, "kexec_load": 104, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442,
    },
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000  # x86_64: numbers of a second ABI, which would pass by the list

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def program(machine: str = "") -> bytes:
    """The filter as classic BPF; empty on a machine whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in _CALLS:
        return b""
    refused = sorted(_CALLS[machine].values())
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    lines += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, 16), (_ANY_OF, 0, 1, _NAMESPACES)]
    lines += [(_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
