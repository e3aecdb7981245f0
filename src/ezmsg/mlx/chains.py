"""Ready chains: each function builds one for one recording or stream.

    >>> from ezmsg.mlx import chains, run_chain, simulated_acquisition, SimulatedAcquisitionSettings
    >>> stream = SimulatedAcquisitionSettings(n_channels=8, duration=1.0)
    >>> chain = chains.spike_band_power(low=300.0, high=1000.0, bin_seconds=0.05)
    >>> [message.data.shape for message in run_chain(chain, simulated_acquisition(stream)) if len(message.data)][:2]
    [(1, 8), (1, 8)]

:func:`ezmsg.mlx.process_recording` takes them as they are, or with parameters as
``functools.partial(chains.spike_band_power, high=3000.0)``, which can be sent to another process. The command
``ezmsg-mlx process`` takes them by the names in :data:`READY`, with each parameter as an option.

Data comes as recorded, usually int16 counts (time, ch), and leaves as NumPy float32 in the same unit, or in its square
or logarithm where a chain says so. Filters are causal: results at a time depend on nothing after it. They begin as if
the first sample had been there for ever. A parameter that is out of its range raises ValueError when a chain is built,
and one that is not of its type TypeError.
"""

import itertools
import typing
from collections.abc import Callable, Mapping

from .stream.unit import check_count, check_number, check_one_of

if typing.TYPE_CHECKING:
    from .chain import ChainTransformer
    from .stream.unit import Stage

Reference: typing.TypeAlias = typing.Literal["none", "mean", "median"]
"""Reference that is subtracted from all channels at each sample: none, their mean or their median."""


def band_pass(
    low: float = 300.0,
    high: float = 6000.0,
    order: int = 5,
    reference: Reference = "median",
    dtype: typing.Literal["float32", "int16"] = "float32",
) -> "ChainTransformer":
    """A Butterworth band-pass, then a common reference: the usual first step before spikes are sorted.

    Args:
        low: Lower cut-off in Hz.
        high: Upper cut-off in Hz.
        order: Of the Butterworth filter.
        reference: What is subtracted from all channels after the filter.
        dtype: Of the results; int16 is rounded to the nearest and saturates.

    Returns:
        A chain from (time, ch) to (time, ch) at the same rate.
    """
    check_one_of("dtype", dtype, ("float32", "int16"), error=TypeError)
    return _one(_band(low, high, order), _subtract(reference), dtype=dtype)


def spike_band_power(
    low: float = 300.0,
    high: float = 1000.0,
    order: int = 2,
    reference: Reference = "none",
    bin_seconds: float = 0.05,
    log: bool = False,
) -> "ChainTransformer":
    """Power in the band of the spikes, in bins: firing around an electrode without sorting spikes.

    The band and the bins of Nason et al., Nature Biomedical Engineering 4 (2020); they take the mean of the magnitude,
    this is the mean of the square.

    Args:
        low: Lower cut-off in Hz.
        high: Upper cut-off in Hz.
        order: Of the Butterworth filter.
        reference: What is subtracted from all channels before the filter.
        bin_seconds: Length of a bin in seconds.
        log: Whether the result is the logarithm of the power, to base 10.

    Returns:
        A chain from (time, ch) to float32 (bin, ch), in the square of the unit of the data.
    """
    return _one(_subtract(reference), _band(low, high, order), _square(), _bins(bin_seconds, log))


def ewma_features(
    detrend_seconds: float = 1.0,
    smooth_seconds: float = 0.1,
    reference: Reference = "mean",
    bin_seconds: float = 0.01,
    log: bool = True,
) -> "ChainTransformer":
    """Smoothed power of what is left after a slow average: broadband features from two moving averages.

    Args:
        detrend_seconds: Time constant of the average that is subtracted, in seconds.
        smooth_seconds: Time constant of the average of the square, in seconds.
        reference: What is subtracted from all channels first.
        bin_seconds: Length of a bin in seconds.
        log: Whether the result is the logarithm of the power, to base 10.

    Returns:
        A chain from (time, ch) to float32 (bin, ch), in the square of the unit of the data.
    """
    from .detrend import DetrendTransformer
    from .ewma import EWMATransformer

    detrend = DetrendTransformer(time_constant=check_number("detrend_seconds", detrend_seconds))
    smooth = EWMATransformer(time_constant=check_number("smooth_seconds", smooth_seconds))
    return _one(_subtract(reference), [detrend], _square(), [smooth], _bins(bin_seconds, log))


READY: Mapping[str, Callable[..., "ChainTransformer"]] = {
    "band-pass": band_pass,
    "ewma-features": ewma_features,
    "spike-band-power": spike_band_power,
}
"""The chains by the names that the command has for them."""


# Each part is a list of transformers, which may be empty; its parameters are checked when it is made.


def _one(*parts: "list[Stage]", dtype: str = "float32") -> "ChainTransformer":
    """One transformer of all parts, from data as recorded to NumPy, which runs as one function those that can be."""
    from .asarray import ArrayBackend, AsArrayTransformer
    from .chain import ChainTransformer

    to_mlx = AsArrayTransformer(backend=ArrayBackend.mlx, dtype="float32")
    to_numpy = AsArrayTransformer(backend=ArrayBackend.numpy, dtype=dtype, rounding="nearest")
    stages = [to_mlx, *itertools.chain(*parts), to_numpy]
    return ChainTransformer(make_chain=lambda: stages)


def _subtract(reference: Reference) -> "list[Stage]":
    from .affinetransform import CommonRereferenceTransformer

    check_one_of("reference", reference, typing.get_args(Reference))
    return [] if reference == "none" else [CommonRereferenceTransformer(mode=reference)]


def _band(low: float, high: float, order: int) -> "list[Stage]":
    from .butterworthfilter import ButterworthFilterTransformer

    low, high = check_number("low", low), check_number("high", high)
    if low >= high:
        raise ValueError(f"'low' must be a frequency below high, which is {high!r}, got {low!r}")
    return [ButterworthFilterTransformer(cuton=low, cutoff=high, order=check_count("order", order), coef_type="sos")]


def _square() -> "list[Stage]":
    from .pow import PowTransformer

    return [PowTransformer(exponent=2.0)]


def _bins(bin_seconds: float, log: bool) -> "list[Stage]":
    from ezmsg.sigproc.aggregate import AggregationFunction
    from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
    from ezmsg.sigproc.math.log import LogTransformer

    if not isinstance(log, bool):
        raise TypeError(f"'log' must be True or False, got {log!r}")
    seconds = check_number("bin_seconds", bin_seconds)
    average = BinnedAggregateTransformer(bin_duration=seconds, operation=AggregationFunction.MEAN)
    return [average, LogTransformer(clip_zero=True)] if log else [average]
