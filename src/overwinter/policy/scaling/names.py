"""Which scaling algorithms are there, by the names a configuration uses?"""

from collections.abc import Mapping
from types import MappingProxyType

from overwinter.policy.scaling import dts
from overwinter.policy.scaling.batch import batch
from overwinter.policy.scaling.default import frugal
from overwinter.policy.scaling.demand import Scaler
from overwinter.policy.scaling.exact import exact
from overwinter.policy.scaling.infless import infless
from overwinter.policy.scaling.mls import mls
from overwinter.policy.scaling.photons import photons

SCALERS: Mapping[str, Scaler] = MappingProxyType(
    {
        "overwinter": frugal,
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
"""Tetris-RO is DTS where bodies share no weights, which is the demand's to say."""
