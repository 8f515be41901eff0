"""A test picture: a portrait of the astronaut Eileen Collins by NASA, in the public domain."""

import numpy as np
from PIL import Image

from examples.weights import weights_path


def astronaut() -> np.ndarray:
    """Return the portrait, RGB, uint8 [512, 512, 3]; it shows one face."""
    with Image.open(weights_path("astronaut")) as picture:
        return np.array(picture.convert("RGB"))
