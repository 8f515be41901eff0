"""Attempts to reach files, processes, sockets and memory outside the sandbox. `asked` describes these objects."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import socket
import struct
import threading
import time

CANARY = re.compile(rb"overwinter-canary-\w+-[0-9a-f]{32}")
libc = ctypes.CDLL(None, use_errno=True)


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def files(asked):
    with open(asked["file"], "rb") as file:
        return file.read()


def blocks(asked):
    found = []
    for name in os.listdir(asked["store"]):
        with open(os.path.join(asked["store"], name), "rb") as file:
            found += CANARY.findall(file.read())
    return found


def data(asked):
    with open(os.path.join(asked["data"], "catalog.sqlite"), "rb") as file:
        return file.read(64)


def stat(asked):
    return f"{os.stat(asked['file']).st_size} bytes"


def listing(asked):
    return os.listdir(os.path.dirname(asked["file"]))


def write(asked):
    with open(asked["writable"], "w") as file:
        file.write("spied")


def make(asked):
    with open(os.path.join(asked["open"], "made"), "w") as file:
        file.write("spied")


def link(asked):
    os.symlink(asked["file"], os.path.join(asked["open"], "link"))


def pipe(asked):
    os.mkfifo(os.path.join(asked["open"], "pipe"))


def each_pid(asked):
    pids = [asked["daemon"], asked["process"], *asked["zygotes"], *asked["workers"]]
    return [pid for pid in pids if pid != os.getpid()]


def environ(asked):
    return of_proc(asked, "environ")


def cmdline(asked):
    return of_proc(asked, "cmdline")


def maps(asked):
    return of_proc(asked, "maps")


def stats(asked):
    return of_proc(asked, "stat")


def of_proc(asked, name):
    found = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            found.append(f"{pid}: {file.read()[:4000]!r}")
    if not found:
        raise PermissionError(name)
    return found


def proc_mem(asked):
    found = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb+") as file:
            found.append(pid)
            file.read(0)
    if not found:
        raise PermissionError("mem")
    return f"opened the memory of {found}"


def proc_fd(asked):
    found = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            found += [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    if not found:
        raise PermissionError("fd")
    return found


def vm_readv(asked):
    room = ctypes.create_string_buffer(64)
    for pid in each_pid(asked):
        here = struct.pack("QQ", ctypes.addressof(room), 64)
        there = struct.pack("QQ", 0x400000, 64)
        held = ctypes.create_string_buffer(here), ctypes.create_string_buffer(there)
        try:
            checked(libc.process_vm_readv(pid, held[0], 1, held[1], 1, 0))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ESRCH):
                continue
        return f"was let into {pid}"
    raise PermissionError("process_vm_readv")


def ptrace(asked):
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            checked(libc.ptrace(16, pid, 0, 0))
            checked(libc.ptrace(17, pid, 0, 0))
            return f"attached to {pid}"
    raise PermissionError("ptrace")


def kill(asked):
    done = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            done.append(pid)
    if not done:
        raise PermissionError("kill")
    return f"may signal {done}"


def prlimit(asked):
    done = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            hard = resource.prlimit(pid, resource.RLIMIT_CORE)[1]
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, hard))
            done.append(pid)
    if not done:
        raise PermissionError("prlimit")
    return f"changed limits of {done}"


def priority(asked):
    done = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1)
            done.append(pid)
    if not done:
        raise PermissionError("setpriority")
    return f"slowed {done} down"


def affinity(asked):
    done = []
    for pid in each_pid(asked):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, os.sched_getaffinity(pid))
            done.append(pid)
    if not done:
        raise PermissionError("sched_setaffinity")
    return f"bound {done}"


def connected(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as end:
        end.settimeout(1)
        end.connect(address)
        end.send(b"spied")
    return "connected"


def tcp(asked):
    return connected(socket.AF_INET, ("127.0.0.1", asked["tcp"]))


def udp(asked):
    return connected(socket.AF_INET, ("127.0.0.1", asked["udp"]), socket.SOCK_DGRAM)


def node(asked):
    return connected(socket.AF_INET, ("127.0.0.1", asked["port"]))


def unix_path(asked):
    return connected(socket.AF_UNIX, asked["socket"])


def unix_abstract(asked):
    return connected(socket.AF_UNIX, "\0" + asked["abstract"])


def sysv_read(asked):
    at = libc.shmat
    at.restype = ctypes.c_void_p
    place = at(asked["shm"], None, 0o10000)
    if place == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "shmat")
    return ctypes.string_at(place, 100)


def own_memory(asked):
    """Find data of other tenants in inherited memory."""
    found = set()
    with open("/proc/self/maps") as lines:
        places = [line.split() for line in lines]
    for bounds, permissions, *rest in places:
        start, stop = (int(each, 16) for each in bounds.split("-"))
        if (
            permissions[0] == "r"
            and not (rest[-1:] and rest[-1].startswith(("[v", "/usr", "/lib")))
            and stop - start < 1 << 28
        ):
            found.update(CANARY.findall(ctypes.string_at(start, stop - start)))
    if not found:
        raise LookupError("nothing of others")
    return sorted(found)


def own_descriptors(asked):
    """Reopen every descriptor of this process, and find data of other tenants in the files."""
    found = set()
    for fd in range(512):
        with contextlib.suppress(OSError), open(f"/proc/self/fd/{fd}", "rb") as file:
            if os.fstat(fd).st_mode & 0o170000 == 0o100000:
                found.update(CANARY.findall(file.read(64 << 20)))
    if not found:
        raise LookupError("nothing of others")
    return sorted(found)


def write_blocks(asked):
    """Write to the shared weights: through their descriptors, their files and their mappings."""
    done = []
    for fd in range(3, 512):
        link_ = f"/proc/self/fd/{fd}"
        with contextlib.suppress(OSError):
            if asked["host"] not in os.readlink(link_):
                continue
            for way in (os.O_RDWR, os.O_WRONLY):
                with contextlib.suppress(OSError):
                    other = os.open(link_, way)
                    os.pwrite(other, b"\0" * 64, 0)
                    done.append(link_)
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                done.append(link_)
            with contextlib.suppress(OSError, ValueError):
                mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)[:8] = b"\0" * 8
                done.append(link_)
    with open("/proc/self/maps") as lines:
        places = [line for line in lines if asked["host"] in line]
    for line in places:
        bounds, permissions = line.split()[:2]
        start, stop = (int(each, 16) for each in bounds.split("-"))
        place, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
        if permissions.endswith("s") and libc.mprotect(place, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
            ctypes.memset(place, 0, 64)
            done.append(line)
        if libc.madvise(place, ctypes.c_size_t(4096), 9) == 0:
            done.append("MADV_REMOVE")
    if not done:
        raise PermissionError("weights")
    return done


def outlive(asked):
    """Outlive the parent process."""
    libc.prctl(1, 0, 0, 0, 0)
    time.sleep(asked["seconds"])


def log_pipe(asked):
    """Fill the pipe of the log without waiting, so that other processes cannot write to it."""
    for fd in (1, 2):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    threading.Thread(target=flood, args=(time.monotonic() + 1.5,), daemon=True).start()
    return os.readlink("/proc/self/fd/2")


def flood(until):
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            os.write(2, b"x" * 4000 + b"\n")
