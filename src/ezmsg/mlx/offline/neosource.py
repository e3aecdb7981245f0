"""Recordings of acquisition systems: SpikeGLX, Open Ephys, Blackrock, Intan, what else neo reads, and raw binary."""

from __future__ import annotations

import inspect
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..stream.unit import check_count, check_number, check_path, is_real
from . import neofiles, openephys, spikeglx
from .contracts import RecordingFormat
from .neofiles import reader_names
from .reading import existing, faults_of, import_extra, one_run
from .signals import (
    ELECTRODE,
    ChannelChoice,
    Channels,
    FlatSegment,
    Sampled,
    SampledSource,
    describe,
    whole_samples,
)


class NeoSource(SampledSource):
    """A stream of a recording of an acquisition system as a source for :func:`ezmsg.mlx.process_recording`.

    SpikeGLX and Open Ephys (binary) are read from their own headers, everything else by neo. A recording that is given
    by its file is read without its neighbours, and each segment has the labels, gains and rate of its own header.

    Messages hold samples as they are stored, usually counts, of shape (time, ch), read from the files chunk by chunk.
    Channels have the names of the file. The attrs say how to get from counts to volts, as those of
    :class:`ezmsg.mlx.NWBSource` do: ``ezmsg.nwb.NWBScalingTransformer`` in the chain does it. Voltages in other units
    are said in volts.

    Channels of another kind are another stream: analog inputs beside electrodes, digital words beside voltages. Only
    where *channels* asks for several kinds they come together, and the axis ``ch`` holds records of ``label`` and
    ``kind``, for example for a common reference with ``channel_groups="kind"``.

    Times are those of the format, in seconds: of the first sample of a run of SpikeGLX (``firstSample``), of the sample
    numbers of Open Ephys and Intan, of Blackrock's clock; raw binary files begin at 0. A message ends in front of each
    gap in the sample numbers or time stamps of Open Ephys (binary), Intan and Blackrock (with a time stamp for each
    sample). A pause in other files of Blackrock begins another segment. Open Ephys (legacy) with gaps is refused.

    Files whose length is not the one that their headers announce are refused, for SpikeGLX, Open Ephys, Intan,
    Blackrock and raw binary files. Of other formats, neo's word is taken.

    Args:
        path: The file or folder. One file of a SpikeGLX folder stands for its own stream and segment. Of Intan's
            headerless formats: the folder, or ``info.rhd``.
        stream: Name of the stream, or its id. None: the only one, not counting what was recorded beside the
            electrodes (synchronization lines, auxiliary inputs, digital lines).
        segment: Number of the segment, from 0 and through all blocks. ``"all"``: all of them, one after the other, if
            their headers agree. None: the only one.
        format: Name of the format: that of neo's class without ``RawIO``, in lower case, for example ``"spikeglx"``.
        channels: Labels, kinds and indices in the stream, in a sequence or as text with commas
            (``"A-001,0:32,analog"``). A label or a kind that is not in the stream may be that of another one that was
            sampled with it. None: all of the stream.
        chunk_mb: Size of a message in MiB, at most.
        options: Further arguments of neo's class, and ``experiment_names`` of Open Ephys.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is nothing at *path*.
        OSError: A file cannot be opened or read.
        ValueError: There is no such format, or the files cannot be read; they are truncated or disagree with their
            headers; there is no such stream, segment or channel, or there are several and it is not said which; it has
            no samples, a rate, a gain or a time that is not finite, or channels of different units; *chunk_mb* is not
            finite and above 0. While it is read, too.
        TypeError: An argument is not of its type, or the format takes no such option.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        stream: str | None = None,
        *,
        format: str,
        segment: int | typing.Literal["all"] | None = None,
        channels: ChannelChoice | None = None,
        chunk_mb: float = 4.0,
        **options: object,
    ) -> None:
        check_path("path", path)
        self._format, self._options = format, options
        super().__init__(Path(path), stream, segment, channels, chunk_mb)
        self.identity = f"{self.path.name} {format} {self.identity}, options {sorted(options.items())!r}"

    def _sampled(self) -> list[Sampled]:
        return sampled_in(existing(self.path), self._format, self._options)


_OWN: Mapping[str, Callable[..., list[Sampled]]] = {
    "openephysbinary": openephys.sampled_in,
    "spikeglx": spikeglx.sampled_in,
}
"""Formats that are read without neo."""


def sampled_in(path: Path, format: str, options: Mapping[str, typing.Any]) -> list[Sampled]:
    """All streams of a recording, see :class:`NeoSource`."""
    own = _OWN.get(format)
    if own is None:
        import_extra("neo.rawio")
        return neofiles.sampled_in(path, format, options)
    try:
        inspect.signature(own).bind(path, **options)
    except TypeError as error:
        raise TypeError(f"{path} cannot be read as {format} with {dict(options)!r} ({error}).") from error
    with faults_of(path):
        return own(path, **options)


class RawBinarySource(NeoSource):
    """A file of samples without a header, channel after channel for each time, as a source.

    Messages are those of :class:`ezmsg.mlx.NeoSource`; times begin at 0. A file that does not hold whole samples of all
    channels is refused.

    Args:
        path: The file.
        sampling_rate: Samples a second.
        n_channels: Channels in the file.
        dtype: Of a sample, with its byte order: ``"int16"``, ``">i2"``, ``"float32"``.
        gain: What one count is, in *unit*; a number, or one for each channel.
        offset: What is to be added then, in *unit*.
        unit: Of the values that *gain* and *offset* make. Voltages are said in volts.
        labels: Names of the channels. None: ``ch0``, ``ch1`` and so on.
        header_bytes: Bytes in front of the first sample.
        channels: Labels and indices of channels, to read no others; see :class:`ezmsg.mlx.NeoSource`.
        chunk_mb: Size of a message in MiB, at most.

    Raises:
        ImportError: The extra ``offline`` is not installed.
        FileNotFoundError: There is no such file.
        OSError: The file cannot be opened or read.
        ValueError: The file has no samples, or not whole ones; an argument is not in its range; *labels* or *gain* are
            not as many as the channels.
        TypeError: An argument is not of its type; *dtype* is neither integers nor floats.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        sampling_rate: float,
        n_channels: int,
        dtype: npt.DTypeLike = "int16",
        gain: float | Sequence[float] = 1.0,
        offset: float = 0.0,
        unit: str = "",
        labels: Sequence[str] | None = None,
        header_bytes: int = 0,
        channels: ChannelChoice | None = None,
        chunk_mb: float = 4.0,
    ) -> None:
        rate = check_number("sampling_rate", sampling_rate)
        count = check_count("n_channels", n_channels)
        check_count("header_bytes", header_bytes, 0)
        if np.dtype(dtype).kind not in "iuf":
            raise TypeError(f"'dtype' must be integers or floats, got {dtype!r}")
        if not is_real(offset) or not math.isfinite(offset):
            raise ValueError(f"'offset' must be a finite number, got {offset!r}")
        if not isinstance(unit, str):
            raise TypeError(f"'unit' must be text, got {unit!r}")
        gains = np.broadcast_to(np.asarray(gain, np.float64), (count,)) if np.ndim(gain) == 0 else np.asarray(gain)
        names = [f"ch{number}" for number in range(count)] if labels is None else [str(each) for each in labels]
        if gains.shape != (count,):
            raise ValueError(f"'gain' must be a number or {count} numbers, one for each channel, got {gain!r}")
        if len(names) != count:
            raise ValueError(f"'labels' must be {count} names, one for each channel, got {labels!r}")
        self._given = Channels(
            names, rate, gains.astype(np.float64), np.full(count, float(offset)), [unit] * count, [ELECTRODE] * count
        )
        self._dtype, self._header_bytes = np.dtype(dtype), header_bytes
        super().__init__(path, format="rawbinary", channels=channels, chunk_mb=chunk_mb)

    def _sampled(self) -> list[Sampled]:
        with faults_of(self.path):
            n_samples = whole_samples(existing(self.path), self._header_bytes, len(self._given.labels), self._dtype)
        segment = FlatSegment(
            self._given, n_samples, "0", self.path, self._dtype, self._header_bytes, lambda segment: one_run(0.0)
        )
        return [Sampled("Signals", "0", [segment])]


