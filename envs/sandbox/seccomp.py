"""A filter of system calls, which the warden puts on programs: what they never need and kernels were often attacked through.

Refused with EPERM: new namespaces, mounts, tracing, keys, bpf, perf, userfaultfd, io_uring, modules; memory that belongs to no
process and no counted file system (memfd, shared mappings without a file, huge pages, queues of System V and POSIX, watches of
files, pages lent to pipes); what changes another process: its limits, its priority, its cores; and sockets that are not of
Unix, of the Internet or of netlink.
`clone3` is refused with ENOSYS, so that libraries fall back to `clone`, whose flags a filter can read. Asking for another size
of a socket's buffer is granted and changes nothing.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping, Sequence

_EPERM, _ENOSYS = 1, 38
_NAMESPACES = 0x7E020080  # CLONE_NEW*: user, pid, net, ipc, uts, mount, cgroup, and time
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "x86_64": {
        "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
        "add_key": 248, "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323,
        "io_uring_setup": 425, "init_module": 175, "finit_module": 313, "kexec_load": 246, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "kexec_file_load": 320,
        "process_madvise": 440, "process_mrelease": 448, "kcmp": 312, "pidfd_getfd": 438, "move_pages": 279,
        "migrate_pages": 256, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251,
        "msgget": 68, "semget": 64, "mq_open": 240, "vmsplice": 278, "inotify_init": 253, "inotify_init1": 294,
        "fanotify_init": 300,
    },
    "aarch64": {
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
        "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282,
        "io_uring_setup": 425, "init_module": 105, "finit_module": 273, "kexec_load": 104, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "kexec_file_load": 294,
        "process_madvise": 440, "process_mrelease": 448, "kcmp": 272, "pidfd_getfd": 438, "move_pages": 239,
        "migrate_pages": 238, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30,
        "msgget": 186, "semget": 190, "mq_open": 180, "vmsplice": 75, "inotify_init1": 26, "fanotify_init": 262,
    },
}  # fmt: skip
_ARGUED = {
    "x86_64": {"prlimit64": 302, "setpriority": 141, "sched_setaffinity": 203, "socket": 41},
    "aarch64": {"prlimit64": 261, "setpriority": 140, "sched_setaffinity": 122, "socket": 198},
}
_ONLY: dict[str, dict[int, tuple[int, ...]]] = {  # argument → the values with which the call is allowed
    "prlimit64": {0: (0,)},  # the caller itself
    "setpriority": {0: (0,), 1: (0,)},  # one process, the caller itself
    "sched_setaffinity": {0: (0,)},
    "socket": {0: (1, 2, 10, 16)},  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
}
_SETSOCKOPT, _SOL_SOCKET, _BUFFERS = {"x86_64": 54, "aarch64": 208}, 1, (7, 8)  # SO_SNDBUF, SO_RCVBUF
_MMAP, _SHARED, _ANONYMOUS, _HUGE = {"x86_64": 9, "aarch64": 222}, 0x1, 0x20, 0x40000
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000  # x86_64: numbers of a second ABI, which would pass by the list

_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_Line = tuple[int, int, int, int]
_PASS: _Line = (_RETURN, 0, 0, _ALLOW)


def program(machine: str = "") -> bytes:
    """The filter as classic BPF; empty on a machine whose numbers are not known here."""
    machine = machine or platform.machine()
    if machine not in _CALLS:
        return b""
    refused = sorted(_CALLS[machine].values())
    lines: list[_Line] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCH[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for name, allowed in _ONLY.items():
        lines += _when(_ARGUED[machine][name], _only(allowed))
    lines += _when(_SETSOCKOPT[machine], _buffers())
    lines += _when(_MMAP[machine], _mappings())
    lines += _when(_CLONE[machine], [_argument(0), (_ANY_OF, 0, 1, _NAMESPACES), (_RETURN, 0, 0, _ERRNO | _EPERM), _PASS])
    lines += [_PASS]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def _when(number: int, rule: list[_Line]) -> list[_Line]:
    """`rule`, which always decides, for one call."""
    return [(_EQUAL, 0, len(rule), number), *rule]


def _argument(index: int) -> _Line:
    """Loads the lower half of an argument; the kernel takes no more of those that are looked at."""
    return _LOAD, 0, 0, 16 + 8 * index


def _only(allowed: Mapping[int, Sequence[int]]) -> list[_Line]:
    lines: list[_Line] = []
    for index, values in allowed.items():
        lines += [_argument(index), *((_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values))]
        lines += [(_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [*lines, _PASS]


def _buffers() -> list[_Line]:
    send, receive = _BUFFERS
    asked = [_argument(2), (_EQUAL, 1, 0, send), (_EQUAL, 0, 1, receive), (_RETURN, 0, 0, _ERRNO)]
    return [_argument(1), (_EQUAL, 0, len(asked), _SOL_SOCKET), *asked, _PASS]


def _mappings() -> list[_Line]:
    """Pages of such mappings stay when nobody maps them any more, and are then in no process's figures."""
    refused: _Line = (_RETURN, 0, 0, _ERRNO | _EPERM)
    shared = [(_ANY_OF, 0, 2, _ANONYMOUS), (_ANY_OF, 0, 1, _SHARED), refused]
    return [_argument(3), (_ANY_OF, 0, 1, _HUGE), refused, *shared, _PASS]
