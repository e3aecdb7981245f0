"""Convert message data to another array backend, with MLX's buffer cache bounded."""

from collections.abc import Mapping
from types import MappingProxyType

import ezmsg.core as ez
import ezmsg.sigproc.asarray as sigproc
import numpy as np
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.sigproc.asarray import ArrayBackend as ArrayBackend
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from .cache import apply_cache_limit, check_cache_limit, follow_cache_limit, withdraw_cache_limit
from .memory.shapes import ShapeCounts, count_shapes
from .stream.convert import (
    MLX_DTYPES,
    NUMPY_DTYPES,
    ROUNDINGS,
    Rounding,
    dtype_name,
    is_integer,
    is_mlx_array,
    misfit,
    mlx_to_mlx,
    mlx_to_numpy,
    numpy_to_integers,
    numpy_to_mlx,
)
from .stream.unit import TransformerTakesSettings, UnitTakesSettings, check_message, one_of

# MLX counts although it may not be installed, so that the error about its absence names the extra.
_BACKENDS = (*(str(member) for member in ArrayBackend), "mlx")


class AsArraySettings(sigproc.AsArraySettings):
    """The settings of :obj:`ezmsg.sigproc.asarray.AsArray`, checked when they are built, with a limit on the cache."""

    backend: ArrayBackend = ArrayBackend.numpy
    """Target array backend."""

    dtype: str | None = None
    """Target dtype, by its name in the target backend, for example ``"float32"``. None keeps the dtype, as far as
    the target has it: float64 becomes float32 in MLX. If the target is an integer type that does not hold all values
    of the source, for example int16 for float32, values that do not fit change, NaN included. The log warns once.
    ``rounding="nearest"`` keeps them in range instead."""

    mlx_cache_limit_mb: float | str | None = 512.0  # type: ignore[assignment]
    """Limit in MiB on MLX's buffer cache in the process that runs this node; only where the target is MLX.

    MLX keeps freed buffers for reuse, by size; every message length never seen before adds some that nothing
    reuses. The limit bounds them. ``0`` turns the cache off, which is slower, and ``None`` leaves MLX alone. A limit
    below the working set of the steady message costs speed, one above it costs none.
    ``"auto"`` measures the working set in the running stream, and follows it up or down: on the CPU from MLX's own
    32 MiB, on a GPU from 512 MiB (see :mod:`ezmsg.mlx.cache.auto`).

    The limit belongs to the process: where several nodes ask, the tightest is in force, whichever converts
    first (see :mod:`ezmsg.mlx.cache`). May be changed at run time."""

    rounding: Rounding = "truncate"
    """How values become integers, where ``dtype`` is a type of integers. ``"truncate"`` does what the array library
    does: fractions are cut off, and what does not fit becomes another number. ``"nearest"`` rounds to the nearest
    integer, to the even one of two (as ``numpy.rint``), and saturates: what is too large or too small becomes the
    largest or the least integer, and NaN becomes 0. Between NumPy and MLX, in both directions and within each."""

    def __post_init__(self) -> None:
        check_cache_limit(self.mlx_cache_limit_mb, auto=True)
        backend = str(self.backend)
        if backend not in _BACKENDS:
            raise ValueError(f"'backend' must be {one_of(dict.fromkeys(_BACKENDS))}, got {self.backend!r}")
        known = {"mlx": MLX_DTYPES, "numpy": NUMPY_DTYPES}.get(backend)
        if self.dtype is not None and (
            not isinstance(self.dtype, str) or (known is not None and self.dtype not in known)
        ):
            allowed = "the name of a dtype" if known is None else one_of(known)
            raise TypeError(f"'dtype' must be None or {allowed} with backend {backend}, got {self.dtype!r}")
        roundings = ROUNDINGS if known is not None else ROUNDINGS[:1]
        if self.rounding not in roundings:
            allowed = one_of(roundings)
            raise ValueError(f"'rounding' must be {allowed} with backend {backend}, got {self.rounding!r}")


