"""What neo does not check: whether the files of a recording have the length that their headers announce, and gaps.

neo computes the number of samples from the size of a file, so that a truncated one, or one with another number of
channels than its header says, gives samples all the same. Each function here knows one format.
"""

import math
import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt

from .faults import fault
from .neoreaders import Piece, Stream

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO

_BLOCK = 2**19
"""Sample numbers that are read at once."""

_SHORTEST_RUN = 4
"""Samples that a run has on average; with fewer, sample numbers follow no rate."""


class Runs(typing.NamedTuple):
    """Samples of a segment that follow one another without a gap."""

    firsts: npt.NDArray[np.int64]
    """The sample that each begins with, counted from the start of the segment."""

    times: npt.NDArray[np.float64]
    """When, in seconds."""


def runs_of(reader: "BaseRawIO", format: str, path: Path, stream: Stream, piece: Piece) -> Runs:
    """The runs of a segment, after its files have been checked.

    Raises:
        ValueError: The files do not have the length that the header announces, or sample numbers follow no rate.
    """
    _check_buffer(reader, path, stream, piece)
    if format in _CHECKS:
        runs = _CHECKS[format](reader, path, stream, piece)
        if runs is not None:
            return runs
    start = float(reader.get_signal_t_start(piece.block, piece.segment, stream.number))
    if not math.isfinite(start):
        raise fault(path, stream.name, f"begins at {start} s; allowed is a finite number.")
    return Runs(np.zeros(1, np.int64), np.array([start]))


def _buffer(reader: "BaseRawIO", stream: Stream, piece: Piece) -> dict[str, typing.Any] | None:
    """Where the samples are in which file, if they are in one as they are in memory."""
    if not reader.has_buffer_description_api():
        return None
    buffer_id = reader.header["signal_streams"]["buffer_id"][stream.number]
    found = reader.get_analogsignal_buffer_description(piece.block, piece.segment, buffer_id)
    return found if found["type"] == "raw" else None


def _check_buffer(reader: "BaseRawIO", path: Path, stream: Stream, piece: Piece) -> None:
    buffer = _buffer(reader, stream, piece)
    if buffer is None:
        return
    file, shape = Path(buffer["file_path"]), tuple(buffer["shape"])
    size, row = file.stat().st_size - buffer["file_offset"], np.dtype(buffer["dtype"]).itemsize
    rest = size - math.prod(shape) * row
    if rest:
        raise fault(
            file,
            None,
            f"has {size} bytes of samples, which is {rest} more than whole samples of {shape[1 - _time_axis(buffer)]} "
            f"channels in {np.dtype(buffer['dtype'])}: it is truncated, or has another number of channels.",
        )


def _time_axis(buffer: dict[str, typing.Any]) -> int:
    return int(buffer.get("time_axis", 0))


