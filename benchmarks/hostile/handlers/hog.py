"""Uses up a resource, chosen by {"way": ..., "seconds": ...}; it uses none during its trial."""

import contextlib
import json
import mmap
import os
import socket
import threading
import time

import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]
PART = 16 << 20
PARTS_MAX = 512
THREADS = 200
kept = []


def sleep(seconds):
    time.sleep(seconds)


def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def burn(seconds):
    """Start threads that continue to compute while no request runs."""
    for _ in range(4):
        threading.Thread(target=multiply, args=(time.monotonic() + seconds,), daemon=True).start()


def contend(seconds):
    """Start up to THREADS threads, which wait for each other all the time."""
    with contextlib.suppress(RuntimeError):
        for _ in range(THREADS):
            threading.Thread(target=spin, args=(seconds,), daemon=True).start()


def multiply(until):
    one = torch.rand(256, 256)
    while time.monotonic() < until:
        one = torch.mm(one, one).clamp_(0, 1)


def flood(seconds):
    threading.Thread(target=shout, args=(time.monotonic() + seconds,), daemon=True).start()


def shout(until):
    line = b"x" * 4000 + b"\n"
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            os.write(2, line)


def heap(seconds):
    take(lambda: bytearray(os.urandom(4096) * (PART // 4096)), seconds)


def shared(seconds):
    take(filled, seconds)


def filled():
    part = mmap.mmap(-1, PART)
    part[:] = b"x" * PART
    return part


def socket_buffers(seconds):
    take(full_pair, seconds)


def full_pair():
    """Return a pair of sockets whose buffers are full, which takes memory of the kernel."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        with contextlib.suppress(BlockingIOError):
            while True:
                end.send(b"x" * 65536)
    return ends


def take(make, seconds):
    """Take as much of the resource as there is, and keep it for a while."""
    with contextlib.suppress(OSError, MemoryError, ValueError):
        kept.extend(make() for _ in range(PARTS_MAX))
    time.sleep(seconds)
    kept.clear()


def fork(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os._exit(0)
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=time.sleep, args=(1.0,), daemon=True).start()
        time.sleep(0.001)


def preprocess(inputs, state):
    try:
        asked = json.loads(inputs["what"][0])
    except ValueError:
        return {"x": torch.zeros(1, 4)}
    globals()[asked["way"]](asked["seconds"])
    return {"x": torch.zeros(1, 4)}


def postprocess(outputs, inputs, state):
    return {"found": [b"done"]}
