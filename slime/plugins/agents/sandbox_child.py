"""The process in which sandboxed code runs. :mod:`slime.plugins.agents.sandbox` starts this file as
a program.

Standard input is one JSON object with the code and its limits. One byte is written to the file
descriptor in the argument when all limits are active and the code is about to start. With the JSON
object as the argument instead, the standard input is that of the code. This file uses only the
standard library, and there is no ``exec``: the code runs in a fork of this interpreter, so that the
new root needs no Python program.

With isolation "full" there are three processes: this one; process 1 of a new process namespace, at
whose end the kernel kills all others in it; and the process of the code. Sources: namespaces(7),
pivot_root(2), mount_setattr(2), seccomp(2), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import json
import linecache
import math
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from typing import NoReturn, TypedDict

# after the deadline, process 1 ends itself, in case no process is left to kill it
GRACE_SECONDS = 5
LARGEST_STATUS = 127  # of the code itself: larger ones say which signal ended it
# mount point of the new root: it exists everywhere and is not needed after unshare
NEW_ROOT = "/proc"
WORK = "/sandbox"
_libc = ctypes.CDLL(None, use_errno=True)

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NODEV = 0x1000, 0x4000, 0x40000, 2, 4
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

Numbers = tuple[int | None, int | None]
"""The numbers of a system call on x86_64 and on aarch64; None if it does not exist there."""


def _numbers(table: str) -> dict[str, Numbers]:
    """Read a table of system calls: name, number on x86_64, number on aarch64 (``-``: it does not
    exist there).
    """
    rows = [row.split() for row in table.split(",")]
    return {name: (int(x86), None if arm == "-" else int(arm)) for name, x86, arm in rows}


# memfd_create, memfd_secret, shmget, msgget, semget and mq_open allocate memory that no limit
# counts.
_REFUSED = _numbers("""
socket 41 198, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
pidfd_open 434 434, pidfd_getfd 438 438, pidfd_send_signal 424 424, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, fsopen 430 430, fsmount 432 432,
move_mount 429 429, open_tree 428 428, mount_setattr 442 442, open_by_handle_at 304 265, memfd_create 319 279,
memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, add_key 248 217, request_key 249 218,
keyctl 250 219, init_module 175 105, finit_module 313 273, kexec_load 246 104, reboot 169 142,
personality 135 92
""")
# Without namespaces, the code could reach other processes and the files of the machine. These calls
# send signals to other processes, change them, or modify files.
_REFUSED_OUTSIDE = _numbers("""
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
setpriority 141 140, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239, process_madvise 440 440,
truncate 76 45, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
creat 85 -, link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36, mknod 133 -,
mknodat 259 33, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -,
fchown 93 55, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88,
execve 59 221, execveat 322 281
""")
# Commands that let a file or pipe send signals to any process: F_SETOWN, F_SETSIG, F_SETOWN_EX;
# FIOSETOWN, SIOCSPGRP, FIOASYNC.
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SIGNALLING = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902, 0x5452)}
_FORK, _VFORK, _CLONE, _CLONE3, _OPEN, _OPENAT, _OPENAT2, _PRCTL, _PRLIMIT = (
    (57, None), (58, None), (56, 220), (435, 435), (2, None), (257, 56), (437, 437), (157, 167), (302, 261),
)  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020080
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


class Order(TypedDict):
    """The code and its limits, as :mod:`slime.plugins.agents.sandbox` sends them.

    This process adds two fields: ``ready``, the file descriptor that gets a byte when the code
    starts, and ``user``, the user and group id of the code if this process is root.
    """

    code: str
    isolation: str
    readable: list[str]
    writable: list[str]
    seconds: float
    memory_bytes: int
    output_bytes: int
    disk_bytes: int
    open_files: int
    tasks: int
    children: bool
    ready: int
    user: int | None


def main() -> NoReturn:
    """Read the order, isolate this process, and run the code. It ends with the exit status of the
    code, or with 128 plus the number of the signal that ended it."""
    speaks = not sys.argv[1].isdigit()
    order: Order = json.loads(sys.argv[1] if speaks else sys.stdin.buffer.read())
    order["ready"] = os.open(os.devnull, os.O_WRONLY) if speaks else int(sys.argv[1])
    # The kernel counts processes per user id. With an unused id, the limit counts only those of
    # this sandbox. A plain user cannot change its id; a user namespace counts separately.
    order["user"] = unused_user() if os.geteuid() == 0 else None
    if not speaks:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    parent_death_signal()
    if order["isolation"] == "process":
        if order["user"]:
            become_nobody(order["user"])
            parent_death_signal()
        os.chdir("/")
        set_limits(order)
        run(order)
    enter_namespaces(order)
    first = os.fork()
    if first == 0:
        process_one(order)
    os.close(order["ready"])
    leave(os.waitpid(first, 0)[1])


def unused_user() -> int:
    """Return a user id that no account has: directory services assign ids below 2**31.

    A container may map fewer ids. Then a lower one is used, which is not an account of the host.
    """
    number = (1 << 31) + os.getpid()
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    if any(first <= number < first + count for first, count in ranges):
        return number
    return 20_000 + os.getpid() % 40_000


def process_one(order: Order) -> NoReturn:
    """Run as process 1 of the namespace: start the code's process and wait for its end. When
    process 1 ends, the kernel kills all other processes of the namespace."""
    if order["user"]:
        become_nobody(order["user"])
    else:
        drop_capabilities()
    parent_death_signal()
    signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + signal.SIGALRM))
    signal.alarm(math.ceil(order["seconds"]) + GRACE_SECONDS)
    set_limits(order)
    code = os.fork()
    if code == 0:
        run(order)
    os.close(order["ready"])
    while True:
        pid, status = os.wait()
        if pid == code:
            leave(status)


def leave(status: int) -> NoReturn:
    """End with the exit status of the child, or with 128 and the number of the signal that ended
    it.
    """
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def run(order: Order) -> NoReturn:
    """Install the system call filter, report that the code starts, and run it as ``__main__``."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    refuse_system_calls(order["children"], order["isolation"] == "process")
    os.write(order["ready"], b"1")
    os.close(order["ready"])
    sys.path.extend(order["readable"])
    code = order["code"]
    name = "<tool>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    status = 0
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        # leave this file out of the traceback
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace)
        status = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(min(status & 0xFF, LARGEST_STATUS))


