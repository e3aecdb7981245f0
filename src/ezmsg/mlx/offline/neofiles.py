"""neo's readers: which one reads a path, how its samples become volts, and checks that neo leaves out.

neo computes the number of samples from the size of a file, so that a truncated one, or one with another number of
channels than its header says, gives samples all the same. Each function here knows one format.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import typing
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .reading import Runs, Scaling, fault, faults_of, import_extra, one_gain, one_run, runs_in, volts_of

if typing.TYPE_CHECKING:
    from neo.rawio.baserawio import BaseRawIO

_CLASSES = {"rawbinary": "RawBinarySignalRawIO"}
"""Readers that go by another name here than neo's."""

_BESIDE = {
    "intan": lambda name: not name.endswith("amplifier channel"),
    "openephys": lambda name: name != "Signals CH",
    "openephysbinary": lambda name: name.endswith(("SYNC", "_ADC")),
    "spikeglx": lambda name: name.endswith("-SYNC"),
}
"""By format: whether a stream holds what was recorded beside the electrodes."""


class Stream(typing.NamedTuple):
    """Channels that were sampled together."""

    number: int
    """Its index in neo's header."""

    name: str
    id: str
    is_beside: bool
    """Whether it holds no electrodes, but what was recorded beside them: synchronization lines, auxiliary inputs."""


class Block(typing.NamedTuple):
    """A segment of a recording: samples without a pause, as far as the format says."""

    block: int
    segment: int


class Channels(typing.NamedTuple):
    """What the header says of the channels of a stream."""

    labels: npt.NDArray[np.str_]
    rate: float
    gains: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.float64]
    units: list[str]


def reader_names() -> dict[str, type[BaseRawIO]]:
    """All readers by the names of their formats: those of neo's classes without ``RawIO``, in lower case."""
    rawio = import_extra("neo.rawio")
    found = {each.__name__.removesuffix("RawIO").lower(): each for each in rawio.rawiolist}
    return found | {name: getattr(rawio, class_name) for name, class_name in _CLASSES.items()}


def open_reader(path: Path, format: str, options: Mapping[str, object]) -> BaseRawIO:
    """The reader of *path*, with its header read.

    Raises:
        OSError: The system cannot open or read a file.
        ValueError: neo has no reader of that name, or it cannot read the files.
        TypeError: The reader takes no such option.
    """
    readers = reader_names()
    if format not in readers:
        raise ValueError(f"'format' must be one of {', '.join(sorted(readers))}, got {format!r}")
    reader_class = readers[format]
    with faults_of(path):
        arguments = _ARGUMENTS[format](path) if format in _ARGUMENTS else _arguments(path, reader_class)
    try:
        inspect.signature(reader_class).bind(**{**arguments, **options})
    except TypeError as error:
        raise TypeError(f"{path} cannot be read as {format} with {dict(options)!r} ({error}).") from error
    with faults_of(path):
        reader = reader_class(**{**arguments, **options})
        reader.parse_header()
    return reader


def _arguments(path: Path, reader_class: type[BaseRawIO]) -> dict[str, object]:
    if reader_class.rawmode != "one-dir":
        return {"filename": str(path)}
    return {"dirname": str(path if path.is_dir() else path.parent)}


def _of_intan(path: Path) -> dict[str, object]:
    if path.is_dir():
        headers = [path / name for name in ("info.rhd", "info.rhs") if (path / name).is_file()]
        if len(headers) != 1:
            raise fault(path, None, "is a folder without an info.rhd or info.rhs.")
        path = headers[0]
    # Gaps in the time stamps are followed, so neo need not refuse them.
    return {"filename": str(path), "ignore_integrity_checks": True}


def _of_blackrock(path: Path) -> dict[str, object]:
    number = path.suffix.lower().removeprefix(".ns")
    arguments: dict[str, object] = {"filename": str(path), "gap_tolerance_ms": math.inf}
    # Gaps in time stamps are followed, so neo need not make segments of them. Pauses are segments all the same.
    if number.isdigit():
        arguments["nsx_to_load"] = int(number)
        with open(path, "rb") as file:
            # Only the oldest files have the scale of their samples in the file of events, which may be large.
            arguments["load_nev"] = file.read(8) == b"NEURALSG"
    return arguments


_ARGUMENTS = {"blackrock": _of_blackrock, "intan": _of_intan}


def streams_of(reader: BaseRawIO, format: str) -> list[Stream]:
    """All streams that *reader* has found."""
    is_beside = _BESIDE.get(format, lambda name: False)
    return [
        Stream(number, str(name), str(id), is_beside(str(name)))
        for number, (name, id) in enumerate(reader.header["signal_streams"][["name", "id"]].tolist())
    ]


def pieces_of(reader: BaseRawIO) -> list[Block]:
    """All segments of all blocks, in order."""
    blocks = range(reader.block_count())
    return [Block(block, segment) for block in blocks for segment in range(reader.segment_count(block))]


def found_in(reader: BaseRawIO, format: str, path: Path) -> tuple[list[Stream], list[Block]]:
    """All streams and segments; of a file that is part of a folder's recording, its own.

    Raises:
        ValueError: neo finds no recording in a file of a folder.
    """
    streams, pieces = streams_of(reader, format), pieces_of(reader)
    if format == "spikeglx" and path.is_file():
        return _of_file(reader, path, streams, pieces)
    return streams, pieces


def choose(
    reader: BaseRawIO, format: str, path: Path, stream: str | None, segment: int | str | None
) -> tuple[Stream, list[Block]]:
    """The stream and the segments that are asked for.

    Raises:
        ValueError: There is none, or there are several and it is not said which.
    """
    streams, pieces = found_in(reader, format, path)
    return _chosen_stream(streams, stream, path), _chosen_pieces(pieces, segment, path)


