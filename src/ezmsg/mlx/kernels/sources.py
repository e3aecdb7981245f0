"""Read the sources of kernels, which are files of their own beside the modules that launch them."""

from __future__ import annotations

import functools
import re
from importlib import resources
from pathlib import PurePosixPath

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\n', re.MULTILINE)
_BODY = re.compile(r"^KERNEL \{(.*)^\}|^KERNEL \{(.*)\}$", re.MULTILINE | re.DOTALL)


@functools.cache
def read_source(package: str, name: str) -> tuple[str, str]:
    """The header and the body of a kernel, as MLX wants them.

    A source has what the kernel needs before it, and ``KERNEL { ... }`` in the place of the function whose signature
    MLX writes. Lines of the form ``#include "name"`` stand for another file: a header (``.h``, ``.cuh``), which counts
    once, or a part of a body (``.inl``). It is in the same folder or, where backends share it, in ``sources`` beside
    this module.

    Args:
        package: The package whose folder ``sources`` has the file, like ``"ezmsg.mlx.kernels.cuda"``.
        name: Of the file.

    Returns:
        Header and body, without comments, indentation and empty lines: MLX copies and hashes all of it at each launch.

    Raises:
        ValueError: The file has no ``KERNEL { ... }``.
    """
    text = _with_includes(package, name, set())
    found = _BODY.search(text)
    if found is None:
        raise ValueError(f"{name} of {package} must have a KERNEL {{ ... }}")
    return made_small(text[: found.start()]), made_small(found[1] or found[2])


def made_small(source: str) -> str:
    """*source* without comments, indentation and empty lines."""
    lines = (line.strip() for line in re.sub(r"//.*", "", source).splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def _with_includes(package: str, name: str, seen: set[str]) -> str:
    def included(match: re.Match[str]) -> str:
        other = match[1]
        if other in seen:
            return ""
        if PurePosixPath(other).suffix != ".inl":
            seen.add(other)
        return _with_includes(package, other, seen)

    places = [resources.files(folder).joinpath("sources", name) for folder in (package, __package__)]
    text = next((place for place in places if place.is_file()), places[0]).read_text(encoding="utf-8")
    return _INCLUDE.sub(included, text.replace("#pragma once\n", ""))
