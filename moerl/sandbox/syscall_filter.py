"""A seccomp filter for sandboxes.  It refuses calls that exploits of a kernel need and a policy's
code does not.

prctl(2) and seccomp(2) describe the form of a filter.  The server of a sandbox and its children
have the same user; with this filter no process in the sandbox signals or starves the server.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import cache

from moerl.runtime.reaper import GROUP_MARK, SERVER_MARK

# Number on x86-64 (asm/unistd_64.h) and on aarch64 (asm-generic/unistd.h).
REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),  # takes a descriptor of /proc/PID, too
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
}
AT_PROCESS = {  # their first argument is a process
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "prlimit64": (302, 261),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
# With their second argument: who gets the signals of a descriptor, and which.
SIGNALS = {
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
}
OTHERS = {"clone": (56, 220), "clone3": (435, 435), "socket": (41, 198)}
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, audit number
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET
_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6; vsock, for one, is bound to no network namespace
_FIRST, _ALL = 1, 0xFFFFFFFF  # bubblewrap, which ends the sandbox; kill(-1)
_RETURN, _LOAD, _EQUAL, _AT_LEAST, _ANY_BIT = 0x06, 0x20, 0x15, 0x35, 0x45
_CALL, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NO_CALL, _NOT_ALLOWED = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM

Row = tuple[int, int, int, int]  # code, rows to skip if true, if false, value


@cache
def syscall_filter() -> bytes:
    """The program for this machine; empty where the numbers of its calls are not known."""
    if platform.machine() not in _MACHINES:
        return b""
    column, audit = _MACHINES[platform.machine()]
    rows: list[Row] = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    rows += [(_LOAD, 0, 0, _CALL)]
    rows += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _NO_CALL)]  # x86-64's other interface
    for numbers in REFUSED.values():
        rows += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _NOT_ALLOWED)]
    # libc takes clone instead, whose flags are an argument and not memory.
    rows += [(_EQUAL, 0, 1, OTHERS["clone3"][column]), (_RETURN, 0, 0, _NO_CALL)]
    rows += _decided(OTHERS["clone"][column], [(_ANY_BIT, _NAMESPACES)], _NOT_ALLOWED, _ALLOW)
    families = [(_EQUAL, family) for family in _FAMILIES]
    rows += _decided(OTHERS["socket"][column], families, _ALLOW, _ERROR | errno.EAFNOSUPPORT)
    server = [(_EQUAL, value) for value in (SERVER_MARK, GROUP_MARK, _FIRST, _ALL)]
    for numbers in AT_PROCESS.values():
        rows += _decided(numbers[column], server, _NOT_ALLOWED, _ALLOW)
    for numbers, refused in SIGNALS.values():
        tests = [(_EQUAL, value) for value in refused]
        rows += _decided(numbers[column], tests, _NOT_ALLOWED, _ALLOW, _SECOND_ARGUMENT)
    rows += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def _decided(
    call: int,
    tests: list[tuple[int, int]],
    then: int,
    otherwise: int,
    argument: int = _FIRST_ARGUMENT,
) -> list[Row]:
    """Rows for a call that an argument, its low 32 bits, allows or refuses."""
    rows: list[Row] = [(_LOAD, 0, 0, argument)]
    rows += [(test, len(tests) - place, 0, value) for place, (test, value) in enumerate(tests)]
    rows += [(_RETURN, 0, 0, otherwise), (_RETURN, 0, 0, then)]
    return [(_EQUAL, 0, len(rows), call), *rows]
