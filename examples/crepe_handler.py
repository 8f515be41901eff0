"""The handler of CREPE: takes sound, returns the pitch of each frame of 1024 samples (64 ms)."""

import torch

from overwinter.core.errors import CallerError

INPUTS = [{"name": "audio", "datatype": "FP32", "shape": ["batch", "samples"]}]
OUTPUTS = [
    {"name": "pitch", "datatype": "FP32", "shape": ["batch", "frames"]},
    {"name": "confidence", "datatype": "FP32", "shape": ["batch", "frames"]},
]

FRAME = 1024
CENTS_PER_BIN = 20
LOWEST_CENTS = 1997.3794084376191
"""The pitch of the first bin, in cents above 10 Hz."""
NEIGHBOURS = 4
"""The bins on each side of the likeliest one that count for the pitch."""


def preprocess(inputs: dict[str, torch.Tensor], state: object) -> dict[str, torch.Tensor]:
    """Convert mono audio [batch, samples] at 16 kHz to frames [batch * frames, 1024] with mean 0 and standard
    deviation 1.
    """
    audio = inputs["audio"]
    count = audio.shape[1] // FRAME
    if count == 0:
        raise CallerError(f"audio has {audio.shape[1]} samples; a pitch needs at least {FRAME}")
    frames = audio[:, : count * FRAME].reshape(-1, FRAME)
    frames = frames - frames.mean(1, keepdim=True)
    return {"frames": frames / frames.std(1, keepdim=True).clamp(min=1e-10)}


def postprocess(
    outputs: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], state: object
) -> dict[str, torch.Tensor]:
    """Convert probabilities [batch * frames, 360] to the pitch in Hz and the probability of the likeliest bin."""
    probabilities = outputs["probabilities"]
    confidence, likeliest = probabilities.max(1, keepdim=True)
    bins = torch.arange(probabilities.shape[1])
    near = probabilities * ((bins - likeliest).abs() <= NEIGHBOURS)
    cents = (near * (LOWEST_CENTS + CENTS_PER_BIN * bins)).sum(1) / near.sum(1)
    shape = (inputs["audio"].shape[0], -1)
    return {"pitch": (10 * 2 ** (cents / 1200)).reshape(shape), "confidence": confidence.reshape(shape)}
