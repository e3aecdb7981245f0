"""An ``mlx.nn.Module`` with weights that can be exchanged, called on batches of windows of a few sizes."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import ezmsg.core as ez
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..stream.convert import Unread, let_states_be_copied
from ..stream.device import bus, start_kernels_one_by_one, uses_gpu
from ..stream.hostmemory import device_memory
from ..stream.unit import a_type
from .checkpoint import Arrays, Weight, check_weights, converted, flattened, from_pytorch, read_weights, template_of
from .recurrent import DecoderStep, RecurrentDecoder

Tree: TypeAlias = Any
"""Arrays in lists, tuples and dictionaries."""

Weights: TypeAlias = dict[str, mx.array]
"""Those of a model as it computes with them, by their names."""

Call: TypeAlias = "Callable[[Weights, mx.array, Tree], tuple[Tree, Tree]]"

_Arguments: TypeAlias = "tuple[type | str, Mapping[str, Any] | None, int, str | None, str, int | None, bool]"

_Held: TypeAlias = "tuple[Weights, tuple[int, tuple[int, ...]] | None]"
"""The weights of a model, and what it was prepared for."""

GROUP_SIZE = 64
"""Weights that share a scale, where they are quantized."""

_TOLERANCE = 1e-2
"""Largest difference of results on a GPU between two batch sizes, relative to the largest: of bfloat16, and more."""


def imported(model_class: type | str) -> type[nn.Module]:
    """The class that *model_class* is or names.

    Raises:
        TypeError: It is neither a class derived from ``mlx.nn.Module`` nor the name of one.
        ValueError: No class has this name.
    """
    found: object = model_class
    if isinstance(model_class, str):
        module, _, name = model_class.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"'model_class' must be a class or its dotted name, got {model_class!r}: {error}"
            ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TypeError(
            f"'model_class' must be a class derived from mlx.nn.Module or its dotted name, got {model_class!r}"
        )
    if found in (nn.RNN, nn.GRU, nn.LSTM):
        raise TypeError(
            f"'model_class' must be called as model(x) or model(x, state) -> (y, state), got {found.__name__}, which "
            "returns all its hidden states; ezmsg.mlx.network.RecurrentLayer has its weights and returns these"
        )
    return found


def check_arguments(model: type[nn.Module], model_kwargs: Mapping[str, Any] | None) -> None:
    """Check arguments of a model, all but an ``input_size`` that is to follow from the stream.

    Raises:
        TypeError: The model does not take them.
    """
    kwargs = dict(model_kwargs or {})
    signature = inspect.signature(model)
    if "input_size" in signature.parameters:
        kwargs.setdefault("input_size", 1)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(
            f"'model_kwargs' must be arguments of {model.__name__}, got {model_kwargs!r}: {error}"
        ) from error


def made(model: type[nn.Module], model_kwargs: Mapping[str, Any] | None, n_features: int) -> nn.Module:
    """The model for *n_features*, which becomes its ``input_size`` if it takes one.

    Raises:
        ValueError: Its ``input_size`` is another; it refuses its arguments.
    """
    kwargs = dict(model_kwargs or {})
    if "input_size" in inspect.signature(model).parameters:
        if kwargs.setdefault("input_size", n_features) != n_features:
            raise ValueError(
                f"'model_kwargs' must have the input_size of the stream, {n_features}, got {kwargs['input_size']!r}"
            )
    try:
        return model(**kwargs)
    except Exception as error:
        raise ValueError(
            f"'model_kwargs' must be arguments that {model.__name__} allows, got {kwargs!r}: {error}"
        ) from error


class UnreadHeads(NamedTuple):
    """Results of one window that a device may still be computing."""

    heads: dict[str | None, slice]
    """Where those of each head are among the results."""
    results: Unread
    """float32 of shape (1, results)."""


class Model:
    """A model and the weights that it began with.

    Args:
        model_class: See :class:`~ezmsg.mlx.network.NetworkSettings`, as the others.
        model_kwargs: Its arguments.
        n_features: Of a sample.
        checkpoint_path: None: random weights.
        dtype: Name of a type of floats.
        quantize: Bits of a weight, or None.
        carries: Whether it is given the state that it returned.
    """

    # With slots, since a chain takes back what attributes hold, and here is nothing to take back.
    __slots__ = (
        "_call",
        "_carries",
        "_dtype",
        "_guarded",
        "_in_module",
        "_made_of",
        "_module",
        "_prepared",
        "_step",
        "_takes_state",
        "_window",
        "n_features",
        "template",
        "weights",
    )

    def __init__(
        self,
        model_class: type | str,
        model_kwargs: Mapping[str, Any] | None,
        n_features: int,
        checkpoint_path: str | None,
        dtype: str,
        quantize: int | None,
        carries: bool,
    ) -> None:
        start_kernels_one_by_one()
        # With weights of its own, a copy needs no file.
        self._made_of = model_class, model_kwargs, n_features, None, dtype, quantize, carries
        self._prepared: tuple[int, tuple[int, ...]] | None = None
        module = made(imported(model_class), model_kwargs, n_features)
        module.eval()
        arrays: Arrays = dict(tree_flatten(module.parameters()))
        if checkpoint_path is not None:
            try:
                arrays = from_pytorch(read_weights(checkpoint_path), module)
            except (OSError, ValueError) as error:
                raise type(error)(
                    f"'checkpoint_path' must be a file of weights, got {checkpoint_path!r}: {error}"
                ) from error
        let_states_be_copied()
        self._dtype: mx.Dtype = getattr(mx, dtype)
        # Its weights are never computed: the file's take their place.
        quantized = _quantized(module, quantize) if quantize is not None else None
        plain = made(imported(model_class), model_kwargs, n_features) if quantized is not None else module
        self.template: dict[str, Weight] = template_of(plain, quantized, self._dtype)
        try:
            check_weights(arrays, self.template)
        except ValueError as error:
            raise ValueError(
                f"'checkpoint_path' must be a file of weights of {type(module).__name__}: {error}"
            ) from error
        self.n_features, self._module, self._carries = n_features, module, carries
        self.weights: Weights = dict(converted(arrays, self.template, pause=False))
        self._in_module: Weights | None = None
        self._step: DecoderStep | None = None
        self._window = 0
        self._takes_state = carries and _takes_two(module)
        self._call: Call = self._eager
        self._guarded: Call = functools.partial(_kept_where_not_finite, self._eager)

    def __reduce__(self) -> tuple[type[Model], _Arguments, _Held]:
        # Nothing copies what is compiled, so that a copy is made and prepared anew.
        return Model, self._made_of, (self.weights, self._prepared)

    def __setstate__(self, held: _Held) -> None:
        self.weights, prepared = held
        if prepared is not None:
            self.prepare(*prepared)

    def __call__(self, weights: Weights, x: mx.array, state: Tree = None, guarded: bool = False) -> tuple[Tree, Tree]:
        """The results of *x*, (batch, window, features), and the state after it; None where there is none. Lazy.

        Args:
            weights: As :meth:`load` gives them.
            x: float32.
            state: Of the call before; None at first.
            guarded: Whether the state is to stay as it is if *x* has a value that is not finite.
        """
        if (step := self.in_one_launch(weights)) is not None:
            y, state = step(x, state)
            assert y is not None
            results = {name: y[:, None, part] for name, part in step.heads.items()}
            return results.get(None, results), state
        return (self._guarded if guarded else self._call)(weights, x, state)

    def begin(self, weights: Weights, x: mx.array, state: Tree) -> tuple[UnreadHeads, Tree] | None:
        """A call in one launch, which has begun, and writes its results to where they are read; None: there is none.

        The arguments are those of :meth:`__call__`. The state after it is as it was if *x* has a value that is not
        finite.
        """
        if bus() is None or (step := self.in_one_launch(weights)) is None:
            return None
        block = device_memory().take(4 * step.n_results)
        _, after = step(x, state, block.array)
        mx.async_eval(after)
        results = Unread([after], block, (1, step.n_results), np.dtype(np.float32), None, False)
        return UnreadHeads(step.heads, results), after

    def in_one_launch(self, weights: Weights) -> DecoderStep | None:
        """What computes a window with its state in one launch; None where that is not done."""
        if self._step is not None and weights is not self._in_module:
            self._put_in(weights)
            self._step = self._module.in_one_launch(self._window)
        return self._step

    def load(self, weights: object) -> Weights:
        """*weights*, a path or a tree of arrays, as :meth:`__call__` takes them; in any thread, beside a stream.

        Raises:
            OSError: The file cannot be read.
            TypeError: *weights* is something else.
            ValueError: They do not fit the model.
        """
        import os

        arrays = read_weights(weights) if isinstance(weights, (str, os.PathLike)) else dict(flattened(weights))
        arrays = from_pytorch(arrays, self._module)
        check_weights(arrays, self.template)
        return dict(converted(arrays, self.template, pause=True))

    def prepare(self, window: int, sizes: Sequence[int]) -> tuple[int, ...]:
        """Run, and on a GPU compile, all that a stream needs.

        Returns:
            The batch sizes to take: those of *sizes* that give each window the results of the smallest one, whatever
            the other rows hold. On the CPU that is the same results to the last bit. One alone if there is a state.

        Raises:
            TypeError: The model does not take windows, or returns something else than arrays.
            ValueError: It returns states of different forms.
        """
        self._prepared = window, tuple(sizes)
        x = np.random.default_rng(0).standard_normal((max(sizes), window, self.n_features)).astype(np.float32)
        try:
            # Not compiled at first: kernels prove themselves here, and errors are those of the model.
            carries = self._try(x[:1])
            if carries and isinstance(self._module, RecurrentDecoder) and self._dtype != mx.float16:
                self._window, self._step = window, self._module.in_one_launch(window)
            if self._step is not None:
                self._try(x[:1])
                if (begun := self.begin(self.weights, mx.array(x[:1]), None)) is not None:
                    begun[0].results.read()
                return (1,)
            # On the CPU, models compute part of their results outside of MLX, and what is compiled is not faster.
            if uses_gpu():
                self._compile(x[:1])
            if carries:
                return (1,)
        except Exception as error:
            raise type(error)(
                f"'model_class' must be called as model(x) or model(x, state) -> (y, state) with x of shape "
                f"{(1, window, self.n_features)}, got {type(self._module).__name__}: {error}"
            ) from error
        return self._sizes_that_agree(x, sorted(sizes))

    def _try(self, x: np.ndarray) -> bool:
        """Run *x*, and again with the state, if there is one: whether there is."""
        y, state = self(self.weights, mx.array(x))
        heads_of(y)
        mx.eval(y, state)
        for _ in range(2 if state is not None else 0):
            y, after = self(self.weights, mx.array(x), state)
            mx.eval(y, after, self(self.weights, mx.array(x), state, guarded=True))
            if _form(after) != _form(state):
                raise ValueError(f"a state of the form {_form(after)} came after one of {_form(state)}")
            state = after
        return state is not None

    def _compile(self, x: np.ndarray) -> None:
        eager = self._call, self._guarded
        self._call = mx.compile(self._traced)
        self._guarded = mx.compile(functools.partial(_kept_where_not_finite, self._traced))
        try:
            self._try(x)
        except Exception as error:
            self._call, self._guarded = eager
            ez.logger.warning(
                f"{type(self._module).__name__} runs as it is, since it cannot be compiled: "
                f"{type(error).__name__}: {error}"
            )

    def _sizes_that_agree(self, x: np.ndarray, sizes: Sequence[int]) -> tuple[int, ...]:
        reference: dict[int, list[np.ndarray]] = {}

        def results(rows: np.ndarray) -> list[np.ndarray]:
            heads = heads_of(self(self.weights, mx.array(rows))[0])
            return [np.array(head.astype(mx.float32)) for head in heads.values()]

        def expected(row: int) -> list[np.ndarray]:
            if row not in reference:
                rows = np.full((sizes[0], *x.shape[1:]), np.nan, np.float32)
                rows[0] = x[row]
                reference[row] = [head[0] for head in results(rows)]
            return reference[row]

        agreeing = []
        for size in sizes:
            rows = x[:size].copy()
            rows[max(size - 1, 1) :] = np.nan
            heads = results(rows)
            looked_at = {0, 1, size // 2, size - 2} & set(range(max(size - 1, 1)))
            if all(_agree(head[row], of) for row in looked_at for head, of in zip(heads, expected(row), strict=True)):
                agreeing.append(size)
            else:
                ez.logger.info(
                    f"{type(self._module).__name__} gives other results in batches of {size} than of {sizes[0]}; "
                    "windows that wait do not go in such."
                )
        if agreeing[:1] != [sizes[0]]:
            results(x[:1])
            return (1,)
        return tuple(agreeing)

    def _traced(self, weights: Weights, x: mx.array, state: Tree) -> tuple[Tree, Tree]:
        self._in_module = None
        self._module.update(tree_unflatten(list(weights.items())))
        # To the memory of the device once, where x is on the host.
        return self._result(x * 1, state)

    def _eager(self, weights: Weights, x: mx.array, state: Tree) -> tuple[Tree, Tree]:
        if weights is not self._in_module:
            self._put_in(weights)
        return self._result(x, state)

    def _put_in(self, weights: Weights) -> None:
        self._module.update(tree_unflatten(list(weights.items())))
        self._in_module = weights

    def _result(self, x: mx.array, state: Tree) -> tuple[Tree, Tree]:
        cast = x.astype(self._dtype)
        result = self._module(cast, state) if self._takes_state else self._module(cast)
        if not (isinstance(result, tuple) and len(result) == 2):
            return result, None
        return result[0], plain(result[1]) if self._carries else None


def _kept_where_not_finite(call: Call, weights: Weights, x: mx.array, state: Tree) -> tuple[Tree, Tree]:
    """The result of *call*, with *state* as it was where *x* has a value that is not finite."""
    y, after = call(weights, x, state)
    is_finite = mx.isfinite(x).all()
    return y, tree_map(lambda new, old: mx.where(is_finite, new, old), after, state)


def heads_of(y: Tree) -> dict[str | None, mx.array]:
    """The results of a model by the names of its heads; None where there is one without a name.

    Raises:
        TypeError: They are something else than arrays of at least two dimensions.
    """
    heads: dict[str | None, Any] = dict(y) if isinstance(y, Mapping) else {None: y}
    for name, head in heads.items():
        if not isinstance(head, mx.array) or head.ndim < 2:
            of = "the result" if name is None else f"head {name!r}"
            shape = f"shape {tuple(head.shape)}" if isinstance(head, mx.array) else a_type(head)
            raise TypeError(f"{of} must be an array of shape (batch, ...), got {shape}")
    return heads


def plain(tree: Tree) -> Tree:
    """*tree* of tuples, lists and dictionaries alone, as ``mx.compile`` gives it back."""
    if isinstance(tree, Mapping):
        return {name: plain(branch) for name, branch in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(plain, tree))
    if isinstance(tree, list):
        return list(map(plain, tree))
    return tree


def _form(tree: Tree) -> Tree:
    return tree_map(lambda array: (tuple(array.shape), str(array.dtype)), plain(tree))


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    if not uses_gpu():
        return np.array_equal(one, other)
    return bool(np.all(np.abs(one - other) <= _TOLERANCE * max(np.abs(other).max(initial=0.0), 1e-6)))


def _takes_two(module: nn.Module) -> bool:
    try:
        inspect.signature(module.__call__).bind(None, None)
    except TypeError:
        return False
    return True


def _quantized(module: nn.Module, bits: int) -> nn.Module:
    """*module* with all weights of *bits* that can have them: where rows are multiples of a group."""

    def can_be(path: str, layer: nn.Module) -> bool:
        return hasattr(layer, "to_quantized") and all(
            array.shape[-1] % GROUP_SIZE == 0
            for name, array in layer.items()
            if isinstance(array, mx.array) and array.ndim == 2
        )

    nn.quantize(module, GROUP_SIZE, bits, class_predicate=can_be)
    return module
