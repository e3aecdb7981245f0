"""Open Ephys, binary: folders with ``structure.oebin``, each with the channels, scaling and rate of its own structure.

Read as the GUI's manual says ("Binary format"). neo gives what the first recording says to all; see
docs/explanation/neo-reports.md.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from .reading import Runs, fault, faults_of, runs_in, volts_of
from .signals import ANALOG, AUXILIARY, ELECTRODE, SYNC, Channels, FlatSegment, Sampled, whole_samples

_DTYPE = np.dtype("<i2")
_STRUCTURE = "structure.oebin"
_LEVELS = ("", "recording*/", "experiment*/recording*/", "Record Node*/experiment*/recording*/")
_SUFFIXES = {SYNC: "SYNC", ANALOG: "_ADC", AUXILIARY: "_AUX"}

_LEAST_VOLTS, _MOST_VOLTS = 0.01, 1000.0
"""An analog input whose largest count would be less, or more, has its scale in another unit than is said."""


def locate(path: Path) -> Path | None:
    """See :attr:`ezmsg.mlx.RecordingFormat.locate`."""
    if path.name == _STRUCTURE and path.is_file():
        return path.parent
    levels = (level for level in _LEVELS if path.is_dir() and next(path.glob(level + _STRUCTURE), None))
    return path if next(levels, None) is not None else None


def sampled_in(path: Path, experiment_names: str | Sequence[str] | None = None) -> list[Sampled]:
    """The streams of all recordings in a folder and below it; experiments and recordings are their segments.

    *experiment_names* are folders of experiments, to take no others.
    """
    wanted = [experiment_names] if isinstance(experiment_names, str) else experiment_names
    files = [path] if path.is_file() else sorted(path.rglob(_STRUCTURE), key=_order)
    found: dict[str, Sampled] = {}
    for file in files:
        recording = file.absolute().parent
        if wanted is not None and recording.parent.name not in wanted:
            continue
        for segment, name in _segments(file, recording):
            sampled = found.setdefault(name, Sampled(name, str(len(found)), [], suffixes=_SUFFIXES))
            sampled.segments.append(segment)
    if not found:
        raise fault(path, None, f"has no recordings with a {_STRUCTURE}.")
    for sampled in found.values():
        sampled.is_beside = ELECTRODE not in sampled.kinds
    return list(found.values())


def _order(file: Path) -> tuple[object, ...]:
    """By experiment and recording, as numbers, and then by node."""
    recording, experiment, *above = file.parts[-2::-1]
    return _number(experiment), _number(recording), above


def _number(name: str) -> int:
    return int("".join(re.findall(r"\d+$", name)) or 0)


def _segments(file: Path, recording: Path) -> Iterator[tuple[FlatSegment, str]]:
    """The segments of a structure, and the names of their streams."""
    node = recording.parent.parent.name
    with faults_of(file):
        structure = json.loads(file.read_text("utf-8"))
        for stream in structure["continuous"]:
            name = str(stream["folder_name"]).strip("/").split("/")[0]
            folder = recording / "continuous" / name
            if not folder.is_dir():
                continue
            channels, samples = _channels(stream, name), folder / "continuous.dat"
            n_channels, place = len(channels.labels), f"{recording.parent.name}/{recording.name}"
            if n_channels != int(stream.get("num_channels", n_channels)):
                raise fault(file, name, f"has num_channels={stream['num_channels']}, but names {n_channels}.")
            n_samples = whole_samples(samples, 0, n_channels, _DTYPE)
            segment = FlatSegment(channels, n_samples, place, samples, _DTYPE, 0, _find_runs)
            yield segment, f"{node}#{name}" if node.startswith("Record") else name


def _channels(stream: Mapping[str, typing.Any], name: str) -> Channels:
    listed = stream["channels"]
    labels = [str(channel["channel_name"]) for channel in listed]
    gains = np.array([float(channel["bit_volts"]) for channel in listed])
    about = [str(channel.get("description", "")) for channel in listed]
    kinds = [_kind(label, text, name) for label, text in zip(labels, about, strict=True)]
    said = [str(channel.get("units", "")) for channel in listed]
    units = [_unit(unit, kind, gain) for unit, kind, gain in zip(said, kinds, gains.tolist(), strict=True)]
    return Channels(labels, float(stream["sample_rate"]), gains, np.zeros(len(labels)), units, kinds)


def _kind(label: str, description: str, stream: str) -> str:
    if "SYNC" in label:
        return SYNC
    if label.startswith("AUX"):
        return AUXILIARY
    is_analog = "ADC" in label or re.fullmatch(r"AI\d+", label) or "NI-DAQ" in stream or "nidaq" in stream.lower()
    return ANALOG if is_analog or re.search(r"\bADC\b|analog input", description, re.IGNORECASE) else ELECTRODE


def _unit(said: str, kind: str, gain: float) -> str:
    """The unit of a channel: where nothing is said, microvolts of electrodes and volts of analog inputs.

    Some versions say microvolts or millivolts of analog and auxiliary inputs, whose ``bit_volts`` are volts.
    """
    if kind not in (ANALOG, AUXILIARY):
        return said or ("" if kind == SYNC else "uV")
    volts, largest = volts_of(said), 2**15 * gain
    if said and (volts is None or largest * volts >= _LEAST_VOLTS):
        return said
    return "V" if largest <= _MOST_VOLTS else "uV"


def _find_runs(segment: FlatSegment) -> Runs:
    file, n = segment.file.with_name("sample_numbers.npy"), segment.n_samples
    if not file.is_file():
        file = file.with_name("timestamps.npy")
    numbers = np.load(file, mmap_mode="r")
    if numbers.dtype.kind not in "iu" or numbers.shape != (n,):
        allowed = f"allowed is an integer for each of the {n} samples"
        raise fault(file, None, f"has shape {numbers.shape} and dtype {numbers.dtype}; {allowed}.")
    return runs_in(numbers, 1, 1 / segment.channels.rate, file)
