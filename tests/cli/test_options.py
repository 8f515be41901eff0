"""Parsing of sizes, functions and assignments."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overwinter.cli.options import assignment, byte_size, function_version, id_of, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("1.5 KiB", 1536),
        ("500MB", 500_000_000),
        ("4096", 4096),
        ("7b", 7),
        ("2tib", 2 << 40),
        ("4194304TiB", 1 << 62),
    ],
)
def test_a_size_is_parsed_to_bytes(text: str, nbytes: int) -> None:
    assert byte_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1 2", "1e3", "nan", "8388608TiB", "9" * 400])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a size"):
        byte_size(text)


@given(st.integers(0, 1 << 50))
def test_a_size_as_text_is_that_size_but_for_rounding(nbytes: int) -> None:
    assert byte_size(size_text(nbytes)) == pytest.approx(nbytes, rel=0.06)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1023.6, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_a_size_is_formatted_in_the_largest_binary_unit_that_fits(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


@given(st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,20}\Z"), st.none() | st.integers(0, 999))
def test_a_function_is_read_as_it_is_written(name: str, version: int | None) -> None:
    assert function_version(id_of(name, version)) == (name, version)


@pytest.mark.parametrize("text", ["name@", "name@x", "name@1.0", "name@-1", "a@b@1", "name@²"])
def test_what_is_not_a_version_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="whole number"):
        function_version(text)


def test_an_assignment_needs_a_name_and_an_equals_sign() -> None:
    assert assignment("name=a=b") == ("name", "a=b")
    assert assignment("name=") == ("name", "")
    for text in ("name", "=value"):
        with pytest.raises(click.BadParameter):
            assignment(text)
