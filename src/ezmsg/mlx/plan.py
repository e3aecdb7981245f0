"""Find the limit on MLX's buffer cache that a chain of processing steps needs, by running it.

A limit below the working set of the steady message costs speed; one above it costs memory only. How
large the working set is follows from what a chain keeps alive while it computes, which no formula knows::

    recommendation = recommend_cache_limit([to_mlx, highpass, power, to_numpy], messages)
    print(recommendation.reason)
    settings = AsArraySettings(backend=ArrayBackend.mlx, mlx_cache_limit_mb=recommendation.limit_mb)
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from ezmsg.baseproc import BaseProcessor, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, LinearAxis
from ezmsg.util.messages.util import replace

from .cache import MIB, lifted_cache_limit
from .memory.shapes import suggested_sizes
from .stream.convert import is_mlx_array, let_states_be_copied
from .stream.device import has_gpu_allocator
from .stream.segments import Layout, Segment, cut, value_at
from .stream.unit import Stage, Stages, a_type, captured, check_count, put_back, run_steps, steps_of


@contextlib.contextmanager
def steps_left_as_found(chain: Stages | Callable[[], Stages], factory: bool | None) -> Iterator[list[Stage]]:
    """The steps of *chain*, whose state is the same afterwards as before."""
    is_factory = _takes_no_argument(chain) if factory is None else factory
    given: Any = chain
    steps = steps_of(given() if is_factory else given)
    keepers = [] if is_factory else list(_keepers_of_state(steps, set()))
    found = captured(*keepers)
    let_states_be_copied()
    try:
        # Settings are frozen, and what is captured leaves them as they are.
        copies = copy.deepcopy([{**vars(keeper), "settings": None} for keeper in keepers])
    except Exception as error:
        raise TypeError(
            f"The state of the chain cannot be copied ({error}), so it could not be left as it is; give a factory, "
            "a callable without arguments that builds the chain."
        ) from error
    # The chain runs on copies, so that whoever holds an object of its state finds that one unchanged, too.
    for keeper, attributes in zip(keepers, copies, strict=True):
        del attributes["settings"]
        vars(keeper).update(attributes)
    try:
        yield steps
    finally:
        put_back(found)


def _takes_no_argument(chain: object) -> bool:
    try:
        return callable(chain) and not inspect.signature(chain).parameters
    except ValueError:
        return False


def _keepers_of_state(steps: Iterable[object], seen: set[int], named: bool = False) -> Iterator[object]:
    """The objects among *steps* whose attributes may be state, and those that the functions among them refer to.

    Of what functions refer to (*named*) only transformers count: modules, loggers and arrays hold no state.
    """
    for step in steps:
        if id(step) in seen:
            continue
        seen.add(id(step))
        if isinstance(step, functools.partial):
            yield from _keepers_of_state((step.func, *step.args, *step.keywords.values()), seen, named)
        elif inspect.ismethod(step):
            yield from _keepers_of_state((step.__self__,), seen, named)
        elif inspect.isfunction(step):
            yield from _keepers_of_state(_referred(step), seen, True)
        elif isinstance(step, (list, tuple)):
            yield from _keepers_of_state(step, seen, named)
        elif isinstance(step, BaseProcessor) or (not named and not inspect.isclass(step) and hasattr(step, "__dict__")):
            yield step


def _referred(function: Callable) -> list[object]:
    """Objects that a function refers to by name, except for the functions of other modules."""
    variables = inspect.getclosurevars(function)
    values = (*variables.nonlocals.values(), *variables.globals.values())
    return [
        value
        for value in values
        if getattr(value, "__module__", None) == function.__module__ or not inspect.isfunction(value)
    ]


def length_of(message: AxisArray) -> int:
    """The length of *message* in samples along its stream dimension.

    Raises:
        TypeError: *message* is not an AxisArray.
        ValueError: It has no dimension.
    """
    if not isinstance(message, AxisArray):
        raise TypeError(f"'messages' must hold AxisArray messages, got {a_type(message)}")
    if not message.dims:
        raise ValueError("'messages' must have a dimension to stream along, got one without dimensions")
    return message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]


def fill_cache(
    chain: Stages | Callable[[], Stages], factory: bool | None, rounds: Iterable[tuple[AxisArray, int]]
) -> list[int]:
    """Run *chain* over each message so often, as one stream; after each, the most bytes that MLX's cache has held."""
    import mlx.core as mx

    filled: list[int] = []
    most, offset = 0, None
    with steps_left_as_found(chain, factory) as steps:
        for message, repetitions in rounds:
            for _ in range(repetitions):
                message, offset = _moved(message, offset)
                # No name for what a step returns: what has a name is kept alive, and MLX computes in place otherwise.
                for output in run_steps(steps, message):
                    mx.eval(_mlx_arrays(output))
                    del output
                # What the last operations used comes back when the stream is done with them, not with their results.
                mx.synchronize()
                most = max(most, mx.get_cache_memory())
            filled.append(most)
    return filled