def _file(*suffixes: str) -> Callable[[Path], Path | None]:
    """A function that takes files with these suffixes for recordings."""
    return lambda path: path if path.suffix.lower() in suffixes and path.is_file() else None


def _has(folder: Path, pattern: str) -> bool:
    return folder.is_dir() and next(folder.glob(pattern), None) is not None


def _open_ephys(path: Path) -> Path | None:
    file = _file(".continuous")(path)
    return file.parent if file else path if _has(path, "*.continuous") else None


def _intan(path: Path) -> Path | None:
    file = _file(".rhd", ".rhs")(path)
    if file and file.stem.lower() == "info":
        return file.parent
    return file or (path if _has(path, "[iI][nN][fF][oO].[rR][hH][dDsS]") else None)


def _open_raw_binary(
    path: Path, *, stream: str | None = None, segment: int | str | None = None, **options: typing.Any
) -> RawBinarySource:
    missing = [name for name in ("sampling_rate", "n_channels") if options.get(name) is None]
    if missing:
        raise ValueError(f"{path} has no header; needed to read it as raw binary: {' and '.join(missing)}.")
    if stream is not None or segment not in (None, 0, "all"):
        raise ValueError(f"{path} is raw binary; allowed are no stream and segment 0, not {stream!r} and {segment!r}.")
    return RawBinarySource(path, **options)


