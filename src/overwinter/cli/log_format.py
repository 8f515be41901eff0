"""The format of the node's log lines: text for people, or one JSON object for programs."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Literal

import click
import msgspec

from overwinter.cli.failures import error_text, expected_errors
from overwinter.cli.options import printable
from overwinter.core.ids import FunctionId
from overwinter.node.log import Level

LogFormat = Literal["text", "json"]
FIELDS = ("function", "request")
"""Optional fields of a log line: the id or name of a function, and the request id that the caller chose."""
LEVELS: dict[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_node = logging.getLogger("overwinter.node")


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {field: str(value) for field in FIELDS if (value := getattr(record, field, None))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """Formats each message as one line, even if an author's code wrote parts of it: these can neither forge a line nor
    control the terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in `logging`
        """The message, in one line."""
        return printable(" ".join(super().formatMessage(record).splitlines()))


@contextmanager
def logging_to_stderr(form: LogFormat) -> Iterator[None]:
    """Write all log lines to standard error in this format until the `with` statement ends: those of the node, warnings
    of other packages, and in JSON also the error that ends the node.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root, own = logging.getLogger(), logging.getLogger("overwinter")
    root.addHandler(handler)
    own.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        with _failures_logged() if form == "json" else nullcontext():
            yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Log each error that ends the node as one line, and exit with the same code as in the text format."""
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except click.ClickException as error:
        log(error.format_message(), level="error")
        raise click.exceptions.Exit(error.exit_code) from error
    except Exception as error:
        errors = expected_errors(error)
        for each in errors:
            log(error_text(each), level="error")
        if not errors:
            _node.error("the node failed: %s", error, exc_info=error)
        raise click.exceptions.Exit(1) from error


def log(text: str, /, *, level: Level = "warning", function: FunctionId | None = None) -> None:
    """Write one line to the node's log."""
    _node.log(LEVELS[level], "%s", text, extra={"function": function})
