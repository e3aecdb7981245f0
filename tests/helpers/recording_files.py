"""Small recordings in formats of acquisition systems, written by what their makers say of them."""

import itertools
import json
import struct
from pathlib import Path

import numpy as np

RATE = 2000.0
N_CHANNELS = 3
DATA = np.random.default_rng(1).integers(-3000, 3000, (1000, N_CHANNELS), dtype=np.int16)


def write_raw_binary(folder: Path, data: np.ndarray = DATA) -> Path:
    """Samples, and nothing else."""
    path = folder / "recording.dat"
    data.tofile(path)
    return path


def write_spikeglx(
    folder: Path, run: str = "run_g0_t0.imec0.ap", first_sample: int = 4000, meta: dict[str, object] | None = None
) -> Path:
    """A file of action potentials of a Neuropixels 1.0 probe, with a synchronization channel; *meta* replaces entries.

    One count is 1.2 V / 1024 / 500, 2.34375 µV.
    """
    path = folder / f"{run}.bin"
    samples = np.column_stack([DATA, np.zeros(len(DATA), np.int16)])
    samples.tofile(path)
    names = [f"AP{number}" for number in range(N_CHANNELS)] + ["SY0"]
    entries = {
        "fileName": f"C:/data/{run}.bin",
        "fileSizeBytes": path.stat().st_size,
        "firstSample": first_sample,
        "imAiRangeMax": 0.6,
        "imDatPrb_pn": "NP1010",
        "imSampRate": RATE,
        "nSavedChans": N_CHANNELS + 1,
        "snsApLfSy": f"{N_CHANNELS},0,1",
        "snsSaveChanSubset": "all",
        "typeThis": "imec",
        "~imroTbl": "(0,384)" + "".join(f"({number} 0 0 500 250 1)" for number in range(N_CHANNELS)),
        "~snsChanMap": "(3,0,1)" + "".join(f"({name};{number}:{number})" for number, name in enumerate(names)),
    } | (meta or {})
    path.with_suffix(".meta").write_text("".join(f"{key}={value}\n" for key, value in entries.items()))
    return path


NP1_TABLE = "(0,384)" + "".join(f"({number} 0 0 500 250 1)" for number in range(384))
"""Of a probe of the first generation: each channel has its gains."""


