"""What a simulated acquisition may be set to."""

import ezmsg.core as ez

from ..stream.checks import check_count, check_fields, check_number


class SimulatedAcquisitionSettings(ez.Settings):
    """Settings for :obj:`SimulatedAcquisition`. A value that is out of range raises when the settings are built."""

    sampling_rate: float = 30000.0
    """Samples a second in each channel, in Hz."""

    n_channels: int = 256
    """Number of channels."""

    samples_per_message: int = 300
    """Length of an ordinary message, in samples."""

    stall_every: int | None = 300
    """Every ``stall_every``-th message comes after a stall. 0 or None: no stalls."""

    n_stall_lengths: int = 40
    """How many different lengths stalls have, spread evenly from the shortest to the longest.

    The stalls go through all of them in random order before any length comes again, then through all of them in
    another order, and so on. With 1, all stalls are as long as the longest."""

    shortest_stall: float = 0.02
    """Time from the message before the shortest stall to the message after it, in seconds.

    The message after a stall holds all samples of that time, so it must be longer than an ordinary message."""

    longest_stall: float = 0.5
    """The same for the longest stall, in seconds. The default is what a Blackrock source buffers at most."""

    duration: float | None = None
    """Length of the stream in seconds. None: the stream does not end."""

    real_time: bool = False
    """Whether messages come at the pace of the sampling rate, so that stalls take their time, or at once."""

    seed: int = 0
    """The same seed gives the same order of stalls and, at the same rate and channel count, the same samples."""

    def __post_init__(self) -> None:
        # Plain Python numbers from here on: a NumPy float32 as rate would make float32 of every offset.
        for name in ("sampling_rate", "shortest_stall", "longest_stall"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        for name, smallest in (("n_channels", 1), ("samples_per_message", 1), ("n_stall_lengths", 1), ("seed", 0)):
            object.__setattr__(self, name, check_count(name, getattr(self, name), smallest))
        if self.stall_every is not None:
            object.__setattr__(self, "stall_every", check_count("stall_every", self.stall_every, 0))
        check_fields(self, flags=("real_time",))
        object.__setattr__(self, "real_time", bool(self.real_time))
        if self.duration is not None:
            object.__setattr__(self, "duration", check_number("duration", self.duration))
            check_number("duration * sampling_rate", self.duration * self.sampling_rate)
            if self.n_samples == 0:
                raise ValueError(
                    f"duration is {self.duration!r}; allowed at {self.sampling_rate} Hz is time for one sample or more."
                )
        if self.longest_stall < self.shortest_stall:
            raise ValueError(
                f"longest_stall is {self.longest_stall}; allowed is at least shortest_stall, {self.shortest_stall}."
            )
        if self.stall_every:
            self._check_stall_lengths()

    def _check_stall_lengths(self) -> None:
        check_number("longest_stall * sampling_rate", self.longest_stall * self.sampling_rate)
        shortest, longest = self._stall_range
        if shortest <= self.samples_per_message:
            raise ValueError(
                f"shortest_stall is {self.shortest_stall}, which is {shortest} samples; allowed is a time longer than "
                f"a message of samples_per_message={self.samples_per_message}."
            )
        if self.n_stall_lengths > longest - shortest + 1:
            raise ValueError(
                f"n_stall_lengths is {self.n_stall_lengths}; allowed is at most {longest - shortest + 1}, the number "
                f"of different lengths from {shortest} to {longest} samples."
            )

    @property
    def _stall_range(self) -> tuple[int, int]:
        return round(self.shortest_stall * self.sampling_rate), round(self.longest_stall * self.sampling_rate)

    @property
    def n_samples(self) -> int | None:
        """Length of the whole stream in samples, ``round(duration * sampling_rate)``; None if it does not end."""
        return None if self.duration is None else round(self.duration * self.sampling_rate)

    @property
    def stall_lengths(self) -> tuple[int, ...]:
        """The different lengths in samples of the messages after a stall, ascending; empty without stalls."""
        if not self.stall_every:
            return ()
        shortest, longest = self._stall_range
        steps = max(self.n_stall_lengths - 1, 1)
        # In integers, since rounding evenly spaced seconds can put two of them on the same sample.
        return tuple(longest - step * (longest - shortest) // steps for step in reversed(range(self.n_stall_lengths)))
