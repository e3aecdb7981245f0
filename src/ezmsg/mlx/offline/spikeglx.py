"""SpikeGLX: pairs of a ``.bin`` and a ``.meta`` file, each with the gains, labels and rate of its own meta file.

The meta file is read as SpikeGLX's manual says ("Metadata"), with the gains of its "Offline Analysis Tools". neo reads
the meta files of a whole folder and gives what the first one says to all; see docs/explanation/neo-reports.md.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from .reading import Runs, Unfit, fault, faults_of, one_run
from .signals import ANALOG, AUXILIARY, DIGITAL, ELECTRODE, SYNC, Channels, FlatSegment, Sampled, whole_samples

_DTYPE = np.dtype("<i2")

_KINDS = {"AP": ELECTRODE, "LF": ELECTRODE, "SY": SYNC, "MN": ELECTRODE, "MA": AUXILIARY, "XA": ANALOG, "XD": DIGITAL}
"""By the first letters of a label."""

_SUFFIXES = {SYNC: "-SYNC", AUXILIARY: "-MA", ANALOG: "-XA", DIGITAL: "-XD"}
"""Suffixes that neo adds for synchronization words, and in its way for others."""

_PARTS = {"imec": "snsApLfSy", "nidq": "snsMnMaXaDw", "obx": "snsXaDwSy"}
"""By device, where the meta file counts its channels."""

_LETTERS = {"snsApLfSy": ("AP", "LF", "SY"), "snsMnMaXaDw": ("MN", "MA", "XA", "XD"), "snsXaDwSy": ("XA", "XD", "SY")}

_PREFIXES = {"imec": "im", "nidq": "ni", "obx": "ob"}
"""By device, how the entries of its analog-to-digital converter begin."""

_GAINS_BY_CHANNEL = (0, 1020, 1030, 1100, 1120, 1121, 1122, 1123, 1200, 1300)
"""Types of probes of the first generation, whose table has the gains of each channel."""

_GAINS_IN_HEADER = 1110
"""The type of probe whose table has the gains of all channels in front."""

_ONE_GAIN = {21: 80.0, 24: 80.0, 2003: 100.0, 2013: 100.0, 2020: 100.0}
"""By the type of a probe of the second generation, its gain."""

_MOST = {21: 8192, 24: 8192, 2003: 2048, 2013: 2048, 2020: 2048}
"""By the same, the count of its largest voltage; 512 of all others."""

_NAME = re.compile(
    r"(?P<run>.*?)(?:_g(?P<gate>\d+))?(?:_t(?P<trigger>\d+|cat))?\.(?P<stream>(?:imec|obx)\d*(?:\.\w+)?|nidq)"
)

Meta: typing.TypeAlias = dict[str, str]


def locate(path: Path) -> Path | None:
    """See :attr:`ezmsg.mlx.RecordingFormat.locate`."""
    if path.suffix.lower() in (".bin", ".meta") and path.is_file():
        return pair[0] if (pair := _pair(path)) else None
    return path if path.is_dir() and next(_files_in(path, deepest=2), None) else None


def sampled_in(path: Path) -> list[Sampled]:
    """The stream of a file, or all streams of the files in a folder and below it.

    Files of one stream are its segments, in the order of their runs, gates and triggers.
    """
    if path.is_file():
        pair = _pair(path)
        if pair is None:
            raise fault(path, None, "has no file of samples and no meta file with its name beside it.")
        return [_sampled(_stream_name(pair[0]), [pair[0]])]
    found: dict[str, list[Path]] = {}
    for file in sorted(_files_in(path), key=_order):
        found.setdefault(_stream_name(file), []).append(file)
    if not found:
        raise fault(path, None, "is a folder without pairs of .bin and .meta files.")
    return [_sampled_or_problem(name, files) for name, files in found.items()]


def _sampled(name: str, files: Sequence[Path]) -> Sampled:
    segments = [_segment(file) for file in files]
    return Sampled(name, name, [*segments], ELECTRODE not in segments[0].channels.kinds, _SUFFIXES)


def _sampled_or_problem(name: str, files: Sequence[Path]) -> Sampled:
    try:
        return _sampled(name, files)
    except (OSError, ValueError) as error:
        return Sampled(name, name, [], problem=error)


def _pair(path: Path) -> tuple[Path, Path] | None:
    """The files of samples and of meta data; a suffix may be in capitals."""
    named = ((path.with_suffix(kind), path.with_suffix(kind.upper())) for kind in (".bin", ".meta"))
    samples, meta = (next((file for file in either if file.is_file()), None) for either in named)
    return (samples, meta) if samples and meta else None


def _files_in(folder: Path, deepest: int = 64) -> Iterator[Path]:
    """The files of samples that have a meta file, in a folder and below it; folders that are links are not followed."""
    entries = sorted(folder.iterdir())
    yield from (file for file in entries if file.suffix.lower() == ".bin" and _NAME.match(file.name) and _pair(file))
    for entry in entries:
        if deepest and entry.is_dir() and not entry.is_symlink():
            yield from _files_in(entry, deepest - 1)


def _order(file: Path) -> tuple[object, ...]:
    """By run, gate and trigger; what CatGT has made of them after them."""
    name = _NAME.match(file.name)
    if name is None:
        return (file.name,)
    trigger = name["trigger"] or ""
    return name["run"], int(name["gate"] or 0), trigger == "cat", int(trigger) if trigger.isdecimal() else 0, str(file)


def _stream_name(file: Path) -> str:
    """As ``imec0.ap``, ``nidq`` or ``obx0``, from the name of the file; of one that was renamed, from its meta file."""
    name = _NAME.match(file.name)
    if name is None:
        with faults_of(file):
            name = _NAME.match(re.split(r"[/\\]", _read(_meta_file(file)).get("fileName", ""))[-1])
    return name["stream"].removesuffix(".obx").removesuffix(".bin") if name else file.stem


def _meta_file(file: Path) -> Path:
    return pair[1] if (pair := _pair(file)) else file.with_suffix(".meta")


def _read(file: Path) -> Meta:
    """The entries of a meta file, of which a note may hold any byte."""
    lines = file.read_text("utf-8", errors="replace").splitlines()
    pairs = [line.partition("=") for line in lines if "=" in line]
    return {name.strip().removeprefix("~"): value.strip() for name, _, value in pairs}


def _segment(file: Path) -> FlatSegment:
    meta_file = _meta_file(file)
    with faults_of(meta_file):
        meta = _read(meta_file)
        device = next((each for each in _PARTS if meta.get("typeThis", "imec").startswith(each)), "imec")
        channels = _channels(meta, device)
        start = int(meta.get("firstSample", 0)) / channels.rate if channels.rate else 0.0
        n_samples = whole_samples(file, 0, len(channels.labels), _DTYPE)
        announced = int(meta.get("fileSizeBytes", 0))

    def find_runs(segment: FlatSegment) -> Runs:
        if announced not in (0, size := file.stat().st_size):
            raise fault(file, None, f"has {size} bytes, but {meta_file} says fileSizeBytes={announced}.")
        return one_run(start)

    return FlatSegment(channels, n_samples, file.name, file, _DTYPE, 0, find_runs)


def _channels(meta: Meta, device: str) -> Channels:
    labels = _labels(meta, device)
    prefix = _PREFIXES[device]
    gain_of = _GAINS[device](meta)
    most = int(meta.get(f"{prefix}MaxInt", 0)) or (32768 if device == "nidq" else _MOST.get(_probe_type(meta), 512))
    volts_per_count = float(meta[f"{prefix}AiRangeMax"]) / most
    kinds = [_kind(label) for label in labels]
    is_digital = [kind in (SYNC, DIGITAL) for kind in kinds]
    gains = [1.0 if no else volts_per_count / gain_of(label) for label, no in zip(labels, is_digital, strict=True)]
    return Channels(
        labels=labels,
        rate=float(meta[f"{prefix}SampRate"]),
        gains=np.array(gains),
        offsets=np.zeros(len(labels)),
        units=["" if no else "V" for no in is_digital],
        kinds=kinds,
    )


def _kind(label: str) -> str:
    if label[:2] not in _KINDS:
        raise Unfit(f"has a channel {label!r}; known are those that begin with {', '.join(_KINDS)}.")
    return _KINDS[label[:2]]


def _labels(meta: Meta, device: str) -> list[str]:
    """The labels of the channels, which the entries about their choice and their number must agree with."""
    key = _PARTS[device]
    n_saved = int(meta["nSavedChans"])
    listed = re.findall(r"\(([A-Z]+\d+);", meta.get("snsChanMap", ""))
    labels = listed or _labels_by_number(meta, key, n_saved)
    if len(labels) != n_saved:
        raise Unfit(f"says nSavedChans={n_saved}, but names {len(labels)} channels in snsChanMap.")
    named = [sum(label[:2] == letters for label in labels) for letters in _LETTERS[key]]
    if key in meta and named != [int(each) for each in meta[key].split(",")]:
        raise Unfit(f"says nSavedChans={n_saved} and names {n_saved} channels, but {key}={meta[key]}.")
    if listed and device == "imec":
        _check_choice(meta, labels)
    return labels


def _labels_by_number(meta: Meta, key: str, n_saved: int) -> list[str]:
    """Labels where the meta file names none: from the numbers that were saved of those that were acquired."""
    acquired = meta.get("acq" + key.removeprefix("sns"), meta.get(key, ""))
    numbered = [
        f"{letters}{number}"
        for letters, count in zip(_LETTERS[key], acquired.split(","), strict=True)
        for number in range(int(count))
    ]
    saved = meta.get("snsSaveChanSubset", "all")
    if saved in ("", "all"):
        return numbered
    numbers = _numbers(saved)
    if max(numbers, default=0) >= len(numbered):
        raise Unfit(f"says snsSaveChanSubset={saved} of {len(numbered)} channels ({n_saved} were saved).")
    return [numbered[number] for number in numbers]


def _check_choice(meta: Meta, labels: list[str]) -> None:
    """Refuse a map that names other electrodes than those that were saved: which gain is whose would be a guess."""
    saved = meta.get("snsSaveChanSubset", "all")
    if saved in ("", "all"):
        return
    n_ap = int(meta["acqApLfSy"].split(",")[0]) if "acqApLfSy" in meta else None
    for label, number in zip(labels, _numbers(saved), strict=False):
        begin = {"AP": 0, "LF": n_ap}.get(label[:2])
        if begin is not None and begin + int(label[2:]) != number:
            raise Unfit(f"says snsSaveChanSubset={saved}, but names {label} where that has channel {number}.")


def _numbers(ranges: str) -> list[int]:
    found: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


def _probe_type(meta: Meta) -> int:
    """The type of the probe; 0, the first generation, of files of before there were others."""
    if "imProbeOpt" in meta:
        return 0
    said = meta.get("imDatPrb_type") or _table(meta)[0][0].removeprefix("NP")
    return int(said) if said.isdecimal() else 0


def _table(meta: Meta) -> list[list[str]]:
    """The rows of imroTbl, the first one being its header."""
    rows = re.findall(r"\(([^()]*)\)", meta.get("imroTbl", ""))
    return [re.split(r"[ ,]+", row.strip()) for row in rows] or [[""]]


def _gains_of_probe(meta: Meta) -> Callable[[str], float]:
    """A function that gives the gain of a channel by its label."""
    probe = _probe_type(meta)
    header, *rows = _table(meta)
    if probe in _GAINS_BY_CHANNEL:
        by_number = {row[0]: {"AP": row[3], "LF": row[4]} for row in rows if len(row) > 4}

        def of_channel(label: str) -> float:
            if label[2:] not in by_number:
                raise Unfit(f"has no gains of {label} in imroTbl.")
            return _positive(by_number[label[2:]][label[:2]], "imroTbl")

        return of_channel
    if "imChan0apGain" in meta:
        gains = {"AP": meta["imChan0apGain"], "LF": meta.get("imChan0lfGain", "0")}
    elif probe == _GAINS_IN_HEADER and len(header) > 4:
        gains = {"AP": header[3], "LF": header[4]}
    elif probe in _ONE_GAIN:
        gains = {"AP": str(_ONE_GAIN[probe])}
    else:
        said = f"{meta.get('imDatPrb_pn', 'no part number')} of type {probe}"
        raise Unfit(f"is of a probe whose gain is not known ({said}), and has no imChan0apGain.")
    # CatGT makes LF files of probes that have no such channels, with the gain of the others.
    if float(gains.get("LF", 0)) == 0:
        gains["LF"] = gains["AP"]
    return lambda label: _positive(gains[label[:2]], "the gain")


def _gains_of_nidq(meta: Meta) -> Callable[[str], float]:
    gains = {"MN": meta.get("niMNGain", "1"), "MA": meta.get("niMAGain", "1"), "XA": "1"}
    return lambda label: _positive(gains[label[:2]], f"ni{label[:2]}Gain")


_GAINS: Mapping[str, Callable[[Meta], Callable[[str], float]]] = {
    "imec": _gains_of_probe,
    "nidq": _gains_of_nidq,
    "obx": lambda meta: lambda label: 1.0,
}


def _positive(text: str, entry: str) -> float:
    if not (value := float(text)) > 0:
        raise Unfit(f"has a gain of {text} in {entry}; allowed is a number above 0.")
    return value
