"""The stream of the soak test: every sample follows from its number, so that whoever receives it can tell it."""

import dataclasses

import numpy as np
import numpy.typing as npt

RATE = 30000.0
"""In Hz."""

N_CHANNELS = 16
SILENCE_EVERY = 1500
"""Messages from one long silence to the next, in which the cache is given back."""

LONGEST = 60000
"""In samples."""

# A prime, so that no message length divides it.
_N_ROWS = 65537


@dataclasses.dataclass(frozen=True)
class Stream:
    """Samples, lengths of messages and pauses between them, all from one seed."""

    seed: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        # Microvolts of noise around another offset in each channel.
        table = rng.integers(-500, 500, (_N_ROWS, N_CHANNELS)) + rng.integers(-2000, 2000, N_CHANNELS)
        object.__setattr__(self, "_table", table.astype(np.int16))

    def samples(self, start: int, stop: int) -> npt.NDArray[np.int16]:
        """Samples *start* to *stop* of the stream, shape (time, ch)."""
        rounds, rows = np.divmod(np.arange(start, stop), _N_ROWS)
        samples = self._table[rows]
        # Or one round would look like any other. Not in all channels, since the common reference takes that out.
        samples[:, 0] += (rounds * 37 % 1000).astype(np.int16)
        return samples

    def length(self, number: int) -> int:
        """Samples in message *number*: three in four have 300, the others anything."""
        rng = np.random.default_rng([self.seed, number])
        kind = rng.integers(0, 12)
        if kind == 0:
            return int(rng.integers(0, 3))
        return int(rng.integers(0, LONGEST + 1)) if kind <= 2 else 300

    def pause(self, number: int) -> float:
        """Seconds for which nothing comes before message *number*."""
        if number % SILENCE_EVERY == SILENCE_EVERY - 1:
            return 3.0
        rng = np.random.default_rng([self.seed, number, 1])
        return float(rng.uniform(0.05, 0.4)) if rng.integers(0, 60) == 0 else 0.0