def neo_format(
    name: str, description: str = "", locate: Callable[[Path], Path | None] | None = None
) -> RecordingFormat:
    """The format that neo's reader *name* reads; told by the suffixes of neo's class where there is no *locate*."""

    def by_suffix(path: Path) -> Path | None:
        suffixes = {f".{suffix.lower()}" for suffix in reader_names()[name].extensions}
        return path if path.suffix.lower() in suffixes and path.exists() else None

    return RecordingFormat(
        name=name,
        description=description or f"neo's reader {name}",
        locate=locate or by_suffix,
        open=lambda path, **options: NeoSource(path, format=name, **options),
        describe=lambda path, **options: describe(sampled_in(path, name, options), path),
        in_folder=name in ("intan", "openephys", "openephysbinary"),
        chooses_channels=True,
    )


NEO_FORMATS = (
    RecordingFormat(
        "rawbinary",
        "samples without a header",
        _file(".bin", ".dat", ".raw"),
        _open_raw_binary,
        chooses_channels=True,
        in_search=False,
    ),
    neo_format("blackrock", "Blackrock .ns1 to .ns6", _file(*(f".ns{number}" for number in range(1, 7)))),
    neo_format("intan", "Intan .rhd and .rhs, with the samples in one file or beside it", _intan),
    neo_format("openephys", "Open Ephys, legacy: a folder of .continuous files", _open_ephys),
    neo_format("openephysbinary", "Open Ephys, binary: a folder with structure.oebin", openephys.locate),
    neo_format("spikeglx", "SpikeGLX .bin and .meta", spikeglx.locate),
)


def guessed_format(path: Path) -> RecordingFormat | None:
    """The format of the only reader of neo that claims *path* by its suffix; None if there is none, or several."""
    try:
        found = import_extra("neo.rawio").get_rawio(path)
    except ImportError:
        return None
    return neo_format(found.__name__.removesuffix("RawIO").lower()) if found else None


def named_format(name: str) -> RecordingFormat | None:
    """The format of neo's reader *name*."""
    try:
        return neo_format(name) if name in reader_names() else None
    except ImportError:
        return None
