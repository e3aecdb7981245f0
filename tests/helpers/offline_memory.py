"""A recording and a place for results in memory, for tests of what lies between them."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx import Opened

CH_AXIS = AxisArray.CoordinateAxis(data=np.array(["a", "b", "c", "d"]), dims=["ch"])


class MemorySource:
    """Noise of four channels as int16 counts, read in chunks."""

    def __init__(self, n_samples: int = 2000, chunk: int = 170, rate: float = 1000.0, seed: int = 0) -> None:
        self.n_samples, self.sampling_rate, self.chunk = n_samples, rate, chunk
        self.identity = f"noise {seed}, {n_samples} samples by {chunk}"
        rng = np.random.default_rng(seed)
        self.data = rng.integers(-300, 300, (n_samples, len(CH_AXIS.data)), dtype=np.int16)
        self.started_at: list[int] = []

    def message(self, begin: int, end: int) -> AxisArray:
        return AxisArray(
            data=self.data[begin:end],
            dims=["time", "ch"],
            axes={"time": AxisArray.TimeAxis(fs=self.sampling_rate, offset=begin / self.sampling_rate), "ch": CH_AXIS},
            key="noise",
            stream_dim="time",
        )

    def read(self, start: int) -> Iterator[AxisArray]:
        self.started_at.append(start)
        for begin in range(start, self.n_samples, self.chunk):
            yield self.message(begin, min(begin + self.chunk, self.n_samples))


class MemorySink:
    """Keeps what a disk would keep: ``results`` once they are complete, and the last checkpoint."""

    def __init__(self) -> None:
        self.results: npt.NDArray | None = None
        self.times: npt.NDArray | None = None
        self.lengths: list[int] = []
        self.recipe = self.fingerprint = ""
        self.kept: tuple[str, bytes, list[AxisArray]] | None = None
        self.before: Callable[[str], None] = lambda event: None
        """Called before everything that is done to the sink, with its name; may raise."""
        self.n_checkpoints = self.n_closed = 0
        self.rows: list[AxisArray] = []

    def open(self, recipe: str, fingerprint: str) -> Opened:
        if self.results is not None:
            if self.recipe != recipe:
                raise FileExistsError("There are results of another recipe.")
            return Opened(True, None)
        self.recipe, self.fingerprint, self.rows = recipe, fingerprint, []
        if self.kept is None or self.kept[0] != fingerprint:
            return Opened(False, None)
        self.rows = list(self.kept[2])
        return Opened(False, self.kept[1])

    def restart(self) -> None:
        self.rows, self.kept = [], None

    def append(self, message: AxisArray) -> None:
        self.before("append")
        self.rows.append(replace(message, data=np.array(message.data)))

    def checkpoint(self, state: bytes) -> None:
        self.before("checkpoint")
        self.kept = (self.fingerprint, state, list(self.rows))
        self.n_checkpoints += 1

    def commit(self) -> None:
        self.before("commit")
        rows = [row for row in self.rows if row.data.size]
        self.lengths = [len(row.data) for row in rows]
        self.results = np.concatenate([row.data for row in rows])
        axes = [row.axes.get("time", row.axes.get(row.dims[0])) for row in rows]
        self.times = np.concatenate([axis.value(np.arange(n)) for axis, n in zip(axes, self.lengths, strict=True)])

    def close(self) -> None:
        self.n_closed += 1
        self.rows = []