class AsArrayTransformer(
    TransformerTakesSettings, sigproc.AsArrayTransformer, BaseTransformer[AsArraySettings, AxisArray, AxisArray]
):
    """Convert the data of a message to another array backend.

    A drop-in for :obj:`ezmsg.sigproc.asarray.AsArrayTransformer`: axes, attrs and shape are untouched, a message
    that already is what is asked for comes back as the same object, and other backends than NumPy and MLX are
    left to it. Between NumPy and MLX the data is always copied (see :mod:`ezmsg.mlx.stream.convert`).

    Raises:
        ImportError: The target is MLX and no MLX backend is installed.
        RuntimeError: The target is MLX, in a forked process where MLX would hang (see
            :func:`~ezmsg.mlx.cache.apply_cache_limit`).
        TypeError: Data of a dtype that the target cannot hold, naming it; what is given is not a message.
    """

    settings: AsArraySettings

    node_name: str | None = None
    """Name of this node in the log; the unit sets its address."""

    _told: frozenset[str] = frozenset()
    _asked_for_limit = False
    _shapes: ShapeCounts | None = None
    _counts: Mapping[tuple[int, ...], list[int]] = MappingProxyType({})

    def _process(self, message: AxisArray) -> AxisArray:
        if type(message) is not AxisArray:
            check_message(message, self)
        dtype = self.settings.dtype
        data = message.data
        if self.settings.backend == "mlx":
            self.bound_cache(message)
            return self._to_mlx(message, data, dtype)
        if self._asked_for_limit:
            withdraw_cache_limit(self)
            self._asked_for_limit, self._counts = False, type(self)._counts
        if callable(tocoo := getattr(data, "tocoo", None)) and self.settings.backend == "numpy":
            # Events on the device; on the host they are what ezmsg-event gives.
            return replace(message, data=tocoo())
        if not is_mlx_array(data):
            return super()._process(message) if dtype is None else self._cast(message, dtype)
        if self.settings.backend == "numpy":
            rounds = self.settings.rounding == "nearest"
            if dtype is not None and not rounds:
                self._tell_narrowing(misfit(dtype_name(data), dtype), "NumPy")
            return replace(message, data=mlx_to_numpy(data, dtype, rounds=rounds))
        return super()._process(replace(message, data=mlx_to_numpy(data)))

    def _cast(self, message: AxisArray, dtype: str) -> AxisArray:
        """To another dtype, without MLX."""
        if self.settings.rounding == "nearest" and is_integer(dtype):
            data = np.asarray(message.data)
            if data.dtype.kind in "biuf" and data.dtype != np.dtype(dtype.rstrip("_")):
                return replace(message, data=numpy_to_integers(data, dtype))
        return super()._process(message)

    def bound_cache(self, message: AxisArray) -> None:
        """Count the shape of a message that is converted to MLX, and keep the limit on MLX's cache in force.

        For every message, and not when the node is built: the limit belongs to the process that converts, and neither
        survives a spawn nor exists where the transformer is used without a unit.
        """
        # Two dictionary look-ups and no more, since it is done for each message.
        count = self._counts.get(message.data.shape)
        if count is None:
            self._count_first(message)
        else:
            count[0] += 1
        limit = self.settings.mlx_cache_limit_mb
        if limit == "auto":
            follow_cache_limit(self, message.data.shape)
        else:
            apply_cache_limit(self, limit)  # type: ignore[arg-type]

    def _count_first(self, message: AxisArray) -> None:
        if self._shapes is None:
            self._shapes = count_shapes(self.node_name or type(self).__name__)
        self._shapes.add(message)
        self._asked_for_limit, self._counts = True, self._shapes.seen

    def _to_mlx(self, message: AxisArray, data: object, dtype: str | None) -> AxisArray:
        if type(data) is not np.ndarray and is_mlx_array(data):
            if dtype is None or dtype_name(data) == dtype.rstrip("_"):
                return message
            converted, narrowed = mlx_to_mlx(data, dtype, rounds=self.settings.rounding == "nearest")
        else:
            data = data if isinstance(data, np.ndarray) else np.asarray(data)
            rounds = dtype is not None and self.settings.rounding == "nearest"
            converted, narrowed = numpy_to_mlx(data, dtype, rounds=rounds)
        if narrowed:
            self._tell_narrowing(narrowed, "MLX")
        return replace(message, data=converted)

    def _tell_narrowing(self, narrowed: str, target: str) -> None:
        # Each one once, since dtypes may change while a stream runs.
        if narrowed and narrowed not in self._told:
            self._told |= {narrowed}
            ez.logger.warning(f"{self.node_name or type(self).__name__} narrows {narrowed} on the way to {target}.")


class AsArray(UnitTakesSettings, BaseTransformerUnit[AsArraySettings, AxisArray, AxisArray, AsArrayTransformer]):
    """Converts messages to another array library and bounds MLX's buffer cache; see :obj:`AsArrayTransformer`."""

    SETTINGS = AsArraySettings  # type: ignore[assignment]

    def create_processor(self) -> None:
        """Make the transformer, and give it the name that the log and the monitor call it by."""
        super().create_processor()
        self.processor.node_name = self.address

    async def shutdown(self) -> None:
        """Withdraw the limit on MLX's cache that was asked for."""
        # The unit may outlive its graph (in a notebook, say); what it asked for must not. Without a processor there
        # is nothing to withdraw: the graph failed to start.
        withdraw_cache_limit(getattr(self, "processor", None))