def _moved(message: AxisArray, offset: float | None) -> tuple[AxisArray, float | None]:
    """The message at *offset* (None: at its own) along its stream axis, and the offset of the one that follows."""
    length, dim = length_of(message), resolve_stream_dim(message)
    axis = message.axes.get(dim)
    if not isinstance(axis, LinearAxis):
        return message, offset
    axis = replace(axis, offset=axis.offset if offset is None else offset)
    return replace(message, axes={**message.axes, dim: axis}), value_at(axis, length)


def _mlx_arrays(output: object) -> list[object]:
    if not isinstance(output, AxisArray):
        return [output] if is_mlx_array(output) else []
    coordinates = [getattr(axis, "data", None) for axis in output.axes.values()]
    return [array for array in (output.data, *coordinates, *output.attrs.values()) if is_mlx_array(array)]


MARGIN = 1.25
"""The limit is so many times what was measured. In a graph one message begins before the last one has left, so that the
nodes of a chain hold buffers of several messages at a time."""

MOST_HELD = 64
"""On the CPU the limit holds so many lengths beside the steady one. A stream of more is irregular."""

# Of so many lengths, spread evenly, it is measured what they add if there are more than MOST_HELD.
_N_MEASURED = 16

# Rechunk is worth a word where it needs this share of the limit.
_WORTH = 0.1

# A state that is replaced by a new one of the same size needs two buffers, one of them from the second time on.
_RARE_REPETITIONS = 2


@dataclasses.dataclass(frozen=True)
class CacheRecommendation:
    """A limit on MLX's buffer cache, and the measurements behind it. Sizes in MiB."""

    limit_mb: float
    """The limit, a whole number, for ``AsArraySettings.mlx_cache_limit_mb``."""

    working_set_mb: float
    """Bytes that the steady message leaves in the cache, and finds there again."""

    steady_length: int
    """The most common length of a message, in samples."""

    added_mb: dict[int, float]
    """Bytes that each of the rarer lengths (in samples) adds to the cache, if no limit trims it."""

    reason: str
    """Why the limit is what it is, in a sentence or two."""

    rechunk_sizes: tuple[int, ...] = ()
    """``sizes`` of :obj:`ezmsg.mlx.RechunkSettings` with which a tenth of the limit or less would do; empty where it
    would not."""

    rechunk_limit_mb: float | None = None
    """The limit that the chain needs behind :obj:`ezmsg.mlx.Rechunk` with these sizes."""

    @property
    def n_lengths(self) -> int:
        """How many different lengths the messages have, the steady one included."""
        return 1 + len(self.added_mb)


def measure_working_set(
    chain: Stages | Callable[[], Stages], message: AxisArray, *, repetitions: int = 10, factory: bool | None = None
) -> float:
    """Run a chain over a message until MLX's buffer cache serves it, and return how large the cache is then.

    *chain* and *factory*, errors, and what is left as it was found, are as for :func:`recommend_cache_limit`.

    Args:
        chain: See there.
        message: The message. It is repeated as one stream without gaps: the offset of a linear stream axis moves on.
        repetitions: How often. A chain that emits only now and then (a window of many messages) needs as many
            messages as it takes to emit twice.
        factory: See there.

    Returns:
        The working set in MiB: with a cache at least as large, no repetition asks the system for memory. Memory of
        live arrays, for example the state of the chain, is not part of it.
    """
    check_count("repetitions", repetitions)
    _check_factory(chain, factory)
    length_of(message)
    with lifted_cache_limit():
        return fill_cache(chain, factory, [(message, repetitions)])[0] / MIB


