"""Sends forged messages to the node, chosen by {"way": ..., "seed": ...}; it sends none during its trial."""

import array
import contextlib
import fcntl
import json
import mmap
import os
import random
import socket
import sys
import threading
import time

import msgspec
import torch

INPUTS = [{"name": "what", "datatype": "BYTES", "shape": [1]}]
OUTPUTS = [{"name": "found", "datatype": "BYTES", "shape": [1]}]
EXTREME = (0, -1, 1, 7, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, None, "", "x", [], {}, True)
FLOOD = 2000


def ends():
    """Return a duplicate of every socket of this process."""
    found = []
    for fd in range(3, 512):
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_mode & 0o170000 == 0o140000:
                found.append(socket.socket(fileno=os.dup(fd)))
    return found


def memory_files():
    """Return the descriptors of regular files, which may be buffers."""
    found = []
    for fd in range(3, 512):
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_mode & 0o170000 == 0o100000:
                found.append(fd)
    return found


def some(rng):
    return rng.choice(EXTREME)


def meta(rng):
    name, kind = rng.choice(("found", "y", "", "x" * 999)), rng.choice(("BYTES", "FP32", "FP64", "?", ""))
    return [name, kind, [some(rng) for _ in range(rng.choice((0, 1, 2, 70)))], some(rng)]


def call(rng):
    """Return a random call of a program on the pool, which is often valid for `pooled`."""
    valid = ["x", "FP32", [1, 4], 16]
    inputs = [rng.choice((valid, valid, meta(rng))) for _ in range(rng.choice((1, 1, 1, 0, 2)))]
    name = rng.choice(("pooled@1", "pooled@1", "pooled@1", "honest-pooled@1", "neighbour@1", "pooled:program@1", ""))
    return ["PoolCall", rng.choice((1, some(rng))), name, rng.choice((0, 0, 0, some(rng))), inputs]


def message(rng):
    """Return a random message, which is usually well-formed."""
    match rng.randrange(10):
        case 0:
            return ["Ready", rng.choice(("", "x" * 5000, some(rng)))]
        case 1:
            return ["LoadFailed", rng.choice(("CallerError", "WorkerError", "?", some(rng))), "forged"]
        case 2:
            return ["Measured", some(rng), [some(rng)] * rng.choice((0, 1, 9))]
        case 3:
            return ["Up", ["forged"]]
        case 4:
            return ["Exited", rng.randrange(50), rng.choice((0, -9, 1))]
        case 5:
            return ["Forked", rng.randrange(50), rng.choice((1, os.getppid()))]
        case 6 | 7:
            return call(rng)
        case _:
            outputs = ["Outputs", [meta(rng) for _ in range(rng.choice((0, 1, 3)))]]
            failure = ["Failure", rng.choice(("CallerError", "NotFoundError", "OverloadedError", "?")), "forged"]
            run = rng.choice((*range(30), some(rng)))
            return ["Answer", run, [rng.choice((outputs, failure)) for _ in range(rng.choice((0, 1, 1, 2)))], some(rng)]


def packed(rng):
    try:
        content = bytearray(msgspec.msgpack.encode(message(rng)))
    except (OverflowError, ValueError, TypeError):
        content = bytearray(rng.randbytes(20))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


def send(content, fds=()):
    for end in ends():
        with contextlib.suppress(OSError):
            if fds:
                # The filter of system calls refuses it.
                end.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                end.send(content, socket.MSG_DONTWAIT)
            end.close()


def way_messages(rng):
    for _ in range(rng.randint(1, 5)):
        send(packed(rng))


def way_calls(rng):
    for _ in range(rng.randint(1, 3)):
        with contextlib.suppress(OverflowError, ValueError, TypeError):
            send(msgspec.msgpack.encode(call(rng)))


def way_calls_later(rng):
    threading.Timer(rng.random(), way_calls, [rng]).start()


def way_noise(rng):
    send(rng.randbytes(rng.choice((0, 1, 100, 60_000))))


def way_long(rng):
    send(bytes([rng.choice((0xDD, 0xC6, 0x00))]) + rng.randbytes(900_000))


def way_deep(rng):
    send(b"\x91" * 200_000 + b"\xc0")


def way_flood(rng):
    for _ in range(FLOOD):
        send(packed(rng))


def way_plus(rng):
    for _ in range(FLOOD):
        send(b"+")


def way_descriptors(rng):
    for _ in range(50):
        send(rng.choice((b"+", packed(rng))), [0] * rng.choice((1, 100, 250)))


def way_truncated_buffers(rng):
    for fd in memory_files():
        with contextlib.suppress(OSError):
            os.ftruncate(fd, rng.choice((0, 1, 4096)))


def way_buffers_that_change(rng):
    for fd in memory_files():
        with contextlib.suppress(OSError):
            os.pwrite(fd, rng.randbytes(4096), 0)
        # Only a mapping can write to a buffer.
        with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, 4096) as window:
            window[:] = rng.randbytes(4096)


def way_large_buffers(rng):
    for fd in memory_files():
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 1 << 38)
        with (
            contextlib.suppress(OSError, ValueError),
            mmap.mmap(fd, 4 << 20, offset=rng.randrange(1 << 10) << 22) as window,
        ):
            window[:] = rng.randbytes(4 << 20)


def way_sealed_buffers(rng):
    for fd in memory_files():
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def way_closed(rng):
    for end in ends():
        with contextlib.suppress(OSError):
            end.shutdown(rng.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))


def way_blocking(rng):
    for end in ends():
        end.setblocking(rng.random() < 0.5)
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)


def way_answers_of_another(rng):
    rows = ["Outputs", [["found", "BYTES", [1], 4]]]
    for run in range(200):
        send(msgspec.msgpack.encode(["Answer", run, [rows], 4096]))


def way_log(rng):
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK)
    for _ in range(200):
        with contextlib.suppress(OSError):
            os.write(rng.choice((1, 2)), rng.randbytes(4000))


def way_quits(rng):
    os._exit(rng.choice((0, 1, 255)))


def way_signals(rng):
    os.kill(os.getpid(), rng.choice((6, 11, 15, 19)))


def way_stops_listening(rng):
    time.sleep(1.0)


def preprocess(inputs, state):
    try:
        asked = json.loads(inputs["what"][0])
    except ValueError:
        return {"x": torch.zeros(1, 4)}
    globals()["way_" + asked["way"].replace(" ", "_")](random.Random(asked["seed"]))
    sys.stdout.flush()
    return {"x": torch.zeros(1, 4)}


def postprocess(outputs, inputs, state):
    return {"found": [b"done"]}