def enter_namespaces(order: Order) -> None:
    """Enter new namespaces, with a root that contains only the readable files, no network, and no
    other processes.

    Root with CAP_SYS_ADMIN creates them directly and changes its user id afterwards. Other users,
    and root without this capability (for example in a container), create a user namespace as well.
    """
    # Create the namespaces: directly as root, otherwise inside a user namespace.
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    uid, gid = os.geteuid(), os.getegid()
    powerful = uid == 0
    if powerful:
        try:
            call("unshare", flags)
        except PermissionError:
            powerful, order["user"] = False, None
    if not powerful:
        call("unshare", flags | _NEWUSER)
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"65534 {uid} 1"),
            ("gid_map", f"65534 {gid} 1"),
        ):
            with open(f"/proc/self/{file}", "w", encoding="ascii") as out:
                out.write(text)
    # Mounts of the new namespace must not reach the machine's own.
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    # The new root is an empty file system in memory, whose size is the limit of all files.
    options = f"size={order['disk_bytes']},nr_inodes=4096,mode=755"
    call("mount", b"tmpfs", NEW_ROOT.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    # Show what the code may read, a few devices, and folders that it may write to.
    for path in visible(order["readable"]):
        show(path)
    for name in ("null", "zero", "random", "urandom"):
        show(f"/dev/{name}", device=True)
    for folder in ("/tmp", WORK, *order["writable"]):
        os.makedirs(NEW_ROOT + folder, exist_ok=True)  # it exists if a readable folder is below it
        os.chmod(NEW_ROOT + folder, 0o777)
    # Enter the new root, and take the old one away.
    os.chdir(NEW_ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir(WORK)


def visible(readable: list[str]) -> list[str]:
    """Return the paths that the code can read: the standard library, shared libraries, and the
    requested folders.

    Paths inside another one of them are left out, because they are bound with it."""
    stdlib = os.path.dirname(os.__file__)
    paths = [
        stdlib,
        *readable,
        "/usr/lib",
        "/usr/lib64",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/usr/share/zoneinfo",
    ]
    # A script names its interpreter /bin/bash, which is there if /usr/bin is readable.
    paths += ["/bin"] if os.path.islink("/bin") else []
    # libpython, libssl and others, if Python has its own prefix
    shared = os.path.join(sys.base_prefix, "lib")
    chosen: list[str] = []
    for path in sorted({shared, *map(os.path.abspath, paths)}):
        if os.path.exists(path) and not any(
            path.startswith(f"{other}/") for other in chosen if not os.path.islink(other)
        ):
            chosen.append(path)
    return chosen


def show(path: str, device: bool = False) -> None:
    """Bind ``path`` read-only to the same path under the new root. A symbolic link is copied as a
    link.
    """
    target = NEW_ROOT + path
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        with open(target, "wb"):
            pass
    call("mount", path.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd. Set: read-only, nosuid, and
    # nodev unless a device.
    attributes = struct.pack("QQQQ", 1 | 2 | (0 if device else 4), 0, 0, 0)
    call("syscall", 442, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, len(attributes))


def become_nobody(number: int) -> None:
    """Change to a user and group id that own nothing. The groups come first: afterwards there is no
    permission.
    """
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def drop_capabilities() -> None:
    """Drop all capabilities in the user namespace, whose creator has all of them."""
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("capset", header, data)


def set_limits(order: Order) -> None:
    """Set hard resource limits, which child processes inherit. A lower limit that is already set
    stays.
    """
    cpu = math.ceil(order["seconds"]) + 1
    counted = order["isolation"] == "full" or order["user"]
    limits = {
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_CPU: cpu,
        # plus itself and its parent
        resource.RLIMIT_NPROC: order["tasks"] + 2 if counted else resource.RLIM_INFINITY,
        resource.RLIMIT_NOFILE: order["open_files"],
        resource.RLIMIT_FSIZE: order["disk_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = hard if value == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def parent_death_signal() -> None:
    """Let the kernel send SIGKILL when the parent ends. A change of user clears this, so it must be
    set again then.
    """
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# Instructions of the classic BPF machine: load a word, compare, and give the verdict.
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GE, _GIVE = 0x20, 0x15, 0x45, 0x35, 0x06


class Filter:
    """A seccomp filter for the architecture of this machine: system calls are allowed but for those
    that are refused.

    Raises:
        OSError: The numbers of system calls are not known for this machine.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in _ARCHITECTURES:
            raise OSError(
                f"no system call numbers for {machine}: the sandbox knows "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self.column, audit = _ARCHITECTURES[machine]
        # First the architecture, since the numbers of another one mean other calls.
        self.program = [
            (_LOAD, 0, 0, 4),
            (_JUMP_EQUAL, 1, 0, audit),
            (_GIVE, 0, 0, _KILL),
            (_LOAD, 0, 0, 0),
        ]
        if machine == "x86_64":
            # x32 calls would bypass the checked numbers
            self.program += [(_JUMP_GE, 0, 1, 0x40000000), (_GIVE, 0, 0, _KILL)]

    def refuse(self, numbers: Numbers, answer: int = _EPERM) -> None:
        """Refuse a call with an error number."""
        if (number := numbers[self.column]) is not None:
            self.program += [(_JUMP_EQUAL, 0, 1, number), (_GIVE, 0, 0, answer)]

    def refuse_if(
        self,
        numbers: Numbers,
        argument: int,
        test: int,
        values: tuple[int, ...],
        wanted: bool = True,
    ) -> None:
        """Refuse the call if the test of the argument's low word against a value gives ``wanted``;
        allow it otherwise.
        """
        if (number := numbers[self.column]) is None:
            return
        yes, no = (0, 1) if wanted else (1, 0)
        self.program += [
            (_JUMP_EQUAL, 0, 2 * len(values) + 2, number),
            (_LOAD, 0, 0, 16 + 8 * argument),  # little-endian
        ]
        for value in values:
            self.program += [(test, yes, no, value), (_GIVE, 0, 0, _EPERM)]
        self.program.append((_GIVE, 0, 0, _ALLOW))

    def install(self) -> None:
        """Install the filter for this process and its descendants. It needs the promise to gain no
        privileges, and cannot be taken back.
        """
        program = [*self.program, (_GIVE, 0, 0, _ALLOW)]
        call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
        code = b"".join(struct.pack("HBBI", *line) for line in program)
        filters = ctypes.create_string_buffer(code, len(code))
        pointer = struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters))
        call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call("prctl", _PR_SET_SECCOMP, 2, pointer, 0, 0)


def refuse_system_calls(children: bool, outside: bool) -> None:
    """Install a seccomp filter for this process and its descendants.

    Args:
        children: Whether new processes may be started. Threads are always allowed.
        outside: Whether there are no namespaces. Then signals and all calls that write to files are
            refused, too.
    """
    rules = Filter()
    for numbers in _REFUSED.values():
        rules.refuse(numbers)
    # The flags of clone3 are in memory, which a filter cannot read. After ENOSYS, libc falls back
    # to clone.
    rules.refuse(_CLONE3, _ENOSYS)
    if children:
        rules.refuse_if(_CLONE, 0, _JUMP_SET, (_CLONE_NEW,))
    else:
        rules.refuse(_FORK)
        rules.refuse(_VFORK)
        rules.refuse_if(_CLONE, 0, _JUMP_SET, (_CLONE_THREAD,), wanted=False)
    # Without namespaces: signals to other processes, and everything that writes to files.
    if outside:
        for numbers in _REFUSED_OUTSIDE.values():
            rules.refuse(numbers)
        for commands, values in _SIGNALLING.items():
            rules.refuse_if(commands, 1, _JUMP_EQUAL, values)
        rules.refuse(_OPENAT2, _ENOSYS)
        rules.refuse_if(_OPEN, 1, _JUMP_SET, (_WRITES,))
        rules.refuse_if(_OPENAT, 2, _JUMP_SET, (_WRITES,))
        # pid 0 is the process itself; limits of others are refused
        rules.refuse_if(_PRLIMIT, 0, _JUMP_EQUAL, (0,), wanted=False)
    rules.refuse_if(_PRCTL, 0, _JUMP_EQUAL, (_PR_SET_PDEATHSIG,))
    rules.install()


def call(name: str, *arguments: int | bytes | None) -> None:
    """Call a function of the C library that returns 0 or -1. An error is raised as an OSError with
    its name.
    """
    c_arguments = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    if name == "pivot_root":
        name, c_arguments = (
            "syscall",
            [ctypes.c_long(155 if platform.machine() == "x86_64" else 41), *c_arguments],
        )
    if getattr(_libc, name)(*c_arguments) != 0:
        code = ctypes.get_errno()
        shown = ", ".join(
            repr(word) for word in arguments if not isinstance(word, bytes) or len(word) < 80
        )
        raise OSError(code, f"{name}({shown}): {os.strerror(code)}")


if __name__ == "__main__":
    main()
