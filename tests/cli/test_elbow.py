"""`overwinter elbow` measures a link, and a node with the same data directory uses the result."""

import json
from pathlib import Path

import pytest
import torch

from overwinter.core.devices import GROUP_BYTES, DeviceConfig
from overwinter.core.ids import DeviceId
from overwinter.profiling.machine import fingerprint
from overwinter.store.elbows import FILE, Elbow, put_elbow, read_elbows, with_measured_groups
from tests.cli.conftest import Run, serving

SLOW = Elbow(machine="m", kind="virtual", bytes_per_s=1e9, latency_s=20e-6, group_bytes=1 << 18)


def device(**settings: object) -> DeviceConfig:
    return DeviceConfig(name=DeviceId("a"), memory_bytes=1 << 20, **settings)  # type: ignore[arg-type]


def test_a_link_is_measured_and_its_elbow_stored(local: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    where = ("elbow", "--data", str(data), "--device-bandwidth", "1GB")
    found = json.loads(local(*where, "--json").stdout)
    seconds = {int(nbytes): each for nbytes, each in found["seconds"].items()}
    best = max(nbytes / each for nbytes, each in seconds.items())
    assert found["group_bytes"] == min(nbytes for nbytes, each in seconds.items() if nbytes / each >= 0.93 * best)
    [stored] = read_elbows(data)
    assert (stored.machine, stored.group_bytes, stored.bytes_per_s) == (fingerprint(), found["group_bytes"], 1e9)
    lines = local(*where).stdout.splitlines()
    assert len(lines) == len(seconds)
    assert sum(line.endswith("elbow") for line in lines) == 1
    assert len(read_elbows(data)) == 1


def test_a_node_uses_the_elbow_of_its_links(local: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    put_elbow(data, Elbow(machine=fingerprint(), kind="virtual", bytes_per_s=1e9, latency_s=20e-6, group_bytes=12345))
    devices = ("--devices", "1", "--device-memory", "1MiB", "--device-bandwidth")
    for bandwidth, group_bytes in (("1GB", 12345), ("2GB", GROUP_BYTES)):
        with serving(data, *devices, bandwidth) as node:
            [seen] = json.loads(local("devices", "--json", "--url", node.url).stdout)
            assert seen["links"]["group_bytes"] == group_bytes


def test_an_invalid_elbow_file_is_reported_and_a_node_ignores_it(
    local: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    put_elbow(data, SLOW)
    path = data / FILE
    for content in ("[{", "[{}]", path.read_text().replace("262144", "0"), path.read_text().replace('"m"', "7")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"{path} is invalid"):
            read_elbows(data)
    with serving(data, "--devices", "1", "--device-memory", "1MiB") as node:
        [seen] = json.loads(local("devices", "--json", "--url", node.url).stdout)
        assert seen["links"]["group_bytes"] == GROUP_BYTES
    assert f"{path} is invalid" in capfd.readouterr().err
    put_elbow(data, SLOW)
    assert read_elbows(data) == [SLOW]


def test_an_elbow_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / f"{FILE}.draft").symlink_to(target)
    with pytest.raises(OSError, match="draft"):
        put_elbow(tmp_path, SLOW)
    assert target.read_text() == "kept"


def test_only_links_that_were_measured_on_this_machine_get_a_measured_group_size() -> None:
    devices = (device(bytes_per_s=1e9), device(bytes_per_s=2e9), device(bytes_per_s=1e9, group_bytes=5))
    assert [each.group_bytes for each in with_measured_groups(devices, [SLOW], "m")] == [1 << 18, GROUP_BYTES, 5]
    assert with_measured_groups(devices, [SLOW], "another") == devices


def test_a_gpu_that_pytorch_cannot_use_is_named_in_the_error(local: Run, tmp_path: Path) -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("this PyTorch can use GPUs")
    failed = local("elbow", "--data", str(tmp_path), "--device-kind", "cuda", exit_code=1)
    assert "cuda:0" in failed.stderr
    assert not read_elbows(tmp_path)
