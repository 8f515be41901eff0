"""The scaling algorithms by the names that a configuration uses."""

from collections.abc import Mapping
from types import MappingProxyType

from overwinter.scheduler.policies.scaling import dts
from overwinter.scheduler.policies.scaling.batch import batch
from overwinter.scheduler.policies.scaling.default import overwinter
from overwinter.scheduler.policies.scaling.exact import exact
from overwinter.scheduler.policies.scaling.infless import infless
from overwinter.scheduler.policies.scaling.mls import mls
from overwinter.scheduler.policies.scaling.photons import photons
from overwinter.scheduler.policies.scaling.scaler import Scaler

SCALERS: Mapping[str, Scaler] = MappingProxyType(
    {
        "overwinter": overwinter,
        "dts": dts.by_memory,
        "dts-cores": dts.by_memory_and_cores,
        "tetris-ro": dts.by_memory,
        "exact": exact,
        "mls": mls,
        "infless": infless,
        "photons": photons,
        "batch": batch,
    }
)
"""The scalers by name. Tetris-RO is DTS with workers that share no weights (`ScalingInput.shared`)."""
