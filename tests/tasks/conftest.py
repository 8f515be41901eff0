"""A fixture that silences the log and the progress bars of `transformers`."""

import pytest
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