def _check_spikeglx(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> None:
    info = reader.signals_info_dict[piece.segment, stream.name.removesuffix("-SYNC")]
    meta, file, n_channels = info["meta"], Path(info["bin_file"]), info["num_chan"]
    announced, size = int(meta.get("fileSizeBytes", 0)), file.stat().st_size
    if announced and announced != size:
        raise fault(file, None, f"has {size} bytes, but {info['meta_file']} says fileSizeBytes={announced}.")
    if len(info["channel_names"]) != n_channels:
        raise fault(
            Path(info["meta_file"]),
            None,
            f"says nSavedChans={n_channels}, but names {len(info['channel_names'])} channels in snsChanMap.",
        )
    for key in ("snsApLfSy", "snsMnMaXaDw", "snsXaDwSy"):
        counts = meta.get(key)
        if counts is not None and sum(map(int, counts.split(","))) != n_channels:
            raise fault(Path(info["meta_file"]), None, f"says nSavedChans={n_channels}, but {key}={counts}.")
    _check_gains(info, n_channels)


def _check_gains(info: dict[str, typing.Any], n_channels: int) -> None:
    """Refuse a choice of channels with several gains: neo takes the gains of the first channels of the probe."""
    meta = info["meta"]
    saved = meta.get("snsSaveChanSubset", "all").strip()
    table = [row.split(" ") for row in meta.get("imroTbl", []) if isinstance(row, str)]
    gains = {tuple(row[3:5]) for row in table if len(row) > 4}
    n_first = len(_numbers(saved)) if saved not in ("", "all") else n_channels
    if saved in ("", "all") or len(gains) < 2:
        return
    if _numbers(saved)[: n_first - 1] != list(range(n_first - 1)):
        raise fault(
            Path(info["meta_file"]),
            None,
            f"says snsSaveChanSubset={saved} of channels with several gains, which neo would confuse.",
        )


def _numbers(ranges: str) -> list[int]:
    found: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


def _check_open_ephys_binary(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> Runs | None:
    buffer = _buffer(reader, stream, piece)
    if buffer is None:
        return None
    folder, n = Path(buffer["file_path"]).parent, buffer["shape"][0]
    file = folder / "sample_numbers.npy"
    if not file.is_file():
        file = folder / "timestamps.npy"
    numbers = np.load(file, mmap_mode="r")
    if numbers.dtype.kind not in "iu" or numbers.shape != (n,):
        raise fault(
            file,
            None,
            f"has shape {numbers.shape} and dtype {numbers.dtype}; allowed is an integer for each of the {n} samples.",
        )
    rate = reader.get_signal_sampling_rate(stream.number)
    firsts = [0, *_jumps(numbers)]
    times = numbers[firsts].astype(np.float64) / rate
    if n < _SHORTEST_RUN * len(firsts) and len(firsts) > 1:
        raise fault(file, None, "has sample numbers that follow no rate.")
    backward = [first for first in firsts[1:] if numbers[first] <= numbers[first - 1]]
    if backward:
        ez.logger.warning(
            f"{file}: the sample numbers step back at sample {backward[0]}; the results have the times of the file."
        )
    return Runs(np.array(firsts, np.int64), times)


def _jumps(numbers: npt.NDArray[np.integer]) -> list[int]:
    """Samples whose number does not follow that of the sample before."""
    found: list[int] = []
    for begin in range(0, len(numbers), _BLOCK):
        block = np.asarray(numbers[begin : begin + _BLOCK + 1], np.int64)
        found += (np.flatnonzero(np.diff(block) != 1) + begin + 1).tolist()
    return found


_HEADER, _RECORD, _SAMPLES = 1024, 2070, 1024
"""Bytes of the header and of a record of a ``.continuous`` file, and samples in a record."""


def _check_open_ephys(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> None:
    # neo fills gaps with zeros, and cuts channels of different lengths to the shortest.
    n = {reader.get_signal_size(each, segment, stream.number) for each, segment in _all_pieces(reader)}
    files = sorted(Path(reader.dirname).rglob("*.continuous"))
    for file in files:
        if (file.stat().st_size - _HEADER) % _RECORD:
            raise fault(file, None, "is truncated: it ends in the middle of a record.")
    for file in files:
        n_records = (file.stat().st_size - _HEADER) // _RECORD
        if n_records * _SAMPLES not in n:
            raise fault(
                file,
                None,
                f"has {n_records * _SAMPLES} samples where the recording is {sorted(map(int, n))} long: channels have "
                "different lengths, or there are gaps.",
            )


def _all_pieces(reader: "BaseRawIO") -> list[tuple[int, int]]:
    return [(block, segment) for block in range(reader.block_count()) for segment in range(reader.segment_count(block))]


def _check_blackrock(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> None:
    if path.is_dir() or not path.suffix.lower().startswith(".ns"):
        return
    with open(path, "rb") as file:
        header = file.read(314)
    if header[:8] == b"NEURALSG":
        return
    in_headers, resolution = (int.from_bytes(header[begin : begin + 4], "little") for begin in (10, 290))
    n_channels = int.from_bytes(header[310:314], "little")
    packet = 13 + 2 * n_channels
    if resolution == 10**9 and (path.stat().st_size - in_headers) % packet and len(_all_pieces(reader)) == 1:
        n = reader.get_signal_size(piece.block, piece.segment, stream.number)
        if n == (path.stat().st_size - in_headers) // packet:
            raise fault(path, None, "is truncated: it ends in the middle of a packet.")


def _check_intan(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> Runs:
    n, rate = reader.get_signal_size(0, 0, stream.number), reader.get_signal_sampling_rate(stream.number)
    numbers = reader.get_intan_timestamps()
    main_rate = max(reader.get_signal_sampling_rate(each) for each in range(reader.signal_streams_count()))
    if round(n * main_rate / rate) != len(numbers):
        raise fault(
            path,
            stream.name,
            f"has {n} samples at {rate} Hz, and {len(numbers)} time stamps at {main_rate} Hz: a file is truncated, or "
            "has another number of channels than the header says.",
        )
    return Runs(np.zeros(1, np.int64), np.array([float(numbers[0]) / main_rate]))


_CHECKS = {
    "blackrock": _check_blackrock,
    "intan": _check_intan,
    "openephys": _check_open_ephys,
    "openephysbinary": _check_open_ephys_binary,
    "spikeglx": _check_spikeglx,
}
