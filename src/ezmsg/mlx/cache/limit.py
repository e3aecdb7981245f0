"""What a limit on MLX's buffer cache may be, and what is known of the one in force."""

import math
import numbers
from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20

MLX_CPU_DEFAULT = 32 * MIB
"""Limit in bytes that MLX's CPU allocator starts with (``mlx/backend/no_gpu/allocator.cpp``)."""

UNLIMITED = 1 << 62
"""A limit in bytes that no cache reaches."""


@dataclass(frozen=True)
class CacheLimit:
    """The limit on MLX's buffer cache that is in force in this process, and where it came from."""

    limit_mb: float | None
    """Limit in MiB. None where it is not known: only MLX knows its default, and it has no getter."""

    source: Literal["node", "outside", "default"]
    """``"node"``: a node's setting; ``"outside"``: a call of ``mx.set_cache_limit`` elsewhere in the process;
    ``"default"``: MLX's own."""

    node: str | None = None
    """The node that asked for it, where *source* is ``"node"``."""

    setting: str | None = None
    """The settings field that it was asked with, where *source* is ``"node"``."""


def check_cache_limit(limit_mb: float | str | None, field: str = "mlx_cache_limit_mb", *, auto: bool = False) -> None:
    """Raise unless *limit_mb* is a limit that MLX can hold.

    Args:
        limit_mb: Limit in MiB, or None for no limit of our own.
        field: Name of the settings field or argument, for the error.
        auto: Whether ``"auto"`` is allowed, too.

    Raises:
        TypeError: *limit_mb* is neither None nor a number (a bool or text is not).
        ValueError: *limit_mb* is not finite, negative, or 2**63 bytes or more.
    """
    if limit_mb is None or (auto and isinstance(limit_mb, str) and limit_mb == "auto"):
        return
    others = 'None, "auto"' if auto else "None"
    allowed = f"allowed are {others} and a finite number of MiB >= 0"
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, numbers.Real):
        raise TypeError(f"{field} is {limit_mb!r} ({type(limit_mb).__name__}); {allowed}.")
    try:
        as_float = float(limit_mb)
    except OverflowError:
        raise ValueError(f"{field} does not fit into a float; {allowed}, below 2**63 bytes.") from None
    except TypeError:
        raise TypeError(f"{field} is {limit_mb!r} ({type(limit_mb).__name__}); {allowed}.") from None
    if not math.isfinite(as_float) or as_float < 0 or as_float * MIB >= 2.0**63:
        raise ValueError(f"{field} is {limit_mb!r}; {allowed}, below 2**63 bytes.")


def in_mib(n_bytes: int) -> str:
    """A size for the log."""
    return f"{n_bytes / MIB:g} MiB"
