"""Real processes that die, or race, in the middle of a write."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from overwinter.store.blocks import address_of
from overwinter.store.host import HostStore
from overwinter.store.manifest import Blob, encode_manifest
from tests.store.family import base, below, blocks_and_drafts, missing, put

HALF = os.urandom(1 << 20)
DATA = HALF + HALF[::-1]
BLOB = Blob(address_of(DATA), len(DATA))

PUT = """
import sys
from pathlib import Path
from overwinter.store.repository import Repository

def body():
    yield sys.stdin.buffer.read(1 << 20)
    print("half", flush=True)
    yield sys.stdin.buffer.read()

Repository(Path(sys.argv[1])).put("tests", sys.argv[2], body(), 1.0)
"""

LOAD = """
import os, sys
from pathlib import Path
from overwinter.store.host import HostStore
from overwinter.store.manifest import Blob

class Source:
    def open(self, address):
        return os.dup(0)
    def set_aside(self, address):
        return True

HostStore(Path(sys.argv[1]), Source()).load([Blob(sys.argv[2], int(sys.argv[3]))])
"""

DEPLOY = """
import sys
from pathlib import Path
from overwinter.store.manifest import decode_manifest
from overwinter.store.repository import Repository

repository = Repository(Path(sys.argv[1]))
manifest = decode_manifest(Path(sys.argv[2]).read_bytes())
print("ready", flush=True)
sys.stdin.readline()
for blob in manifest.blobs():
    repository.put("tests", blob.address, Path(sys.argv[3], blob.address).read_bytes(), 1.0)
print(repository.register(manifest, 1.0).version, flush=True)
repository.close()
"""


@pytest.fixture
def start():
    """Start Python processes; the remaining ones are killed and reaped at the end."""
    started = []

    def run(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.stdout.close()
        with suppress(BrokenPipeError):
            child.stdin.close()
        child.wait()


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_a_put_killed_in_the_middle_leaves_no_block(repository, start):
    child = start(PUT, repository.root, BLOB.address)
    child.stdin.write(HALF)
    child.stdin.flush()
    assert child.stdout.readline() == b"half\n"
    (draft,) = below(repository.root / "incoming")
    assert draft.stat().st_size == len(HALF)
    kill(child)
    assert missing(repository, [BLOB.address]) == [BLOB.address]
    assert put(repository, BLOB.address, DATA)
    assert repository.read(BLOB.address) == DATA
    assert repository.collect(draft.stat().st_mtime + 61, grace_s=60).files >= 1
    assert not list(below(repository.root / "incoming"))


def test_a_load_killed_in_the_middle_leaves_no_block(memory, repository, start):
    root = memory / "host"
    child = start(LOAD, root, BLOB.address, BLOB.nbytes)
    child.stdin.write(HALF)
    child.stdin.flush()  # a pipe holds 64 KiB: all else has been read, and written except for the last chunk
    (draft,) = below(root)
    assert draft.name != BLOB.address
    assert draft.stat().st_size > 0
    kill(child)
    host = HostStore(root, repository)
    assert not host.holds(BLOB.address)
    swept = host.sweep([BLOB])
    assert (swept.kept, swept.files) == (0, 1)
    assert not list(below(root))
    put(repository, BLOB.address, DATA)
    assert host.load([BLOB]) == len(DATA)
    assert host.verify(BLOB.address)


def test_loaded_blocks_outlive_their_owner(memory, repository, start):
    root = memory / "host"
    child = start(LOAD, root, BLOB.address, BLOB.nbytes)
    child.communicate(DATA)
    assert child.returncode == 0
    host = HostStore(root, repository)
    assert host.sweep([BLOB]).kept == 1
    assert host.load([BLOB]) == 0
    assert host.verify(BLOB.address)


def test_two_processes_may_deploy_one_model_at_the_same_time(repository, start, tmp_path):
    model = base()
    files = tmp_path / "files"
    files.mkdir()
    for address, data in model.files.items():
        (files / address).write_bytes(data)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(encode_manifest(model.manifest))
    children = [start(DEPLOY, repository.root, manifest, files) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == b"ready\n"
    for child in children:
        child.stdin.write(b"go\n")
        child.stdin.flush()
    versions = sorted(int(child.stdout.readline()) for child in children)
    assert [child.wait() for child in children] == [0, 0]
    assert versions == [1, 2]
    assert blocks_and_drafts(repository) == set(model.files)
    assert all(repository.read(address) == data for address, data in model.files.items())


def test_a_process_killed_while_it_registers_leaves_an_intact_catalog(repository, start, tmp_path):
    model = base()
    model.deploy(repository)
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(encode_manifest(model.manifest))
    endless = (
        DEPLOY.partition("for blob")[0] + "while True: print(repository.register(manifest, 1.0).version, flush=True)"
    )
    child = start(endless, repository.root, manifest)
    assert child.stdout.readline() == b"ready\n"
    child.stdin.write(b"go\n")
    child.stdin.flush()
    result = [int(child.stdout.readline()) for _ in range(5)]
    kill(child)
    result += [int(line) for line in child.stdout.read().splitlines()]
    kept = [found.version for found in repository.deployments()]
    assert kept == list(range(1, len(kept) + 1))
    assert set(result) <= set(kept)
    assert repository.register(model.manifest, now=1.0).version == len(kept) + 1
