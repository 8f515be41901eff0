"""The messages about a deployed function."""

import pytest
import torch

from overwinter.core.errors import TooLargeError
from overwinter.worker.channel import PACKET_BYTES_MAX
from tests.node.rig import Function, Same

HANDLER = "def preprocess(inputs, state):\n    return inputs\n"


@pytest.mark.parametrize("fits", [True, False])
def test_a_function_whose_messages_are_too_large_is_refused_by_name(fits):
    # Each asset takes its name and an address of 64 characters.
    count = PACKET_BYTES_MAX // (200 if fits else 180)
    assets = {f"{number:06}{'a' * 120}": b"same" for number in range(count)}
    function = Function(Same(), {"x": torch.zeros(2, 4)}, HANDLER, name="many", assets=assets).deployed
    if fits:
        function.check_messages()
    else:
        with pytest.raises(TooLargeError, match="'many'"):
            function.check_messages()
