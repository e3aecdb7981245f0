"""What the three processes of the soak test agree on."""

import ezmsg.core as ez
from ezmsg.util.messages.axisarray import AxisArray

from soak.stream import RATE

LIMITS_MB = (16.0, 6.0, "auto")
"""Limits on MLX's cache that are set in turns, in MiB."""

RELEASE_AFTER_IDLE = 1.0
"""Seconds without a message after which MLX's cache is given back."""

POWER_SECONDS = (0.1, 0.02)
"""Time constants of the last average that are set in turns."""

VISITED, TAKEN = "visited", "taken"
"""Files in the folder of a run that are there once the monitor has had a visitor, and once new settings were seen. The
source sends its last message after that."""

AWAITED_FOR = 45.0
"""Seconds that the source goes on for, at most, where it goes by time."""


class SoakSettings(ez.Settings):
    folder: str
    seconds: float
    """Wall time after which the source sends its last message."""

    n_messages: int = 0
    """If not 0, the source sends its last message after so many, however long that takes."""

    seed: int = 0
    change_every: int = 300
    """Messages from one change of settings to the next."""

    refuse_every: int = 100
    slow: tuple[int, int] = (20, 700)
    """The sink is slow for so many messages in so many."""

    fault: str = ""
    """What to do wrong, to see that it is found."""


def span(message: AxisArray) -> tuple[int, int]:
    """The first sample of *message* in the stream, and the one after its last."""
    start = round(message.axes["time"].offset * RATE)
    return start, start + message.data.shape[0]
