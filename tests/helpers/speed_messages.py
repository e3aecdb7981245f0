"""Messages of a steady stream, to measure with."""

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from .latency import RATE


def messages_of(n_samples: int, n_channels: int, n: int) -> list[AxisArray]:
    """*n* messages of int16 counts, (time, ch)."""
    rng = np.random.default_rng(0)
    blocks = [rng.integers(-350, 350, (n_samples, n_channels), np.int16) for _ in range(min(n, 8))]
    channels = AxisArray.CoordinateAxis(data=np.array([f"ch{i}" for i in range(n_channels)]), dims=["ch"])
    return [
        AxisArray(
            blocks[i % 8],
            ["time", "ch"],
            {"time": AxisArray.TimeAxis(fs=RATE, offset=i * n_samples / RATE), "ch": channels},
            key="speed",
            stream_dim="time",
        )
        for i in range(n)
    ]
