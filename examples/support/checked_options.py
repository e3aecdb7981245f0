"""Types of options for argparse: what a run could fail on at its end, or in its middle, is refused before it begins.

Each takes the text of an option and raises ``argparse.ArgumentTypeError`` with what was given and what is allowed;
argparse puts the name of the option in front and ends with exit code 2.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

from ezmsg.mlx.stream.convert import import_mlx


def require_mlx(parser: argparse.ArgumentParser) -> None:
    """End with one line that names the extras if MLX is not installed."""
    try:
        import_mlx()
    except ImportError as error:
        parser.exit(1, f"{error}\n")


def integer(smallest: int) -> Callable[[str], int]:
    """An integer of at least *smallest*."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"got {text!r}; allowed is an integer of at least {smallest}")
        return value

    return parse


count, whole = integer(1), integer(0)


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is a finite number above 0")
    return value


def positive_or_inf(text: str) -> float:
    """A number above 0, or infinity."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f'got {text!r}; allowed are a number above 0 and "inf"')
    return value


def mib(text: str) -> float | str | None:
    """A limit in MiB, below 2**63 bytes; "auto"; None for "none"."""
    if text in ("none", "auto"):
        return None if text == "none" else text
    value = _number(text)
    if not 0 <= value < 2.0**43:
        allowed = 'a finite number of MiB, 0 or above, "none" and "auto"'
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are {allowed}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def file(text: str) -> str:
    """A file that can be written."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; allowed is a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: no permission")
    return text


def array(text: str) -> str:
    """A file for ``numpy.save``, which adds the suffix if it is not there."""
    return _with_suffix(text, "" if text.endswith(".npy") else ".npy")


def picture(text: str) -> str:
    """A file that Matplotlib can draw into; without a suffix it adds .png."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise argparse.ArgumentTypeError('a picture needs Matplotlib: pip install "ezmsg-mlx[examples]"') from None
    # It would need LaTeX for pgf.
    suffixes = sorted(set(FigureCanvasBase.get_supported_filetypes()) - {"pgf"})
    suffix = Path(text).suffix[1:]
    if suffix and suffix.lower() not in suffixes:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed are names that end in .{', .'.join(suffixes)}")
    return _with_suffix(text, "" if suffix else ".png")


def _with_suffix(text: str, suffix: str) -> str:
    # Without it, too, since what ends in a slash or is a folder was not meant to get one.
    return file(file(text) + suffix)


def folder(text: str) -> Path:
    """A folder that is there, or that can be made."""
    path = Path(text)
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder: {str(above)!r} is a file")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write into {text!r}: no permission in {str(above)!r}")
    return path
