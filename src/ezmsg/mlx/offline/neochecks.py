"""What neo does not check: whether the files of a recording have the length that their headers announce, and gaps.

neo computes the number of samples from the size of a file, so that a truncated one, or one with another number of
channels than its header says, gives samples all the same. Each function here knows one format.
"""

import math
import typing
from pathlib import Path

import numpy as np

from .faults import fault
from .neoreaders import Piece, Stream
from .neoruns import Runs, one_run, runs_in

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO


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
    return one_run(start)


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
    return runs_in(numbers, 1, 1 / reader.get_signal_sampling_rate(stream.number), file)


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


_PTP_TOLERANCE = 0.9
"""Time stamps of a clock are not as even as numbers; a single sample that is missing makes 1."""


def _check_blackrock(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> Runs | None:
    """The runs in a file with a time stamp for each sample (Precision Time Protocol); None for others."""
    with open(path, "rb") as file:
        header = file.read(314)
    in_headers, resolution = (int.from_bytes(header[begin : begin + 4], "little") for begin in (10, 290))
    if not path.suffix.lower().startswith(".ns") or header[:8] == b"NEURALSG" or resolution != 10**9:
        return None
    n_channels = int.from_bytes(header[310:314], "little")
    packet = np.dtype([("reserved", "u1"), ("stamp", "<u8"), ("n", "<u4"), ("samples", "<i2", n_channels)])
    n, rest = divmod(path.stat().st_size - in_headers, packet.itemsize)
    packets = np.memmap(path, packet, "r", in_headers, n)
    if packets["n"][0] != 1:
        return None
    if rest:
        raise fault(path, None, "is truncated: it ends in the middle of a packet.")
    sizes = [reader.get_signal_size(*each, stream.number) for each in _all_pieces(reader)]
    first = sum(sizes[: piece.segment])
    rate = reader.get_signal_sampling_rate(stream.number)
    return runs_in(
        packets["stamp"][first : first + sizes[piece.segment]], 1e9 / rate, 1e-9, path, tolerance=_PTP_TOLERANCE
    )


def _check_intan(reader: typing.Any, path: Path, stream: Stream, piece: Piece) -> Runs:
    n, rate = reader.get_signal_size(0, 0, stream.number), reader.get_signal_sampling_rate(stream.number)
    numbers = reader.get_intan_timestamps()
    main_rate = max(reader.get_signal_sampling_rate(each) for each in range(reader.signal_streams_count()))
    ratio = round(main_rate / rate)
    if n * ratio != len(numbers):
        raise fault(
            path,
            stream.name,
            f"has {n} samples at {rate} Hz, and {len(numbers)} time stamps at {main_rate} Hz: a file is truncated, or "
            "has another number of channels than the header says.",
        )
    if reader.file_format == "one-file-per-channel":
        _check_channel_files(reader, path, stream)
    runs = runs_in(numbers, 1, 1 / main_rate, path)
    return Runs(-(-runs.firsts // ratio), runs.times)


def _check_channel_files(reader: typing.Any, path: Path, stream: Stream) -> None:
    """Refuse files that are not those of the header: neo takes all there are, in alphabetical order."""
    header = reader.header["signal_channels"]
    channels = header["id"][header["stream_id"] == stream.id].tolist()
    files = sorted(channels)
    if not stream.is_beside:
        folder = path if path.is_dir() else path.parent
        files = sorted(file.stem.partition("-")[2] for file in folder.rglob("*.dat") if "amp" in file.name)
    if channels != files:
        raise fault(path, stream.name, f"has the channels {channels} in its header, and files for {files}.")


_CHECKS = {
    "blackrock": _check_blackrock,
    "intan": _check_intan,
    "openephys": _check_open_ephys,
    "openephysbinary": _check_open_ephys_binary,
    "spikeglx": _check_spikeglx,
}
