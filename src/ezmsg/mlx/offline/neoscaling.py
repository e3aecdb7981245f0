"""How to get from stored samples to volts, for channels of one stream."""

import hashlib
import math
from pathlib import Path

import numpy as np

from .faults import fault
from .neoreaders import Channels
from .scaling import Scaling, one_gain, volts_of


def scaling_of(channels: Channels, path: Path, name: str) -> tuple[dict[str, object], str]:
    """The scaling in the words of ezmsg-nwb's attrs, and a digest of it and of the labels.

    Raises:
        ValueError: The rate, a gain or an offset is not finite; channels are of several units, of which one is not of a
            voltage, or of several offsets.
    """
    if not 0 < channels.rate < math.inf:
        raise fault(path, name, f"has a rate of {channels.rate} Hz; allowed is a finite number above 0.")
    if not (np.isfinite(channels.gains).all() and np.isfinite(channels.offsets).all()):
        raise fault(
            path, name, f"has gains {channels.gains} and offsets {channels.offsets}; allowed are finite numbers."
        )
    gains, offsets, units = channels.gains, channels.offsets, set(channels.units)
    volts = np.array([volts_of(unit) or np.nan for unit in channels.units])
    is_voltage = bool(np.isfinite(volts).all())
    if is_voltage:
        gains, offsets, units = gains * volts, offsets * volts, {"volts"}
    if len(units) > 1:
        raise fault(path, name, f"has channels in the units {sorted(units)}; allowed is one unit, or voltages.")
    if not np.all(offsets == offsets[0]):
        raise fault(path, name, f"has channels with the offsets {sorted(set(offsets))}; allowed is one for all.")
    scaling = Scaling(one_gain(gains), float(offsets[0]), units.pop(), is_voltage).as_attrs()
    parts = [repr(channels.labels.tolist())]
    parts += [f"{key}={np.asarray(value).tolist()!r}" for key, value in scaling.items()]
    return scaling, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
