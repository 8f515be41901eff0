"""A function that is not called is not billed for its trial, and a node without devices says so."""

import json
import time

from tests.cli.conftest import Run


def test_a_function_without_requests_is_not_billed_for_its_trial(run: Run) -> None:
    run("deploy", "cli_scale:fixed", "--name", "uncalled")
    time.sleep(0.2)

    def used() -> dict[str, float]:
        [found] = [each for each in json.loads(run("usage", "--json").stdout) if each["function"] == "uncalled"]
        return {key: found[key] for key in ("core_ms", "idle_core_ms", "billed_core_ms", "private_byte_s")}

    assert used() == {"core_ms": 0, "idle_core_ms": 0, "billed_core_ms": 0, "private_byte_s": 0}
    run("infer", "uncalled", "-i", "x=[[1, 2]]")
    assert min(used().values()) > 0


def test_a_node_without_devices_says_so(run: Run) -> None:
    assert run("devices").stdout.startswith("no devices")
    assert json.loads(run("devices", "--json").stdout) == []