def recommend_cache_limit(
    chain: Stages | Callable[[], Stages],
    messages: Iterable[AxisArray],
    *,
    repetitions: int = 10,
    factory: bool | None = None,
) -> CacheRecommendation:
    """Recommend a limit on MLX's buffer cache for a chain, given a sample of the messages that it is to process.

    The limit is never below one working set of the steady message, the most common length, so that it costs no
    speed. What it holds of the rarer lengths depends on MLX's allocator:

    * On a GPU (Metal, CUDA) a full cache drops what was used least recently. The limit holds the steady message and the
      costliest of the rarer ones, which then neither pushes the steady one out nor allocates everything it frees anew.
    * On the CPU a full cache turns away what is freed, and buffers of lengths that do not come again stay for good.
      They take the place of the steady message's wherever they come first, so that a few long messages at the start of
      a stream can cost the steady one half of its cache for good. So the limit holds all lengths in *messages*, up to
      :data:`MOST_HELD` of them. A stream of more lengths is irregular: further ones would be without end, so the limit
      holds the steady message and the costliest of the others, as on a GPU.

    Where :obj:`ezmsg.mlx.Rechunk` in front of the chain would need a tenth of that or less, that is measured, too, and
    the reason has both figures and the sizes.

    A quarter is added for messages that are under way at the same time (see :data:`MARGIN`). The limit belongs to the
    process: for several chains in one, add their limits up.

    Runs the chain here, in this process and thread. **Left as found:** the limit on the cache, and the state of the
    chain: the attributes of every step that is an object, and of every transformer that a function among the steps
    refers to by name, are copied before and put back after. State kept elsewhere is not; give a factory then. **Not
    left as found:** the contents of the cache, which is empty afterwards, so the next message of whatever runs in this
    process allocates anew; and ``mx.get_peak_memory()``. While it runs, no limit holds in this process.

    Args:
        chain: A transformer, or another callable that takes a message and returns a message or an array; or a sequence
            of them, applied in order. One that returns a list, like ``RechunkTransformer``, has its messages fed on
            one by one; None ends the message there. Or a factory: a callable without arguments that returns such a
            chain.
        messages: A sample of the stream, finite. For each length along the stream dimension the first message is
            kept and repeated, as one stream without gaps; messages without samples are left out.
        repetitions: How often the steady message is repeated, see :func:`measure_working_set`.
        factory: Whether *chain* is a factory. None: it is if it takes no argument.

    Raises:
        ValueError: No message has samples, or *repetitions* is below 1.
        TypeError: An argument is not of its type; a step is not callable, or has state that cannot be copied; a message
            is not an AxisArray.
        RuntimeError: See :func:`ezmsg.mlx.cache.lifted_cache_limit`.
    """
    check_count("repetitions", repetitions)
    _check_factory(chain, factory)
    if not isinstance(messages, Iterable):
        raise TypeError(f"'messages' must be an iterable of AxisArray, got {a_type(messages)}")
    counts: collections.Counter[int] = collections.Counter()
    first: dict[int, AxisArray] = {}
    for message in messages:
        length = length_of(message)
        if length:
            counts[length] += 1
            first.setdefault(length, message)
    if not counts:
        raise ValueError(
            "messages holds no message with samples; one at least is needed (a generator that has run is empty)."
        )

    steady = counts.most_common(1)[0][0]
    rarer = all_rarer = sorted(first.keys() - {steady})
    if len(rarer) > MOST_HELD:
        places = {round(place) for place in np.linspace(0, len(rarer) - 1, _N_MEASURED)}
        rarer = [rarer[place] for place in sorted(places)]
    # The longest right after the steady one, then upwards: a buffer serves smaller requests only, so that each length
    # adds its full share.
    rarer = rarer[-1:] + rarer[:-1]
    rounds = [(first[steady], repetitions), *((first[length], _RARE_REPETITIONS) for length in rarer)]
    with lifted_cache_limit():
        filled = [n_bytes / MIB for n_bytes in fill_cache(chain, factory, rounds)]
    added = {length: after - before for length, before, after in zip(rarer, filled, filled[1:], strict=False)}
    added = dict(sorted(added.items()))
    # Between those that were measured, in proportion.
    if added:
        shares = np.interp(all_rarer, list(added), list(added.values())).tolist()
        added = dict(zip(all_rarer, shares, strict=True))
    limit, reason = _limit(filled[0], steady, added, trims=has_gpu_allocator())
    found = CacheRecommendation(limit, filled[0], steady, added, reason)
    sizes = suggested_sizes(counts)
    if _WORTH * limit < max(MARGIN * filled[0] * sizes[0] / steady, 1.0):
        return found
    pieces = [(_shortened(first[min(n for n in first if n >= size)], size), repetitions) for size in sizes]
    with lifted_cache_limit():
        needed = float(max(math.ceil(MARGIN * fill_cache(chain, factory, pieces)[-1] / MIB), 1))
    if needed > _WORTH * limit:
        return found
    reason += (
        f" With Rechunk in front of the chain, RechunkSettings(sizes={sizes}), {needed:g} MiB instead of {limit:g} do."
    )
    return dataclasses.replace(found, reason=reason, rechunk_sizes=sizes, rechunk_limit_mb=needed)


def _shortened(message: AxisArray, n_samples: int) -> AxisArray:
    """A message of the first samples of *message*."""
    return cut((Segment(message),), [n_samples], Layout.of(message))[0][0]


def _limit(working_set: float, steady: int, added: dict[int, float], trims: bool) -> tuple[float, str]:
    """The limit in MiB and its reason; *trims*: whether the allocator drops what was used least recently."""
    needed = working_set
    reason = f"the working set of the steady message ({steady} samples) is {working_set:.1f} MiB"
    rarer = f"the rarer lengths ({len(added)} seen)"
    if added and (trims or len(added) > MOST_HELD):
        costliest = max(added, key=added.__getitem__)
        needed += added[costliest]
        reason += f", and the costliest of {rarer}, {costliest} samples, adds {added[costliest]:.1f} MiB"
        if not trims:
            reason += f"; all of them would take {sum(added.values()):.0f} MiB, and more with each new one"
    elif added:
        needed += sum(added.values())
        reason += f", and {rarer} add {sum(added.values()):.1f} MiB, which MLX does not trim on the CPU"
    limit = float(max(math.ceil(MARGIN * needed), 1))
    return limit, f"{limit:g} MiB: {reason}; {MARGIN - 1:.0%} are added for messages under way at the same time."


def _check_factory(chain: object, factory: bool | None) -> None:
    if not isinstance(factory, (bool, type(None))):
        raise TypeError(f"'factory' must be True, False or None, got {factory!r}")
    if factory and not callable(chain):
        raise TypeError(f"'chain' must be a callable without arguments if factory=True, got {chain!r}")