def write_spikeglx_as(
    folder: Path,
    run: str = "run_g0_t0",
    labels: tuple[str, ...] = ("AP0", "AP1", "AP2", "SY0"),
    data: np.ndarray | None = None,
    suffixes: tuple[str, str] = (".bin", ".meta"),
    stream: str = "imec0.ap",
    **meta: object,
) -> Path:
    """A file of a probe whose channels have *labels*, with entries in *meta* that replace or add to those there are.

    Entries whose value is None are left out. One count is 1.2 V / 1024 / 500, 2.34375 µV, unless they say otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run}.{stream}{suffixes[0]}"
    samples = np.resize(DATA, (500, len(labels))) if data is None else data
    samples.astype("<i2").tofile(path)
    count = {letters: sum(label[:2] == letters for label in labels) for letters in ("AP", "LF", "SY")}
    entries = {
        "fileName": f"D:/data/{run}.{stream}.bin",
        "fileSizeBytes": samples.size * 2,
        "firstSample": 4000,
        "imAiRangeMax": 0.6,
        "imDatPrb_type": 0,
        "imSampRate": RATE,
        "nSavedChans": len(labels),
        "snsApLfSy": ",".join(str(number) for number in count.values()),
        "snsSaveChanSubset": "all",
        "typeThis": "imec",
        "imroTbl": NP1_TABLE,
        "snsChanMap": "(384,0,1)" + "".join(f"({label};{number}:{number})" for number, label in enumerate(labels)),
    } | meta
    text = "".join(
        f"{'~' * (name[-3:] in ('Tbl', 'Map'))}{name}={value}\n" for name, value in entries.items() if value is not None
    )
    path.with_suffix(suffixes[1]).write_bytes(text.encode("latin-1"))
    return path


def write_spikeglx_nidq(folder: Path) -> Path:
    """A file of an NI-DAQ: two analog channels of ±5 V, and a digital word."""
    path = folder / "run_g0_t0.nidq.bin"
    DATA.tofile(path)
    entries = {
        "fileName": f"C:/data/{path.name}",
        "fileSizeBytes": path.stat().st_size,
        "firstSample": 4000,
        "nSavedChans": 3,
        "niAiRangeMax": 5,
        "niMAGain": 1,
        "niMNGain": 1,
        "niSampRate": RATE,
        "niXDChans1": "0:7",
        "snsMnMaXaDw": "0,0,2,1",
        "snsSaveChanSubset": "all",
        "typeThis": "nidq",
        "~snsChanMap": "(0,0,1,2,1)(XA0;0:0)(XA1;1:1)(XD0;2:2)",
    }
    path.with_suffix(".meta").write_text("".join(f"{key}={value}\n" for key, value in entries.items()))
    return path


def write_open_ephys_binary(folder: Path, numbers: np.ndarray | None = None, node: str = "Record Node 101") -> Path:
    """A recording of one experiment, 0.195 µV a count, whose samples have *numbers*, from 6000 on by default."""
    recording = folder / node / "experiment1" / "recording1"
    continuous = recording / "continuous" / "Acquisition_Board-100.Rhythm_Data"
    continuous.mkdir(parents=True)
    DATA.tofile(continuous / "continuous.dat")
    numbers = np.arange(6000, 6000 + len(DATA)) if numbers is None else numbers
    np.save(continuous / "sample_numbers.npy", numbers.astype(np.int64))
    np.save(continuous / "timestamps.npy", numbers / RATE)
    channels = [
        {"channel_name": f"CH{number + 1}", "bit_volts": 0.195, "units": "uV", "description": ""}
        for number in range(N_CHANNELS)
    ]
    stream = {
        "folder_name": "Acquisition_Board-100.Rhythm_Data/",
        "sample_rate": RATE,
        "num_channels": N_CHANNELS,
        "channels": channels,
    }
    structure = {"GUI version": "0.6.7", "continuous": [stream], "events": [], "spikes": []}
    (recording / "structure.oebin").write_text(json.dumps(structure))
    return folder


def write_open_ephys_as(
    folder: Path,
    channels: list[tuple[str, float, str, str]],
    *,
    experiment: int = 1,
    rate: float = RATE,
    first: int = 6000,
    stream: str = "Acquisition_Board-100.Rhythm_Data",
) -> np.ndarray:
    """A recording of an experiment whose channels have a name, ``bit_volts``, a unit and a description; its samples."""
    recording = folder / "Record Node 101" / f"experiment{experiment}" / "recording1"
    continuous = recording / "continuous" / stream
    continuous.mkdir(parents=True)
    data = np.resize(np.roll(DATA, experiment), (500, len(channels)))
    data.tofile(continuous / "continuous.dat")
    np.save(continuous / "sample_numbers.npy", np.arange(first, first + len(data)))
    said = [
        {"channel_name": name, "bit_volts": volts, "units": unit, "description": text}
        for name, volts, unit, text in channels
    ]
    about = {"folder_name": f"{stream}/", "sample_rate": rate, "num_channels": len(channels), "channels": said}
    (recording / "structure.oebin").write_text(
        json.dumps({"GUI version": "0.6.7", "continuous": [about], "events": []})
    )
    return data


def write_open_ephys(folder: Path, gap: int = 0) -> Path:
    """A folder of a file a channel, 0.195 µV a count, in records of 1024 samples from number 6000 on, with a gap."""
    folder.mkdir(exist_ok=True)
    for channel in range(N_CHANNELS):
        header = (
            "header.format = 'Open Ephys Data Format';\nheader.version = 0.4;\nheader.header_bytes = 1024;\n"
            f"header.channel = 'CH{channel + 1}';\nheader.sampleRate = {RATE};\nheader.blockLength = 1024;\n"
            "header.bufferSize = 1024;\nheader.bitVolts = 0.195;\nheader.date_created = '1-Jan-2026 120000';\n"
        )
        with open(folder / f"100_CH{channel + 1}.continuous", "wb") as file:
            file.write(header.encode().ljust(1024))
            for record in range(5):
                file.write(struct.pack("<qHH", 6000 + 1024 * record + (gap if record > 2 else 0), 1024, 0))
                file.write(open_ephys_samples()[1024 * record : 1024 * (record + 1), channel].astype(">i2").tobytes())
                file.write(bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 255]))
    return folder


def open_ephys_samples() -> np.ndarray:
    """The samples of :func:`write_open_ephys`, which come in whole records."""
    return np.resize(DATA, (5120, N_CHANNELS))


def write_blackrock(folder: Path, pauses: tuple[int, ...] = (), name: str = "recording.ns2") -> Path:
    """A file of specification 2.3, 0.25 µV a count, at 2000 Hz; *pauses* of 0.5 s are in front of those samples."""
    path = folder / name
    header_bytes = 314 + 66 * N_CHANNELS
    with open(path, "wb") as file:
        file.write(struct.pack("<8sBBI16s256sII8HI", b"NEURALCD", 2, 3, header_bytes, b"2 kS/s", b"", 15, 30000,
                               2026, 1, 4, 1, 12, 0, 0, 0, N_CHANNELS))  # fmt: skip
        for number in range(N_CHANNELS):
            file.write(struct.pack("<2sH16sBBhhhh16sIIHIIH", b"CC", number + 1, f"elec{number + 1}".encode(), 1, number,
                                   -32764, 32764, -8191, 8191, b"uV", 300, 1, 1, 7500000, 3, 1))  # fmt: skip
        edges = [0, *pauses, len(DATA)]
        for number, (begin, end) in enumerate(itertools.pairwise(edges)):
            ticks = 30000 + begin * 15 + 15000 * number
            file.write(struct.pack("<BII", 1, ticks, end - begin))
            file.write(DATA[begin:end].tobytes())
    return path


def write_blackrock_as(path: Path, data: np.ndarray, channels: list[tuple[bytes, bytes, int]]) -> Path:
    """A file of specification 2.3 at 2000 Hz whose channels have a label, a unit and a value of their largest count."""
    with open(path, "wb") as file:
        n_bytes = 314 + 66 * len(channels)
        file.write(struct.pack("<8sBBI16s256sII8HI", b"NEURALCD", 2, 3, n_bytes, b"2 kS/s", b"", 15, 30000,
                               2026, 1, 4, 1, 12, 0, 0, 0, len(channels)))  # fmt: skip
        for number, (label, unit, most) in enumerate(channels):
            file.write(struct.pack("<2sH16sBBhhhh16sIIHIIH", b"CC", number + 1, label, 1, number, -32764, 32764, -most,
                                   most, unit, 300, 1, 1, 7500000, 3, 1))  # fmt: skip
        file.write(struct.pack("<BII", 1, 30000, len(data)) + data.astype("<i2").tobytes())
    return path


def write_blackrock_21(path: Path, data: np.ndarray) -> Path:
    """A file of specification 2.1 at 1000 Hz, which says no gains."""
    n_channels = data.shape[1]
    header = struct.pack(f"<8s16sII{n_channels}I", b"NEURALSG", b"1 kS/s", 30, n_channels, *range(1, n_channels + 1))
    path.write_bytes(header + data.astype("<i2").tobytes())
    return path


def write_blackrock_ptp(folder: Path, stamps: np.ndarray) -> Path:
    """A file of specification 3.0 with a time stamp in ns for each sample, 0.25 µV a count, at 2000 Hz."""
    path = folder / "recording.ns2"
    header = bytearray(write_blackrock(folder).read_bytes()[: 314 + 66 * N_CHANNELS])
    header[8:10] = bytes([3, 0])
    header[290:294] = struct.pack("<I", 10**9)
    packet = np.dtype([("reserved", "u1"), ("stamp", "<u8"), ("n", "<u4"), ("samples", "<i2", N_CHANNELS)])
    packets = np.zeros(len(DATA), packet)
    packets["reserved"], packets["n"], packets["stamp"], packets["samples"] = 1, 1, stamps, DATA
    path.write_bytes(bytes(header) + packets.tobytes())
    return path


def _text(text: str) -> bytes:
    encoded = text.encode("utf-16-le")
    return struct.pack("<I", len(encoded)) + encoded


def _intan_header() -> bytes:
    filters = struct.pack("<fhffffffhff", RATE, 1, 1.0, 0.1, 7500.0, 1.0, 0.1, 7500.0, 0, 1000.0, 1000.0)
    parts = [struct.pack("<Ihh", 0xC6912702, 3, 0), filters, _text("") * 3, struct.pack("<hh", 0, 0), _text("n/a")]
    parts += [struct.pack("<h", 1), _text("Port A"), _text("A"), struct.pack("<hhh", 1, N_CHANNELS, N_CHANNELS)]
    for number in range(N_CHANNELS):
        parts += [_text(f"A-{number:03d}"), _text(f"site{number}")]
        parts.append(struct.pack("<hhhhhhhhhhff", number, number, 0, 1, number, 0, 0, 0, 0, 0, 1e5, 0.0))
    return b"".join(parts)


def write_intan(folder: Path, first: int = 500) -> Path:
    """A folder with a file for each signal, 0.195 µV a count; the first sample is number *first*."""
    folder.mkdir(exist_ok=True)
    (folder / "info.rhd").write_bytes(_intan_header())
    DATA.tofile(folder / "amplifier.dat")
    np.arange(first, first + len(DATA), dtype=np.int32).tofile(folder / "time.dat")
    return folder


def write_intan_by_channel(folder: Path) -> Path:
    """A folder with a file for each channel, 0.195 µV a count; the first sample is number 500."""
    write_intan(folder)
    (folder / "amplifier.dat").unlink()
    for number in range(N_CHANNELS):
        DATA[:, number].tofile(folder / f"amp-A-{number:03d}.dat")
    return folder


def write_intan_in_one_file(folder: Path) -> Path:
    """A file of blocks of 128 samples, unsigned, the first one number 0."""
    path = folder / "recording.rhd"
    with open(path, "wb") as file:
        file.write(_intan_header())
        for begin in range(0, len(intan_samples()), 128):
            file.write(np.arange(begin, begin + 128, dtype=np.int32).tobytes())
            file.write(intan_samples()[begin : begin + 128].T.tobytes())
    return path


def intan_samples() -> np.ndarray:
    """The samples of :func:`write_intan_in_one_file`, which come in whole blocks: counts from 0 on."""
    return (DATA[:896].astype(np.int32) + 32768).astype(np.uint16)


def write_intan_rhs(folder: Path, names: tuple[str, ...], order: tuple[int, ...]) -> Path:
    """A folder of an RHS recording with a file a channel, made in some *order*: each file holds one value.

    That of channel number n is 100 + n of the amplifier, 500 + n of the DC amplifier, 1 + n of the stimulation.
    """
    header = struct.pack("<Ihh", 0xD69127AC, 3, 0)
    header += struct.pack("<fhffffffffhffhhfff", RATE, 1, 1.0, 0.1, 1e3, 7.5e3, 1.0, 0.1, 1e3, 7.5e3, 0, 1e3, 1e3, 0, 0,
                          1e-6, 1e-9, 0.0)  # fmt: skip
    header += _text("") * 3 + struct.pack("<hh", 1, 0) + _text("n/a") + struct.pack("<h", 1)
    header += _text("Port A") + _text("A") + struct.pack("<hhh", 1, len(names), len(names))
    for number, name in enumerate(names):
        header += _text(name) * 2 + struct.pack("<11hff", number, number, 0, 1, number, 0, 0, 0, 0, 0, 0, 1e5, 0.0)
    folder.mkdir()
    (folder / "info.rhs").write_bytes(header)
    np.arange(600, dtype="<i4").tofile(folder / "time.dat")
    for number in order:
        for kind, value, dtype in (("amp", 100, "<i2"), ("dc", 500, "<u2"), ("stim", 1, "<u2")):
            np.full(600, value + number, dtype).tofile(folder / f"{kind}-{names[number]}.dat")
    return folder
