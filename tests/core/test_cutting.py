"""The largest slice has as few bytes as possible."""

import random

from overwinter.core.cutting import balanced_starts


def test_slices_are_balanced():
    parts = [{"a": 4}, {"b": 4}, {"b": 4, "c": 1}, {"d": 6}]
    # The first three have 9, because b counts once.
    assert balanced_starts(parts, 2, 11) == [0, 3]
    assert balanced_starts(parts, 3, 11) == [0, 1, 3]
    assert balanced_starts(parts, 2, 8) is None
    assert balanced_starts(parts, 3, 5) is None
    assert balanced_starts(parts, 9, 6) == [0, 1, 3]
    for seed in range(50):
        chance = random.Random(seed)
        sizes = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 12))]
        made = [{str(number): size} for number, size in enumerate(sizes)]
        count = chance.randrange(1, 5)
        begins = balanced_starts(made, count, sum(sizes))
        best = min(largest(sizes, each) for each in choices(len(sizes), count))
        assert len(begins) <= count
        assert largest(sizes, begins) == best


def largest(sizes, begins):
    return max(sum(sizes[start:stop]) for start, stop in zip(begins, [*begins[1:], len(sizes)], strict=True))


def choices(length: int, count: int):
    """Yield every way to divide this many parts into at most `count` slices, as the first part of each."""
    if count == 1 or length == 1:
        yield [0]
        return
    yield [0]
    for last in range(1, length):
        for before in choices(last, count - 1):
            yield [*before, last]
