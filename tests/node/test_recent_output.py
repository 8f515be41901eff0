"""The output of functions is kept for their family, within bounds, until the family is removed."""

import torch

from overwinter.core.ids import FamilyId, WorkerId
from overwinter.node import recent_output
from overwinter.node.recent_output import CHARACTERS_MAX, LINES_MAX, OutputLine, RecentOutput, Records

from .rig import AddOne, Function, until

X = {"x": torch.zeros(2, 4)}
TALK = """
def preprocess(inputs, state):
    print("it was", inputs["x"].shape[0])
    return inputs
"""


def texts(function: Function) -> list[str]:
    kept = function.deployed.recent_output
    return [] if kept is None else [line.text for line in kept.lines()]


def test_output_is_kept_for_the_workers_family(rig):
    async def scene():
        one, sibling = Function(AddOne(), X, TALK, name="one"), Function(AddOne(), X, TALK, name="sibling")
        stranger = Function(AddOne(), X, TALK, name="stranger", tenant="other")
        worker = await rig.start_worker(one, members=[sibling])
        other = await rig.start_worker(stranger)
        assert await rig.bind(worker, sibling) is None
        await rig.ended(rig.begin(worker, one, x=torch.zeros(1, 4)), rig.begin(other, x=torch.zeros(7, 4)))
        await until(lambda: texts(one) and texts(stranger))
        assert texts(one) == texts(sibling) == ["it was 1"]
        assert [line.worker for line in one.deployed.recent_output.lines()] == [worker.worker]
        assert texts(stranger) == ["it was 7"]
        later = await rig.start_worker(sibling)
        await rig.ended(rig.begin(later, x=torch.zeros(2, 4)))
        await until(lambda: texts(one) == ["it was 1", "it was 2"])

    rig.run(scene())


def test_the_oldest_lines_are_dropped_first():
    many, long = RecentOutput(), RecentOutput()
    for number in range(LINES_MAX + 5):
        many.add(OutputLine(0.0, WorkerId(1), f"{number}"))
        long.add(OutputLine(0.0, WorkerId(1), "x" * (CHARACTERS_MAX // 4)))
    assert [line.text for line in many.lines()] == [f"{number}" for number in range(5, LINES_MAX + 5)]
    assert len(long.lines()) == 4


def test_recent_output_is_removed_with_its_last_user():
    records = Records()
    mine = records.of(FamilyId("f"))
    mine.add(OutputLine(0.0, WorkerId(1), "hello"))
    assert records.of(FamilyId("f")) is mine
    del mine
    assert records.of(FamilyId("f")).lines() == []


def test_the_recent_output_of_all_families_is_bounded_and_each_keeps_its_last_lines(monkeypatch):
    monkeypatch.setattr(recent_output, "RECORDS_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(recent_output, "CHECK_BYTES", 4 << 10)
    records = Records()
    every = [records.of(FamilyId(f"f{number}")) for number in range(40)]
    quiet = records.of(FamilyId("quiet"))
    quiet.add(OutputLine(0.0, WorkerId(1), "the only one"))
    for number in range(100):
        for each in every:
            each.add(OutputLine(0.0, WorkerId(1), f"{number}"))
    assert sum(each.nbytes for each in every) <= (64 + 4) << 10
    assert all(each.lines()[-1].text == "99" and len(each.lines()) > 1 for each in every)
    assert [line.text for line in quiet.lines()] == ["the only one"]