def _of_file(
    reader: typing.Any, path: Path, streams: list[Stream], pieces: list[Block]
) -> tuple[list[Stream], list[Block]]:
    own = [
        key
        for key, info in reader.signals_info_dict.items()
        if path in (Path(info["bin_file"]), Path(info["meta_file"]))
    ]
    if not own:
        raise fault(path, None, "has no file of samples and no meta file with its name beside it.")
    number, name = own[0]
    return (
        [each for each in streams if each.name.removesuffix("-SYNC") == name],
        [each for each in pieces if each.segment == number],
    )


def _chosen_stream(streams: list[Stream], wanted: str | None, path: Path) -> Stream:
    if wanted is not None:
        matching = [each for each in streams if wanted == each.name] or [each for each in streams if wanted == each.id]
    else:
        matching = [each for each in streams if not each.is_beside] or streams
    if len(matching) == 1:
        return matching[0]
    if not streams:
        raise fault(path, None, "has no signals.")
    problem = "several streams" if matching else f"no stream {wanted!r}"
    raise fault(path, None, f"has {problem}; allowed as stream are {', '.join(each.name for each in streams)}.")


def _chosen_pieces(pieces: list[Block], wanted: int | str | None, path: Path) -> list[Block]:
    if wanted == "all" or (wanted is None and len(pieces) == 1):
        return pieces
    if isinstance(wanted, int) and 0 <= wanted < len(pieces):
        return [pieces[wanted]]
    allowed = f"allowed as segment are 0 to {len(pieces) - 1} and 'all'"
    problem = f"{len(pieces)} segments" if wanted is None else f"no segment {wanted!r}"
    raise fault(path, None, f"has {problem}; {allowed}.")


def channels_of(reader: BaseRawIO, stream: Stream) -> Channels:
    """What the header says of the channels of *stream*."""
    header = reader.header["signal_channels"]
    header = header[header["stream_id"] == stream.id]
    return Channels(
        labels=np.array([str(name).strip("\0 ") for name in header["name"]]),
        rate=reader.get_signal_sampling_rate(stream.number),
        gains=header["gain"].astype(np.float64),
        offsets=header["offset"].astype(np.float64),
        units=[str(unit).strip("\0 ") for unit in header["units"]],
    )


def scaling_of(channels: Channels, path: Path, name: str) -> tuple[dict[str, object], str]:
    """The scaling in the words of ezmsg-nwb's attrs, and a digest of it and of the labels.

    Raises:
        ValueError: The rate, a gain or an offset is not finite; channels are of several units, of which one is not of a
            voltage, or of several offsets.
    """
    if not 0 < channels.rate < math.inf:
        raise fault(path, name, f"has a rate of {channels.rate} Hz; allowed is a finite number above 0.")
    if not (np.isfinite(channels.gains).all() and np.isfinite(channels.offsets).all()):
        raise fault(
            path, name, f"has gains {channels.gains} and offsets {channels.offsets}; allowed are finite numbers."
        )
    gains, offsets, units = channels.gains, channels.offsets, set(channels.units)
    volts = np.array([volts_of(unit) or np.nan for unit in channels.units])
    is_voltage = bool(np.isfinite(volts).all())
    if is_voltage:
        gains, offsets, units = gains * volts, offsets * volts, {"volts"}
    if len(units) > 1:
        raise fault(path, name, f"has channels in the units {sorted(units)}; allowed is one unit, or voltages.")
    if not np.all(offsets == offsets[0]):
        raise fault(path, name, f"has channels with the offsets {sorted(set(offsets))}; allowed is one for all.")
    scaling = Scaling(one_gain(gains), float(offsets[0]), units.pop(), is_voltage).as_attrs()
    parts = [repr(channels.labels.tolist())]
    parts += [f"{key}={np.asarray(value).tolist()!r}" for key, value in scaling.items()]
    return scaling, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def runs_of(reader: BaseRawIO, format: str, path: Path, stream: Stream, piece: Block) -> Runs:
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


def _buffer(reader: BaseRawIO, stream: Stream, piece: Block) -> dict[str, typing.Any] | None:
    """Where the samples are in which file, if they are in one as they are in memory."""
    if not reader.has_buffer_description_api():
        return None
    buffer_id = reader.header["signal_streams"]["buffer_id"][stream.number]
    found = reader.get_analogsignal_buffer_description(piece.block, piece.segment, buffer_id)
    return found if found["type"] == "raw" else None


def _check_buffer(reader: BaseRawIO, path: Path, stream: Stream, piece: Block) -> None:
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


def _check_spikeglx(reader: typing.Any, path: Path, stream: Stream, piece: Block) -> None:
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


def _check_open_ephys_binary(reader: typing.Any, path: Path, stream: Stream, piece: Block) -> Runs | None:
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


def _check_open_ephys(reader: typing.Any, path: Path, stream: Stream, piece: Block) -> None:
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


def _all_pieces(reader: BaseRawIO) -> list[tuple[int, int]]:
    return [(block, segment) for block in range(reader.block_count()) for segment in range(reader.segment_count(block))]


_PTP_TOLERANCE = 0.9
"""Time stamps of a clock are not as even as numbers; a single sample that is missing makes 1."""


def _check_blackrock(reader: typing.Any, path: Path, stream: Stream, piece: Block) -> Runs | None:
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


def _check_intan(reader: typing.Any, path: Path, stream: Stream, piece: Block) -> Runs:
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
