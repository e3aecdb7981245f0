"""How results lie in a Zarr group: their dtype, the lengths of chunks and what compresses them."""

import math
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..stream.checks import check_count, check_number
from ..stream.convert import is_mlx_array, mlx_to_numpy
from ..stream.integers import is_integer, numpy_to_integers
from .extra import import_extra

if typing.TYPE_CHECKING:
    from numcodecs.abc import Codec

    Compressor: typing.TypeAlias = Codec | typing.Literal["default"] | None

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32")
"""What results can be kept as."""


@dataclass(frozen=True)
class ResultLayout:
    """See the arguments of :class:`ezmsg.mlx.ZarrSink`, which these are.

    Raises:
        ValueError: An argument is not in its range.
        TypeError: An argument is not of its type.
    """

    chunk_mb: float = 4.0
    chunk_samples: int | None = None
    chunk_channels: int | None = None
    compressor: "Compressor" = "default"
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_number("chunk_mb", self.chunk_mb)
        for name, value in (("chunk_samples", self.chunk_samples), ("chunk_channels", self.chunk_channels)):
            if value is not None:
                check_count(name, value, 1)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed are None and {', '.join(map(repr, DTYPES))}.")
        compressor = self.compressor
        if compressor is None or (isinstance(compressor, str) and compressor == "default"):
            return
        if not isinstance(compressor, import_extra("numcodecs.abc").Codec):
            raise TypeError(f'compressor is {compressor!r}; allowed are a codec of numcodecs, None and "default".')

    def converted(self, data: typing.Any) -> npt.NDArray:
        """Data of results as what is kept: integers are rounded to the nearest one and saturate."""
        values = mlx_to_numpy(data) if is_mlx_array(data) else np.asarray(data)
        if self.dtype is None or values.dtype == self.dtype:
            return values
        if values.dtype.kind not in "biuf":
            raise TypeError(f"Results have dtype {values.dtype}, which cannot become {self.dtype!r}.")
        return numpy_to_integers(values, self.dtype) if is_integer(self.dtype) else values.astype(self.dtype)

    def chunks(self, row: Sequence[int], dtype: np.dtype, n_rows: int | None) -> tuple[int, ...]:
        """The lengths of a chunk.

        Args:
            row: Shape of the results at one time.
            dtype: Of the results.
            n_rows: Rows that a chunk is to divide, if it can; None for no such number.
        """
        n_bytes = max(dtype.itemsize * math.prod(row), 1)
        most = self.chunk_samples or max(int(self.chunk_mb * 2**20 / n_bytes), 1)
        rest = list(row)
        if rest and self.chunk_channels is not None:
            rest[0] = min(self.chunk_channels, rest[0])
        return (rows_of_chunk(most, n_rows), *rest)

    def __str__(self) -> str:
        """What values depend on; empty where they are as the chain gives them."""
        return "" if self.dtype is None else f"results as {self.dtype}"


def rows_of_chunk(most: int, n_rows: int | None) -> int:
    """Length of a chunk: *most* at most, and a divisor of *n_rows* if one is not much shorter."""
    if not n_rows or n_rows <= most:
        return n_rows or most
    fewest = -(-n_rows // most)
    return next((n_rows // n for n in range(fewest, 2 * fewest + 1) if n_rows % n == 0), most)
