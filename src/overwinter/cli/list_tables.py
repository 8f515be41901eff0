"""The tables that list all functions and all pipelines."""

from collections.abc import Sequence

from overwinter.cli.fitting import Column, FittedTable
from overwinter.cli.options import size_text
from overwinter.cli.tables import Description, age_text, family_text, locations_text, slo_text, stage_text, version_text


def functions_table(functions: Sequence[Description], now: float) -> FittedTable:
    """Build a table with one row for each version of each function."""
    rows = [
        (
            each["name"],
            version_text(each),
            each["state"],
            each["lifecycle"],
            family_text(each),
            locations_text(each, each["settings"].get("device")),
            str(each["waiting"]),
            size_text(each["nbytes"]),
            size_text(each["missing_bytes"]),
            slo_text(each["settings"]["slo_ms"]),
            age_text(now - each["created"]),
        )
        for each in functions
    ]
    return FittedTable(_FUNCTIONS, rows)


_FUNCTIONS = (
    Column("NAME", "name"),
    Column("VERSION", "word"),
    Column("STATE", "word"),
    Column("LIFECYCLE", "word", 8),
    Column("FAMILY", "word", 1),
    Column("WORKERS", "word", 2),
    Column("WAITING", drop_order=5),
    Column("SIZE", drop_order=6),
    Column("MISSING", drop_order=3),
    Column("SLO", drop_order=7),
    Column("CREATED", drop_order=4),
)


def pipelines_table(pipelines: Sequence[Description], now: float) -> FittedTable:
    """Build a table with one row for each pipeline."""
    rows = [
        (
            each["name"],
            str(each["version"]),
            each["state"],
            *(str(each["requests"][key]) for key in ("running", "answered", "in_slo", "failed")),
            slo_text(each["settings"]["slo_ms"]),
            age_text(now - each["created"]),
            ", ".join(stage_text(stage) for stage in each["stages"].values()),
        )
        for each in pipelines
    ]
    return FittedTable(_PIPELINES, rows)


_PIPELINES = (
    Column("PIPELINE", "name"),
    Column("VERSION", "word"),
    Column("STATE", "word"),
    Column("RUNNING", drop_order=4),
    Column("ANSWERED"),
    Column("IN SLO", drop_order=5),
    Column("FAILED"),
    Column("SLO", drop_order=3),
    Column("CREATED", drop_order=2),
    Column("FUNCTIONS", "name", 1),
)
