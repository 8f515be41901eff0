"""A node's options are its configuration, and a node starts and stops from the command line."""

import errno
import json
import os
import signal
import socket
import stat
from importlib.metadata import version
from pathlib import Path

import click
import msgspec
import pytest
from msgspec import structs

from overwinter.api.sites import is_loopback
from overwinter.cli.serve import config_of, config_options, serve
from overwinter.core.config import NodeConfig, RequestLimits, SchedulerConfig
from overwinter.core.devices import GPU_PROCESS_BYTES, DeviceConfig, check_devices
from overwinter.core.ids import DeviceId
from overwinter.core.policies import Policy
from overwinter.worker.gpu_files import gpus
from tests.cli.conftest import Run, Serving, serving


def config(*arguments: str) -> NodeConfig:
    # The command keeps the names of its help option from its first context, so pass the names that `overwinter` uses.
    values = serve.make_context("serve", [*arguments], help_option_names=["-h", "--help"]).params
    for name in ("port_file", "as_json", "insecure", "log_format"):
        del values[name]
    return config_of(values)


def test_every_field_of_the_configuration_is_an_option() -> None:
    names = {option.name for option in config_options()}
    kinds = (NodeConfig, SchedulerConfig, RequestLimits)
    fields = {field.name for kind in kinds for field in msgspec.structs.fields(kind)}
    of_devices = {f"device_{what}" for what in ("kind", "memory", "activations", "bandwidth", "peer_bandwidth")}
    of_devices |= {"devices_per_switch", "device_order", "device_binding", "device_eviction"}
    assert names == fields - {"scheduler", "requests"} | of_devices


def test_the_defaults_of_the_options_are_those_of_the_configuration() -> None:
    assert config("--data", "/srv/data") == NodeConfig(data="/srv/data")


def test_options_may_be_zero_where_the_configuration_may() -> None:
    found = config("--drain-s", "0", "--zygotes-max", "0", "--host-keep-alive-s", "0", "--workers-ahead", "0")
    assert (found.drain_s, found.zygotes_max) == (0, 0)
    assert (found.scheduler.host_keep_alive_s, found.scheduler.workers_ahead) == (0, 0)
    for option in ("--accounting-s", "--journal-ring", "--caller-share"):
        with pytest.raises(click.BadParameter) as result:
            config(option, "0")
        assert option in result.value.format_message()


def test_options_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERWINTER_PORT", "9")
    monkeypatch.setenv("OVERWINTER_HOST_BYTES", "8GiB")
    monkeypatch.setenv("OVERWINTER_WORKERS_MAX", "7")
    monkeypatch.setenv("HOME", "/srv/someone")
    found = config(
        "--keep-warm",
        "--journal",
        "steps.json",
        "--workers-max",
        "8",
        "--backoff-max-s",
        "1.5",
        "--json-bytes-max",
        "1MiB",
    )
    assert found == NodeConfig(
        port=9,
        data="/srv/someone/.local/share/overwinter",
        keep_warm=True,
        journal=f"{os.getcwd()}/steps.json",
        scheduler=SchedulerConfig(workers_max=8, backoff_max_s=1.5, host_bytes=8 << 30),
        requests=RequestLimits(json_bytes_max=1 << 20),
    )


def test_options_of_devices_apply_to_each_device() -> None:
    devices = config(
        *("--devices", "2", "--device-memory", "256MiB"),
        *("--device-activations", "64MiB", "--device-bandwidth", "1GB"),
    ).scheduler.devices
    assert devices == tuple(
        DeviceConfig(name=DeviceId(name), memory_bytes=256 << 20, activation_bytes=64 << 20, bytes_per_s=1e9)
        for name in ("virtual:0", "virtual:1")
    )
    with pytest.raises(ValueError, match="--device-memory"):
        config("--devices", "1", "--device-memory", "1KiB")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--device-kind", "null"),
        ("--device-memory", "2GiB"),
        ("--device-activations", "64MiB"),
        ("--device-bandwidth", "1GB"),
        ("--devices-per-switch", "2"),
        ("--device-peer-bandwidth", "50GB"),
        ("--device-order", "rrc"),
        ("--device-binding", "torpor"),
        ("--device-eviction", "lru"),
    ],
)
def test_options_of_devices_are_refused_without_devices(option: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} .*--devices"):
        config(option, value)
    with pytest.raises(ValueError, match=f"^{option} .*--devices"):
        config("--devices", "0", option, value)
    switches = ("--devices-per-switch", "2") if option == "--device-peer-bandwidth" else ()
    assert len(config("--devices", "2", *switches, option, value).scheduler.devices) == 2


def test_policies_for_devices_replace_those_of_the_named_policy() -> None:
    torpor = ("--device-order", "rrc", "--device-binding", "torpor", "--device-eviction", "torpor")
    policy = config("--devices", "1", "--policy", "separate", *torpor).scheduler.policy
    expected = Policy(joins=False, device_order="rrc", device_binding="torpor", device_eviction="torpor")
    assert policy == expected
    assert config("--devices", "1", "--policy", "separate").scheduler.policy == "separate"


def test_devices_share_switches_and_copy_from_each_other() -> None:
    devices = config("--devices", "3", "--devices-per-switch", "2", "--device-peer-bandwidth", "50GB").scheduler.devices
    assert [each.switch for each in devices] == ["switch:0", "switch:0", "switch:1"]
    assert [dict(each.peers) for each in devices] == [
        {DeviceId(f"virtual:{peer}"): 50e9 for peer in range(3) if peer != own} for own in range(3)
    ]


