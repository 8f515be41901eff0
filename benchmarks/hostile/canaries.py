"""Canaries: a secret in every place with data of one tenant or of the node."""

import ctypes
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.hostile.functions import Functions, order

_libc = ctypes.CDLL(None)
_libc.shmat.restype = ctypes.c_void_p
_IPC_RMID = 0
PID_COLUMNS = {"shm": 4, "msg": 5}
"""The first of the two columns with processes in the tables of /proc/sysvipc."""

PATTERN = re.compile(rb"overwinter-canary-(\w+)-[0-9a-f]{32}")
"""The form of a canary, which is all that a searcher knows."""

HANDLER = """
import torch

INPUTS = [{{"name": "what", "datatype": "BYTES", "shape": [1]}}]
OUTPUTS = [{{"name": "found", "datatype": "BYTES", "shape": [1]}}]
SECRET = "{secret}"


def preprocess(inputs, state):
    return {{"x": torch.zeros(1, 4)}}


def postprocess(outputs, inputs, state):
    return {{"found": [b"%d" % len(SECRET)]}}
"""


def canary(place: str) -> str:
    """Create a secret for a place, which it names."""
    return f"overwinter-canary-{place}-{secrets.token_hex(16)}"


def canary_in(data: bytes) -> str:
    """Return the place of a canary in these bytes; empty if there is none."""
    found = PATTERN.search(data)
    return "" if found is None else found[1].decode()


class Victim:
    """A tenant with secrets in its weights, its handler, its assets and its requests."""

    TENANT = "victim"
    PLAIN, HANDLED = "victim", "victim-handled"

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self.blobs: list[list[Any]] = []
        """Addresses and sizes, as in a manifest."""

    def deploy(self, node) -> None:  # noqa: ANN001 - an AttackedNode's node
        """Deploy both functions so that their workers stay."""
        handler = HANDLER.format(secret=canary("handler"))
        assets = {"secret.txt": canary("asset").encode()}
        mark = canary("weight").encode()
        kept = {"tenant": self.TENANT, "keep_alive_s": 3600.0}
        made = [
            self._functions.package(self.PLAIN, 7.0, mark=mark, **kept),
            self._functions.package(self.HANDLED, 7.5, mark=mark, handler=handler, assets=assets, **kept),
        ]
        self.blobs = [[blob.address, blob.nbytes] for each in made for blob in each.manifest.blobs()]
        for each in made:
            each.upload(node.client)
        order(node.port, self.HANDLED, canary("request"))


class OutsideObjects:
    """Objects of the machine that no function may reach: files, sockets, memory, a process."""

    def __init__(self) -> None:
        self._root = root = Path(tempfile.mkdtemp(prefix="overwinter-bench-"))
        root.chmod(0o755)
        self.file = root / "secret.txt"
        self.file.write_text(canary("file"))
        self.file.chmod(0o644)
        self.writable = root / "writable.txt"
        self.writable.write_text("untouched")
        self.writable.chmod(0o666)
        self.open_directory = root / "open"
        self.open_directory.mkdir()
        self.open_directory.chmod(0o777)
        self.path = str(root / "socket")
        self.abstract = f"overwinter-canary-{os.getpid()}"
        self.reached: list[str] = []
        """The sockets to which someone connected."""
        self._ends = [self._listen(socket.AF_UNIX, self.path, "a unix socket by its path")]
        os.chmod(self.path, 0o777)
        self._ends.append(self._listen(socket.AF_UNIX, "\0" + self.abstract, "an abstract unix socket"))
        self._ends.append(self._listen(socket.AF_INET, ("127.0.0.1", 0), "TCP on the loopback"))
        self.tcp_port: int = self._ends[-1].getsockname()[1]
        self._ends.append(self._listen(socket.AF_INET, ("127.0.0.1", 0), "UDP on the loopback", socket.SOCK_DGRAM))
        self.udp_port: int = self._ends[-1].getsockname()[1]
        command = [sys.executable, "-c", f"import sys; secret = '{canary('process')}'; sys.stdin.read()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self.segment = _segment(canary("segment").encode())
        """A System V segment that every user of the machine may read."""
        self._known = {kind: _objects(kind).keys() for kind in PID_COLUMNS}

    def _listen(self, family: int, address: object, what: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        end = socket.socket(family, kind)
        end.bind(address)
        if kind == socket.SOCK_STREAM:
            end.listen(8)
        threading.Thread(target=self._hear, args=(end, what), daemon=True).start()
        return end

    def _hear(self, end: socket.socket, what: str) -> None:
        # Closing the socket ends this thread.
        with suppress(OSError):
            while True:
                if end.type == socket.SOCK_DGRAM:
                    end.recv(100)
                else:
                    end.accept()[0].close()
                self.reached.append(what)

    def changed(self, pids: Collection[int]) -> list[str]:
        """Return what has changed since the last check, and the System V objects that these processes left; then
        restore it.
        """
        changes, self.reached = [f"reached {what}" for what in self.reached], []
        if self.writable.read_text() != "untouched":
            changes.append("wrote to a file")
            self.writable.write_text("untouched")
        for made in self.open_directory.iterdir():
            changes.append(f"made a file {made.name}")
            made.unlink()
        if self.process.poll() is not None:
            changes.append("killed a process outside")
        for kind, remove in (("shm", _libc.shmctl), ("msg", _libc.msgctl)):
            for number, users in _objects(kind).items():
                if number not in self._known[kind] and not users.isdisjoint({*pids, 0}):
                    changes.append(f"left the {kind} {number} of System V")
                    remove(number, _IPC_RMID, None)
        return changes

    def close(self) -> None:
        """Remove everything."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._root)
        _libc.shmctl(self.segment, _IPC_RMID, None)


def _objects(kind: str) -> dict[int, set[int]]:
    """Return the ids of all System V objects of a kind, with the processes that created or last used each. Of a message
    queue that was never used only 0 is known.
    """
    rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]
    first = PID_COLUMNS[kind]
    return {int(row[1]): {int(row[first]), int(row[first + 1])} for row in rows}


def _segment(content: bytes) -> int:
    made = int(_libc.shmget(0, 4096, 0o1644))
    place = _libc.shmat(made, None, 0)
    ctypes.memmove(place, content, len(content))
    _libc.shmdt(ctypes.c_void_p(place))
    return made
