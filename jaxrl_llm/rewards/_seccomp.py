"""The system calls that a sandbox refuses, as a program of the kernel's packet filter.

Namespaces hide the machine; this narrows what of the kernel remains: no tracing, no namespaces of
the program, no mounts, keys, io_uring, BPF, or memory that no limit counts, and no sockets but
Unix's and the internet's (vsock passes namespaces by).
"""

import errno
import platform
import struct

# Numbers on x86_64 and on aarch64; None where there is no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # Memory that belongs to no process.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
# Calls that reach another process: of one that shall end as if it were alone.
_ON_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)
_NAMESPACES = 0x7E020000  # every CLONE_NEW flag that clone takes
_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH
_X32 = 0x40000000  # calls of another convention, which would pass the numbers by

_LOAD, _RETURN, _EQUAL, _AT_LEAST, _ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # places in what the kernel passes
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def seccomp_filter(*, alone: bool = False) -> bytes:
    """The filter for this machine, in the form that bubblewrap and the kernel read.

    Args:
      alone: Whether calls that reach another process, such as kill, are refused too.

    Raises:
      ValueError: If the numbers of this machine's calls are not known.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"its filter of system calls is for {', '.join(_MACHINES)}, not {machine}")
    column = list(_MACHINES).index(machine)

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    refuse = step(_RETURN, _ERROR | errno.EPERM)
    allow = step(_RETURN, _ALLOW)
    first = step(_LOAD, _FIRST_ARGUMENT)
    program = [
        *(step(_LOAD, _ARCH), step(_EQUAL, _MACHINES[machine], 1), step(_RETURN, _KILL)),
        *(step(_LOAD, _NUMBER), step(_AT_LEAST, _X32, 0, 1), refuse),
    ]
    for numbers in (_REFUSED | (_ON_OTHERS if alone else {})).values():
        if (number := numbers[column]) is not None:
            program += [step(_EQUAL, number, 0, 1), refuse]
    # Its flags lie in memory, where a filter cannot read; without it the C library takes clone.
    program += [step(_EQUAL, _CLONE3[column], 0, 1), step(_RETURN, _ERROR | errno.ENOSYS)]
    program += [step(_EQUAL, _CLONE[column], 0, 4), first, step(_ANY_BIT, _NAMESPACES, 0, 1)]
    program += [refuse, allow]
    program += [step(_EQUAL, _SOCKET[column], 0, len(_FAMILIES) + 3), first]
    for n, family in enumerate(_FAMILIES):
        program.append(step(_EQUAL, family, len(_FAMILIES) - n))
    program += [step(_RETURN, _ERROR | errno.EAFNOSUPPORT), allow, allow]
    return b"".join(program)
