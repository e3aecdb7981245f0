"""Options that say how results are kept."""

import argparse
import typing
from collections.abc import Collection, Mapping

Asked: typing.TypeAlias = Mapping[str, typing.Any]
"""What was given of them, as keyword arguments of :class:`ezmsg.mlx.ZarrSink`; the compressor by its name."""

CODECS = {"lz4": 5, "zstd": 5}
"""Those of Blosc, with the levels that they have where none is given."""

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32")


def add(parser: argparse.ArgumentParser, taken: Collection[str]) -> None:
    """Add them to *parser*, but for those whose names are *taken* by parameters of the chain."""
    group = parser.add_argument_group("how results are kept")
    add = group.add_argument
    text = "that of the installed Zarr, none, lz4 or zstd, these with a level from 1 to 9, as in zstd:1 [default]"
    add("--compressor", type=_compressor, default="default", metavar="NAME[:LEVEL]", help=text)
    if "dtype" not in taken:
        text = "integers are rounded to the nearest one and saturate [as the chain gives them]"
        add("--dtype", choices=DTYPES, help=text)
    add("--chunk-mb", type=_positive, metavar="MB", help="size of the rows of a chunk, in MiB [4]")
    add("--chunk-samples", type=_count, metavar="N", help="rows of a chunk instead")
    add("--chunk-channels", type=_count, metavar="N", help="channels of a chunk [all]")


def asked(options: argparse.Namespace, taken: Collection[str]) -> Asked:
    """What was given."""
    names = {"compressor", "dtype", "chunk_mb", "chunk_samples", "chunk_channels"}.difference(taken)
    return {name: value for name in sorted(names) if (value := getattr(options, name)) is not None}


def for_sink(given: Asked) -> dict[str, typing.Any]:
    """The same with a codec as the compressor."""
    name, _, level = given.get("compressor", "default").partition(":")
    if name in CODECS:
        from ..offline.extra import import_extra

        numcodecs = import_extra("numcodecs")
        # Bits: smaller than with bytes, and zstd takes less time.
        codec = numcodecs.Blosc(cname=name, clevel=int(level or CODECS[name]), shuffle=numcodecs.Blosc.BITSHUFFLE)
    else:
        codec = None if name == "none" else name
    return {**given, "compressor": codec}


def _compressor(text: str) -> str:
    name, colon, level = text.partition(":")
    if (name in CODECS and (not colon or level in list("123456789"))) or text in ("default", "none"):
        return text
    raise argparse.ArgumentTypeError(
        f"it is {text!r}; allowed are default, none, lz4 and zstd, the last two with a level from 1 to 9 (zstd:1)"
    )


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text!r}; allowed is a finite number > 0")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; allowed is an integer >= 1")
    return int(text)
