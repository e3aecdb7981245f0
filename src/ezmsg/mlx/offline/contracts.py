"""What a source of recordings and a sink of results have to do, so that others can be added."""

import typing
from collections.abc import Iterator

from ezmsg.util.messages.axisarray import AxisArray


class RecordingSource(typing.Protocol):
    """A recording that can be read from any sample on."""

    n_samples: int
    """Its length in samples."""

    sampling_rate: float
    """Samples a second."""

    identity: str
    """Tells this recording, read in this way, from all others, in one line.

    Everything that results depend on but the samples is part of it: times, labels and conversion. After one of them was
    corrected in the file, finished results are those of another recording, and an interrupted run starts over.
    """

    def read(self, start: int) -> Iterator[AxisArray]:
        """The samples from number *start* on, in order, as messages of bounded length.

        Where *start* is 0, or a place where a message of an earlier reading ended, the messages from there on must be
        the same ones. Where it is inside a message, the samples from there on come in messages of any length. Several
        may read at a time. With several workers, a source is pickled.

        Raises:
            OSError: The system cannot read it (a lock, no permission, an I/O error).
            ValueError: What is read is damaged or makes no sense. Both name the recording.
        """


class Opened(typing.NamedTuple):
    """What a sink found when it was opened."""

    is_complete: bool
    """The results of this very recipe are there already. Nothing else will be called but ``close``."""

    checkpoint: bytes | None
    """The last checkpoint of an interrupted run with this fingerprint, to whose results the next ones are appended."""


class ResultSink(typing.Protocol):
    """Takes results, and shows them under their final name when they are complete, not before."""

    def open(self, recipe: str, fingerprint: str) -> Opened:
        """Begin, or go on.

        Args:
            recipe: The recording and the settings of the chain, as text whose first line is the recording. Complete
                results of another recipe are not to be replaced: FileExistsError.
            fingerprint: The recipe and what else bits depend on. A checkpoint of another one is not to be used.
        """

    def append(self, message: AxisArray) -> None:
        """Take the next results."""

    def checkpoint(self, state: bytes) -> None:
        """Keep *state* together with all results so far, or, if it is interrupted, the last checkpoint as it was."""

    def restart(self) -> None:
        """Forget the checkpoint that :meth:`open` gave, and all results: the run begins anew."""

    def commit(self) -> None:
        """Show the results under their final name."""

    def close(self) -> None:
        """Let go. Without a commit, what the last checkpoint needs stays, and nothing under the final name."""
