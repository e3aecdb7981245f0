"""How to get from stored samples to values, in the words of ezmsg-nwb's attrs, so that its transformers do it.

ezmsg-nwb says it, too, but loads pynwb, which takes longer than everything else that a reader of samples needs. The
tests compare.
"""

import typing

import numpy as np
import numpy.typing as npt

_VOLTS = {"v": 1.0, "mv": 1e-3, "uv": 1e-6, "nv": 1e-9}
_VOLTS |= {f"{prefix}volt": n for prefix, n in (("", 1.0), ("milli", 1e-3), ("micro", 1e-6), ("nano", 1e-9))}
_MICRO_SIGNS = str.maketrans({"\N{MICRO SIGN}": "u", "\N{GREEK SMALL LETTER MU}": "u"})


class Scaling(typing.NamedTuple):
    """A value is ``stored * gain + offset``."""

    gain: float | npt.NDArray[np.float64]
    """One for all channels where they agree."""

    offset: float
    unit: str
    is_voltage: bool

    def as_attrs(self) -> dict[str, object]:
        """Attrs of a message whose samples are as they are stored."""
        return {
            "nwb_scaling_gain": self.gain,
            "nwb_scaling_offset": self.offset,
            "nwb_scaling_unit": self.unit,
            "nwb_scaling_applied": False,
            "nwb_scaling_voltage": self.is_voltage,
        }


def one_gain(gains: npt.NDArray[np.float64]) -> float | npt.NDArray[np.float64]:
    """The gain of all channels, or *gains* where they differ."""
    return float(gains[0]) if gains.size and np.all(gains == gains[0]) else gains


def volts_of(unit: str) -> float | None:
    """How many volts a unit is; None if it is not a unit of voltage."""
    name = unit.strip().lower().translate(_MICRO_SIGNS)
    return _VOLTS.get(name.removesuffix("s") if name.endswith("volts") else name)
