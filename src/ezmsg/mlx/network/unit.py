"""The unit that runs an ``mlx.nn.Module`` on the windows of a stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal

import ezmsg.core as ez
import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseStatefulTransformer, processor_state, resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray, CoordinateAxis, LinearAxis
from ezmsg.util.messages.util import replace

from ..stream.convert import as_float32, begin_reading, import_mlx, is_mlx_array, mlx_to_numpy
from ..stream.device import bus, uses_gpu
from ..stream.hostmemory import Block, device_memory
from ..stream.segments import GAP_TOLERANCE, is_same_rate, linear_axis, sampling_period, value_at, with_known_rate
from ..stream.unit import (
    PublishesEach,
    attributes_to_copy,
    check_count,
    check_fields,
    check_message,
    check_one_of,
    one_of,
)
from .windows import Cut, Samples, Waiting

if TYPE_CHECKING:
    import mlx.core as mx

    from .model import Model, Tree, Weights

DTYPES = ("float32", "bfloat16", "float16")
BITS = (8, 4)
MOST_SIZES = 4
_OPERATION = "a network"
_FLOAT32 = np.dtype(np.float32)


class NetworkSettings(ez.Settings):
    """Settings for :obj:`Network`.

    Raises:
        TypeError: A field has a value of another type; ``dtype`` is not one of its names; ``model_class`` is no
            ``mlx.nn.Module``; it does not take ``model_kwargs``.
        ValueError: A field has a value that is not allowed; ``model_class`` cannot be imported.
        FileNotFoundError: There is no file ``checkpoint_path``.
    """

    model_class: Any
    """The model: a class derived from ``mlx.nn.Module``, or its dotted name. It is called as ``model(x)`` or as
    ``model(x, state) -> (y, state)``, with *x* of shape (batch, window, features). *y* is (batch, results, channels) or
    (batch, channels), or a dictionary of such arrays, one for each head. The state is None at first, and then what it
    returned: arrays in lists, tuples and dictionaries, always of the same shapes."""

    model_kwargs: dict[str, Any] | None = None
    """Its arguments. An ``input_size`` that it takes and that is not among them becomes the number of features."""

    checkpoint_path: str | None = None
    """Its weights: a ``.safetensors`` or ``.npz`` file, or a ``state_dict`` of PyTorch (``.pt``, ``.pth``, ``.bin``),
    which is read without running code of it, and whose layers are given MLX's names. None: random weights. A new path
    while it runs exchanges the weights (:meth:`NetworkTransformer.exchange_weights`)."""

    dtype: str = "float32"
    """Dtype of weights and windows: ``"float32"``, ``"bfloat16"`` or ``"float16"``. Results are float32."""

    quantize: int | None = None
    """Bits of a weight, 8 or 4, of linear, embedding and recurrent layers whose rows are multiples of 64 (as
    ``mlx.nn.quantize``); None: all of them keep ``dtype``."""

    window: int = 1
    """Samples that the model sees at a time."""

    hop: int | None = None
    """Samples from one window to the next; None: ``window``."""

    state: Literal["carry", "none"] = "carry"
    """Whether the state that a model returns is given to it with the next window, or each window begins anew. A model
    that returns none has none to carry."""

    reset_on_resume: bool = False
    """Whether the model's state begins anew where the stream goes on after a gap in its time stamps. No window lies
    across a gap in any case."""

    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    """Windows that a model without state takes at a time, where several wait: four numbers at most. All are compiled
    before the first message. On the CPU, those are left out that would change the last bit of a result."""

    def __post_init__(self) -> None:
        from .model import check_arguments, imported

        if self.model_kwargs is not None and not isinstance(self.model_kwargs, Mapping):
            raise TypeError(f"'model_kwargs' must be None or a dictionary of arguments, got {self.model_kwargs!r}")
        check_arguments(imported(self.model_class), self.model_kwargs)
        if self.checkpoint_path is not None:
            _check_checkpoint(self.checkpoint_path)
        check_one_of("dtype", self.dtype, DTYPES, error=TypeError)
        check_one_of("quantize", self.quantize, BITS, none=True)
        check_one_of("state", self.state, ("carry", "none"))
        object.__setattr__(self, "window", check_count("window", self.window))
        if self.hop is not None:
            object.__setattr__(self, "hop", check_count("hop", self.hop))
        check_fields(self, flags=("reset_on_resume",))
        object.__setattr__(self, "batch_sizes", _checked_sizes(self.batch_sizes))


def _check_checkpoint(path: object) -> None:
    from .checkpoint import SUFFIXES

    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"'checkpoint_path' must be None or a path, got {path!r}")
    if os.path.splitext(path)[1] not in SUFFIXES:
        raise ValueError(f"'checkpoint_path' must end in {one_of(SUFFIXES)}, got {os.fspath(path)!r}")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'checkpoint_path' must be a file, got {os.fspath(path)!r}, which does not exist")


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(sizes, (tuple, list)) or not 1 <= len(sizes) <= MOST_SIZES:
        raise ValueError(f"'batch_sizes' must be one to {MOST_SIZES} integers of at least 1, got {sizes!r}")
    return tuple(sorted({check_count("each of batch_sizes", size) for size in sizes}))


@processor_state
class NetworkState:
    """Where a stream stands, for :obj:`NetworkTransformer`. Its MLX arrays are computed, and hold no graph."""

    waiting: Waiting = Waiting()
    """Samples of the next window that have come already."""

    of_model: Tree = None
    """State that the model returned with the last window; None before the first."""

    weights: Weights | None = None
    """Weights that have taken the place of those in the settings, by their names."""

    next_offset: float | None = None
    """Time stamp that the next message has, if no samples are missing."""

    gain: float = 0.0
    """Sampling period in seconds."""

    stream_dim: str = ""
    """Name of the stream dimension."""


class _Exchange:
    """Loads weights in a thread, one after the other."""

    # With slots, since a chain takes back what attributes hold where a later stage fails, and the thread goes on.
    __slots__ = ("_early", "_loading", "_model", "_pool", "loaded")

    def __init__(self) -> None:
        self.loaded: Weights | None = None
        self._model: Model | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._early: list[tuple[object, Future[Weights]]] = []
        self._loading: list[Future[None]] = []

    def begin(self, model: Model) -> None:
        """Load for *model* from now on, also what has been asked for before there was one."""
        self.loaded, self._model = None, model
        early, self._early = self._early, []
        for weights, loading in early:
            self._submit(model, weights, loading)

    def __getstate__(self) -> tuple[Weights | None, Model | None, list[object]]:
        # What a thread is loading would be missing in a copy.
        wait(self._loading)
        return self.loaded, self._model, [weights for weights, _ in self._early]

    def __setstate__(self, held: tuple[Weights | None, Model | None, list[object]]) -> None:
        self.__init__()  # type: ignore[misc]
        self.loaded, self._model, early = held
        self._early = [(weights, Future()) for weights in early]

    def load(self, weights: object) -> Future[Weights]:
        """Called when :attr:`loaded` are these."""
        loading: Future[Weights] = Future()
        if self._model is None:
            self._early.append((weights, loading))
        else:
            self._submit(self._model, weights, loading)
        return loading

    def _submit(self, model: Model, weights: object, loading: Future[Weights]) -> None:
        def load() -> None:
            try:
                loaded = model.load(weights)
                if model is self._model:
                    self.loaded = loaded
                loading.set_result(loaded)
            except BaseException as error:
                ez.logger.error(f"New weights are refused, and the old ones stay: {error}")
                loading.set_exception(error)

        if _has_mlx(weights):
            # Only the thread that made them can have them computed.
            import_mlx().async_eval(weights)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "ezmsg-mlx weights")
        self._loading = [each for each in self._loading if not each.done()] + [self._pool.submit(load)]


def _has_mlx(tree: object) -> bool:
    if isinstance(tree, Mapping):
        return any(map(_has_mlx, tree.values()))
    return is_mlx_array(tree) or (isinstance(tree, (list, tuple)) and any(map(_has_mlx, tree)))


class NetworkTransformer(BaseStatefulTransformer[NetworkSettings, AxisArray, list[AxisArray], NetworkState]):
    """Run an ``mlx.nn.Module`` on the windows of a stream, with its state, in shapes of a fixed number.

    A call takes a message of any length and returns the results of the windows that it completes: a list with one
    message for each head, under the key of the head (of the input, where there is one result without a name); empty
    where it completes none. Data is NumPy or MLX of any real dtype, the stream dimension anywhere; all others are the
    features, in their order. Results are float32 in the library of the input, (time, channel): MLX data stays on
    its device, and is not waited for.

    - Windows start every ``hop`` samples from the first one of the stream, however it is cut into messages; on the CPU
      results are the same to the last bit.
    - The last result of a window has the time stamp of its last sample, and the others are evenly spaced before it,
      over one hop. Of windows that overlap and have one result a sample, those of the last ``hop`` samples count.
    - With a state, one window after the other. Without, windows that wait go together, in ``batch_sizes``.
    - A window with a sample that is not finite has results that are not, and leaves the state as it was.
    - The state, that of the model and the samples that wait, changes when a whole message has gone through, or not at
      all.

    Raises:
        ValueError: The stream dimension has no regular axis; the message has no dimension; a model or a checkpoint does
            not fit, where that needs the number of features to be known.
        TypeError: What is given is not a message; complex data.

    Example:
        >>> import numpy as np
        >>> from ezmsg.util.messages.axisarray import AxisArray
        >>> from ezmsg.mlx import NetworkTransformer
        >>> decoder = NetworkTransformer(
        ...     model_class="ezmsg.mlx.network.RecurrentDecoder",
        ...     model_kwargs={"hidden_size": 16, "output_size": 2, "patch": 14},
        ...     window=14,
        ...     hop=4,
        ... )
        >>> axes = {"time": AxisArray.TimeAxis(fs=50.0)}
        >>> (result,) = decoder(AxisArray(np.zeros((30, 8), np.float32), ["time", "ch"], axes=axes))
        >>> result.data.shape, result.axes["time"].gain
        ((5, 2), 0.08)
    """

    NONRESET_SETTINGS_FIELDS = frozenset({"checkpoint_path", "reset_on_resume"})

    _model: Model | None = None
    _sizes: tuple[int, ...] = ()
    _taken: Weights | None = None
    _labels: Mapping[object, CoordinateAxis] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = _Exchange()

    def __getstate__(self) -> dict[str, object]:
        return attributes_to_copy(self)

    def prepare(self, n_features: int) -> None:
        """Make the model, load its weights, and run or compile it in all shapes, ahead of the first message.

        The unit does so before its graph starts, where ``model_kwargs`` have an ``input_size``. Otherwise it is done
        with the first message.

        Raises:
            As the class.
        """
        if self._model is not None and self._model.n_features == n_features:
            return
        from .model import Model

        settings = self.settings
        model = Model(
            settings.model_class,
            settings.model_kwargs,
            n_features,
            settings.checkpoint_path,
            settings.dtype,
            settings.quantize,
            settings.state == "carry",
        )
        self._sizes = model.prepare(settings.window, settings.batch_sizes)
        self._model, self._labels, self._taken = model, {}, None
        self._exchange.begin(model)

    def update_settings(self, new_settings: NetworkSettings) -> None:
        """Take other settings. A new checkpoint is loaded beside the stream; all else makes a new model."""
        old = self.settings
        super().update_settings(new_settings)
        kept = self.NONRESET_SETTINGS_FIELDS
        if any(getattr(old, name) != getattr(new_settings, name) for name in vars(new_settings) if name not in kept):
            self._model = None
        elif self._model is not None and old.checkpoint_path != new_settings.checkpoint_path:
            if new_settings.checkpoint_path is not None:
                self.exchange_weights(new_settings.checkpoint_path)

    def exchange_weights(self, weights: object) -> Future[Weights]:
        """Load other weights beside the stream; they take over between two messages.

        Args:
            weights: The path of a file as ``checkpoint_path`` names one; or a tree of arrays, dictionaries and lists as
                ``mlx.nn.Module.parameters`` has them, or a dictionary of names. PyTorch's names are taken, too.

        Returns:
            What is done when they are loaded; the next message is the first one with them. It has the error where they
            do not fit. Then, with a line in the log, the old ones stay.
        """
        return self._exchange.load(weights)

    def _hash_message(self, message: AxisArray) -> int:
        if type(message) is not AxisArray:
            check_message(message, self)
        return self._message_hash(with_known_rate(message, self._state.stream_dim, self._state.gain))

    def _reset_state(self, message: AxisArray) -> None:
        if not message.dims:
            raise ValueError("The message has data of shape (), without a dimension; a network needs one to go along.")
        dim = resolve_stream_dim(message)
        gain = sampling_period(message, dim, _OPERATION)
        state = self._state
        if dim != state.stream_dim or not is_same_rate(gain, state.gain):
            state.gain = gain
        shape = list(message.data.shape)
        del shape[message.get_axis_idx(dim)]
        model = self._model
        self.prepare(int(np.prod(shape)))
        if model is not self._model:
            state.weights = None
        state.stream_dim, state.waiting, state.of_model, state.next_offset = dim, Waiting(), None, None

    def _process(self, message: AxisArray) -> list[AxisArray]:
        state, settings, model = self._state, self.settings, self._model
        assert model is not None
        dim = state.stream_dim
        idx = message.get_axis_idx(dim)
        n_new = message.data.shape[idx]
        if n_new == 0:
            return []
        axis = linear_axis(message.axes, dim)
        waiting, of_model = state.waiting, state.of_model
        if state.next_offset is not None and abs(axis.offset - state.next_offset) > GAP_TOLERANCE * state.gain:
            waiting = Waiting()
            if settings.reset_on_resume:
                of_model = None
        data = self._samples(message, idx)
        if waiting.samples is not None and isinstance(waiting.samples, np.ndarray) != isinstance(data, np.ndarray):
            waiting = Waiting(_in_library_of(data, waiting.samples))
        loaded = self._exchange.loaded
        weights = loaded if loaded is not self._taken else state.weights
        cut = Cut.of(waiting, data, settings.window, settings.hop or settings.window)
        staged: list[Block] = []
        results, of_model = self._run(model, weights or model.weights, cut, of_model, staged)
        rest = cut.rest()
        state_after = [of_model, rest.samples if is_mlx_array(rest.samples) else None]
        outputs = self._outputs(message, axis, cut, results, state_after)
        # The device has read them, since the results are there.
        for block in staged:
            device_memory().give_back(block)
        # Nothing raises from here on.
        state.waiting, state.of_model, state.weights = rest, of_model, weights
        state.next_offset, self._taken = value_at(axis, n_new), loaded
        return outputs

    def _samples(self, message: AxisArray, idx: int) -> Samples:
        """The data as float32 (time, features): of NumPy where the host cuts it into windows."""
        data: Any = message.data
        if is_mlx_array(data):
            data = as_float32(data, _OPERATION)
            if not uses_gpu():
                data = np.asarray(data)
        elif (dtype := np.asarray(data).dtype).kind not in "biuf":
            raise TypeError(f"A network takes data of real numbers, got dtype {dtype}.")
        else:
            data = np.asarray(data, np.float32)
        if idx:
            data = data.swapaxes(0, idx) if data.ndim == 2 else _moved(data, idx)
        return data.reshape(data.shape[0], -1)

    def _run(
        self, model: Model, weights: Weights, cut: Cut, of_model: Tree, staged: list[Block]
    ) -> tuple[list[Tree], Tree]:
        """The results of all batches, and the state after them; *staged* gets the memory that a device reads."""
        results: list[Tree] = []
        for batch in cut.batches(self._sizes):
            x = batch.windows
            if isinstance(x, np.ndarray):
                uploaded = _uploaded(x, staged)
                begun = model.begin(weights, uploaded, of_model) if cut.n_windows == 1 else None
                y, after = begun if begun is not None else model(weights, uploaded, of_model)
                is_taken = (begun is not None and of_model is not None) or bool(np.isfinite(x).all())
            else:
                # Past the first window, a device looks at its data itself, and nobody waits for it.
                y, after = model(weights, x, of_model, guarded=of_model is not None)
                is_taken = of_model is not None or bool(import_mlx().isfinite(x).all())
            if after is not None and is_taken:
                of_model = after
            results.append(y)
        return results, of_model

    def _outputs(
        self, message: AxisArray, axis: LinearAxis, cut: Cut, results: list[Tree], state: list[Tree]
    ) -> list[AxisArray]:
        """A message for each head; they and *state* are computed together."""
        heads, read = _heads(results, cut, state, is_mlx_array(message.data))
        with_axes = []
        for name, n_results, n_channels in heads:
            gain = self._state.gain * cut.hop / n_results
            offset = value_at(axis, cut.start + cut.window - 1) - (n_results - 1) * gain
            channels = self._channels(name, n_channels)
            axes = {self._state.stream_dim: replace(axis, gain=gain, offset=offset), "ch": channels}
            with_axes.append((message.key if name is None else name, axes, cut.n_windows * n_results))
        dims = [self._state.stream_dim, "ch"]
        return [
            replace(message, data=values if len(values) == n else values[:n], dims=dims, axes=axes, key=key)
            for (key, axes, n), values in zip(with_axes, read(), strict=True)
        ]

    def _channels(self, name: str | None, n_channels: int) -> CoordinateAxis:
        """Labels of the results, the same object for each message."""
        known = self._labels.get((name, n_channels))
        if known is None:
            labels = np.array([f"{name or 'output'}_ch{number}" for number in range(n_channels)])
            known = CoordinateAxis(data=labels, dims=["ch"])
            self._labels = {**self._labels, (name, n_channels): known}
        return known


def _moved(data: Any, idx: int) -> Any:
    if isinstance(data, np.ndarray):
        return np.moveaxis(data, idx, 0)
    return import_mlx().moveaxis(data, idx, 0)


def _in_library_of(data: Samples, samples: Samples) -> Samples:
    return np.array(samples) if isinstance(data, np.ndarray) else import_mlx().array(samples)


def _uploaded(x: npt.NDArray[np.float32], staged: list[Block]) -> mx.array:
    """*x* for the device: on CUDA in memory on the host that is used again, from where a model copies it."""
    if bus() is None:
        return import_mlx().array(np.ascontiguousarray(x))
    block = device_memory().take(x.nbytes)
    staged.append(block)
    return block.filled(x, _FLOAT32)


def _computed(heads: list[mx.array], state: list[Tree], on_device: bool) -> Sequence[Any]:
    """*heads*, begun or in NumPy, computed together with *state*, so that neither keeps a graph."""
    mx = import_mlx()
    if on_device or not heads:
        mx.async_eval(heads, state)
        return heads
    if not uses_gpu():
        mx.eval(heads, state)
        return [mlx_to_numpy(head) for head in heads]
    unread = [begin_reading(head, beside=state if number == 0 else ()) for number, head in enumerate(heads)]
    return [head.read() for head in unread]


def _heads(
    results: list[Tree], cut: Cut, state: list[Tree], on_device: bool
) -> tuple[list[tuple[str | None, int, int]], Callable[[], Sequence[Any]]]:
    """For each head its name, how many results a window has, and how many channels; and what gives the results.

    That waits for them, and gives (results, channels) of all windows for each head.
    """
    from .model import UnreadHeads, heads_of

    if results and isinstance(results[0], UnreadHeads):
        parts, unread = results[0]

        def read() -> Sequence[Any]:
            values = unread.read()
            return [values] if len(parts) == 1 else [values[:, part].copy() for part in parts.values()]

        return [(name, 1, part.stop - part.start) for name, part in parts.items()], read
    of_heads: dict[str | None, list[mx.array]] = {}
    for result in results:
        for name, head in heads_of(result).items():
            of_heads.setdefault(name, []).append(head)
    joined = {name: _joined(parts, cut) for name, parts in of_heads.items()}
    rows = [head.reshape(-1, head.shape[-1]) for head in joined.values()]
    data = _computed(rows, state, on_device)
    return [(name, head.shape[1], head.shape[2]) for name, head in joined.items()], lambda: data


def _joined(heads: list[mx.array], cut: Cut) -> mx.array:
    """The results of batches, float32 of shape (windows, results, channels), those of padding at the end."""
    mx = import_mlx()
    head = heads[0] if len(heads) == 1 else mx.concatenate(heads)
    head = head.astype(mx.float32)
    head = head[:, None] if head.ndim == 2 else head.reshape(head.shape[0], head.shape[1], -1)
    if head.shape[1] == cut.window and cut.hop < cut.window:
        head = head[:, cut.window - cut.hop :]
    return head


class Network(PublishesEach[NetworkSettings, list[AxisArray], NetworkTransformer]):
    """Runs an ``mlx.nn.Module`` on the windows of a stream; see :obj:`NetworkTransformer`.

    What comes on ``INPUT_WEIGHTS``, a path or a tree of arrays, becomes the weights of the model, between two messages.
    """

    SETTINGS = NetworkSettings  # type: ignore[assignment]

    INPUT_WEIGHTS = ez.InputStream(Any)

    def create_processor(self) -> None:
        """Make the transformer, and where the number of features is known the model, ahead of the first message."""
        super().create_processor()
        n_features = (self.processor.settings.model_kwargs or {}).get("input_size")
        if n_features is not None:
            self.processor.prepare(n_features)

    @ez.subscriber(INPUT_WEIGHTS)
    async def on_weights(self, weights: Any) -> None:
        """Load other weights, while messages go on."""
        try:
            # Until they are loaded, since ezmsg uses the memory of a message again.
            await asyncio.wrap_future(self.processor.exchange_weights(weights))
        except Exception:
            # The transformer has logged it.
            return