def test_null_devices_take_no_memory_and_have_no_peers() -> None:
    [device] = config("--devices", "1", "--device-kind", "null", "--device-memory", "32GiB").scheduler.devices
    assert (device.name, device.kind, device.reserved_bytes) == ("null:0", "null", 0)
    with pytest.raises(ValueError, match="null:0"):
        config("--devices", "2", "--device-kind", "null", "--device-peer-bandwidth", "50GB")


def test_cuda_devices_are_the_gpus_of_the_machine_and_reserve_memory_for_their_driver_only() -> None:
    first, second = config("--devices", "2", "--device-kind", "cuda", "--device-memory", "32GiB").scheduler.devices
    assert (first.name, first.kind, first.gpu, first.reserved_bytes) == ("cuda:0", "cuda", 0, GPU_PROCESS_BYTES)
    assert (second.name, second.gpu) == ("cuda:1", 1)
    with pytest.raises(ValueError, match="cuda:0"):
        config("--devices", "2", "--device-kind", "cuda", "--device-peer-bandwidth", "50GB")
    with pytest.raises(ValueError, match="GPU 0"):
        check_devices([first, structs.replace(second, gpu=0)])


def test_gpus_that_the_environment_selects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert config("--devices", "1").scheduler.devices
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        config("--devices", "1", "--device-kind", "cuda")


def test_a_gpu_that_the_machine_lacks_is_refused(local: Run, tmp_path: Path) -> None:
    count = len(gpus())
    where = ("serve", "--port", "0", "--data", str(tmp_path / "data"))
    failed = local(*where, "--devices", str(count + 1), "--device-kind", "cuda", exit_code=1)
    lacking = "CUDA" if version("torch").endswith("+cpu") else f"cuda:{count}"
    assert lacking in failed.stderr


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback_addresses_are_recognized(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_the_variable_of_a_kubernetes_service_is_not_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, port in (("tcp://10.96.0.12:8000", 8000), ("8123", 8123)):
        monkeypatch.setenv("OVERWINTER_PORT", value)
        with serve.make_context("serve", []) as context:
            assert context.params["port"] == port


def test_an_address_of_another_machine_is_an_error_of_the_option_host(local: Run, tmp_path: Path) -> None:
    failed = local("serve", "--host", "192.0.2.1", "--insecure", "--data", str(tmp_path / "data"), exit_code=1)
    assert "--host" in failed.stderr
    assert "--port" not in failed.stderr


def test_a_port_that_is_taken_is_refused_with_the_remedy(local: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = local("serve", "--port", str(port), "--data", str(tmp_path / "data"), exit_code=1)
    assert failed.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}; choose another --port, and for a "
        "second node another --data\n"
    )
    assert not (tmp_path / "data").exists()


def test_a_node_listens_on_other_addresses_only_with_tokens_or_an_option(local: Run, tmp_path: Path) -> None:
    # The port is taken.
    with socket.create_server(("0.0.0.0", 0)) as taken:
        where = ("serve", "--host", "0.0.0.0", "--port", str(taken.getsockname()[1]), "--data", str(tmp_path))
        refused = local(*where, exit_code=2)
        assert all(each in refused.stderr for each in ("0.0.0.0", "overwinter token create", "--insecure"))
        warned = local(*where, "--insecure", exit_code=1)
        assert warned.stderr.startswith("warning: listening on 0.0.0.0 without tokens: ")
        made = json.loads(
            local("token", "create", "--tenant", "a", "--scope", "infer", "--json", "--data", str(tmp_path)).stdout
        )
        assert local(*where, exit_code=1).stderr.startswith("error: cannot listen on 0.0.0.0")
        local("token", "revoke", made["id"], "--data", str(tmp_path))
        # The token is revoked, and a request without a token is refused.
        assert local(*where, exit_code=1).stderr.startswith("error: cannot listen on 0.0.0.0")


def test_a_node_writes_its_port_file_and_a_second_node_on_the_same_data_is_refused(local: Run, tmp_path: Path) -> None:
    port_file, journal = tmp_path / "port", tmp_path / "journal"
    with serving(tmp_path / "data", "--port-file", str(port_file), "--journal", str(journal)) as node:
        assert port_file.read_text() == f"{node.port}\n"
        assert node.url == f"http://127.0.0.1:{node.port}"
        assert json.loads(local("ps", "--json", "--url", node.url).stdout) == []
        failed = local("serve", "--port", "0", "--data", node.data, exit_code=1)
        assert failed.stderr == f"error: another node already serves {node.data}: stop it, or choose another --data\n"
    assert stat.S_IMODE(Path(node.data).stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    recorded = msgspec.json.decode(journal.read_bytes().splitlines()[0], type=SchedulerConfig)
    assert recorded.cores == len(os.sched_getaffinity(0))
    assert recorded.host_bytes
    assert recorded.memory_bytes
    assert recorded.workers_max
    assert recorded.workers_ahead
    theirs = {"cores": None, "host_bytes": None, "memory_bytes": None, "workers_max": None, "runs_max": None}
    assert msgspec.structs.replace(recorded, **theirs, workers_ahead=None) == SchedulerConfig()


def test_the_shared_node_still_runs(node: Serving) -> None:
    assert node.process.poll() is None


def test_the_end_of_the_terminal_stops_a_node_as_other_signals_do(tmp_path: Path) -> None:
    # These tests may themselves run under `nohup`, whose children ignore the signal.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with serving(tmp_path / "data") as node:
            node.process.send_signal(signal.SIGHUP)
            assert node.process.wait(30) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_policy_that_knows_the_future_is_for_simulations_only() -> None:
    assert config("--policy", "mls").scheduler.policy == "mls"
    with pytest.raises(click.BadParameter, match="oracle"):
        config("--policy", "oracle")
