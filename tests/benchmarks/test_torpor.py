"""The repetition of Torpor's evaluation has its latencies, and its results have the same names at any size."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torpor.calibration import CONTENDERS, TABLE_3, TABLE_4, table_3, table_4
from benchmarks.torpor.setting import ABLATIONS, SLOTS, native, only, paper, sharing_bases, with_functions

ROOT = Path(__file__).parents[2]
NODE = paper(1.0)
FEW = only(NODE, {"resnet-50": 2})


@pytest.mark.parametrize("model", TABLE_4)
def test_a_run_alone_takes_the_time_that_the_paper_measured(model):
    assert table_4(NODE, model) == pytest.approx(TABLE_4[model], abs=3.1)


@pytest.mark.parametrize("model", TABLE_3)
def test_runs_beside_other_swaps_take_the_time_that_the_paper_measured(model):
    assert table_3(NODE, model) == pytest.approx(TABLE_3[model], rel=0.11)
    assert len(TABLE_3[model]) == len(CONTENDERS)


def test_every_function_has_its_own_row_of_the_trace_and_its_own_blocks():
    node = with_functions(NODE, 21, first_row=5)
    assert [model.variants for model in node.functions] == [3, 3, 3, 3, 3, 2, 2, 2]
    assert [model.workload.row for model in node.functions] == [5, 8, 11, 14, 17, 20, 22, 24]
    specs = [each.spec for each in node.simulated_functions()]
    assert len(specs) == 21
    assert len({blob.address for spec in specs for blob in spec.blobs}) == sum(len(spec.blobs) for spec in specs)
    assert [model.name for model in with_functions(NODE, 2).functions] == ["densenet-169", "densenet-201"]


def test_variants_differ_in_their_heads_only():
    before, after = (
        {each.spec.id: each.spec.blobs for each in node.simulated_functions()} for node in (FEW, sharing_bases(FEW))
    )
    assert {id_: sum(blob.nbytes for blob in blobs) for id_, blobs in before.items()} == {
        id_: sum(blob.nbytes for blob in blobs) for id_, blobs in after.items()
    }
    first, second = (set(after[f"resnet-50-000{number}@1"]) for number in (0, 1))
    assert len(first & second) == 1
    assert len(first ^ second) == 2


def test_native_processes_have_one_place_each_and_only_those_of_infless_start_cold():
    warm, cold = (native(NODE, infless=each) for each in (False, True))
    assert len(warm.devices) == len(cold.devices) == 4 * SLOTS == 72
    assert {model.swap_ms for model in warm.functions} == {0.0}
    assert {model.swap_ms for model in cold.functions} == {8000.0, 11000.0}


def test_a_quick_run_ends_with_its_result(tmp_path):
    header = repr({"descr": "<i8", "fortran_order": False, "shape": (203, 31)}).encode()
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + struct.pack("<6293q", *[10] * 6293)
    (tmp_path / "torpor-alibaba-fc").mkdir()
    (tmp_path / "torpor-alibaba-fc" / "samples.npy").write_bytes(data)
    run = [sys.executable, "-m", "benchmarks.torpor", "--quick", "--traces", str(tmp_path)]
    *tables, last = subprocess.run(run, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
    result = json.loads(last.removeprefix("RESULT "))
    counts = {"compliant_160", "native_run_160", "infless_compliant_160"}
    assert set(result) == counts | {"ratio_560", "full_distinct", "full_shared"}
    assert all(0 <= result[name] <= 160 for name in counts)
    assert set(result["ratio_560"]) == set(ABLATIONS)
    assert set(result["full_distinct"]) == set(result["full_shared"]) == {"torpor", "overwinter"}
    for figure in ("Table 3", "Table 4", "Figure 10", "Figure 11", "Figure 12", "Figure 14", "Figure 16"):
        assert any(line.startswith(figure) for line in tables)
