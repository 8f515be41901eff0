"""Fixtures: `transformers` without its log, and its pipelines for comparison."""

import pytest
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
