"""Weights from files and messages: read without running code of theirs, under the names of an MLX model, and checked.

A PyTorch file is a ZIP archive of a pickle and of the raw values. A pickle may name any function to be called. Here it
may name those that a dictionary of tensors needs, and any other ends the reading. PyTorch need not be installed.
"""

from __future__ import annotations

import collections
import json
import mmap
import os
import pickle
import re
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from ..stream.unit import a_type

Arrays: TypeAlias = "dict[str, mx.array | npt.NDArray]"
"""Weights by their names, as ``"layers.0.weight"``."""

SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
"""Of files that weights are read from; the last three are PyTorch's."""

PIECE = 1 << 18
"""Bytes that are copied at a time while a stream runs. Copies to MLX keep other threads of Python waiting: this one for
some 50 microseconds."""

_PAUSE = 2e-4
"""Seconds between two pieces, in which other threads get their turn."""


class Weight(NamedTuple):
    """A parameter of a model, before and after its weights are quantized."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    quantized: tuple[str, str, str, int, int] | None
    """Names of what is made of it, group size, bits."""


def read_weights(path: str | os.PathLike[str]) -> Arrays:
    """The arrays in a file of weights, by their names.

    Args:
        path: Of a ``.safetensors`` or ``.npz`` file, or of a ``state_dict`` that PyTorch has saved (``.pt``, ``.pth``,
            ``.bin``), by itself or as ``"model_state_dict"`` or ``"state_dict"`` of a dictionary.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is none of these, or asks for code to be run.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return dict(_safetensors(path))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        if path.suffix in SUFFIXES:
            return _state_dict_of(read_pytorch(path))
    except (RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{path} holds no weights that can be read: {error}") from error
    raise ValueError(f"{path} is not a file of weights; allowed are {', '.join(SUFFIXES)}.")


_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


def _safetensors(path: Path) -> Iterator[tuple[str, npt.NDArray]]:
    """The arrays of a file of safetensors, in memory that the system reads from it when it is looked at.

    Not by ``mx.load``, which has a whole weight read and copied at once, and a stream beside it wait.
    """
    with open(path, "rb") as file:
        n_header = int.from_bytes(file.read(8), "little")
        if n_header > path.stat().st_size - 8:
            raise ValueError(f"its header is to have {n_header} bytes, more than the file has")
        header = json.loads(file.read(n_header))
    values = np.memmap(path, np.uint8, "r", 8 + n_header) if path.stat().st_size > 8 + n_header else np.empty(0, "u1")
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = values[begin:end].view(_SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
            yield name, _from_bfloat16(array) if entry["dtype"] == "BF16" else array


def _state_dict_of(content: object) -> Arrays:
    for name in ("model_state_dict", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping):
        raise ValueError(f"it is {a_type(content)}; allowed is a state_dict.")
    return {name: value for name, value in content.items() if isinstance(value, np.ndarray)}


_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


def read_pytorch(path: str | os.PathLike[str]) -> object:
    """Read what ``torch.save`` has written: built-in types and, for tensors, NumPy arrays (bfloat16 as float32).

    Raises:
        pickle.UnpicklingError: It has something else in it.
        zipfile.BadZipFile: It is no archive (PyTorch before 1.6 wrote another format).
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _Unpickler(archive, memory, pickled[: -len("data.pkl")]).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, memory: mmap.mmap, folder: str) -> None:
        super().__init__(archive.open(f"{folder}data.pkl"))
        self._archive, self._memory, self._folder = archive, memory, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return _tensor if name == "_rebuild_tensor_v2" else _parameter
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a state_dict does not need")

    def persistent_load(self, pid: Any) -> npt.NDArray:
        kind, storage, key, _, n_values = pid
        if kind != "storage" or storage not in _STORAGES:
            raise pickle.UnpicklingError(f"it has a {kind} of {storage}")
        dtype = _STORAGES[storage]
        item = np.dtype("u2" if dtype == "bfloat16" else dtype)
        data = self._archive.read(f"{self._folder}data/{key}")
        values = np.frombuffer(data, item, int(n_values))
        return _from_bfloat16(values) if dtype == "bfloat16" else values


def _from_bfloat16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _tensor(
    storage: npt.NDArray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object
) -> npt.NDArray:
    values = storage[offset:]
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min((*shape, *strides, offset, 0)) < 0 or (0 not in shape and last >= len(values)):
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    return np.lib.stride_tricks.as_strided(values, shape, [stride * values.itemsize for stride in strides])


def _parameter(data: npt.NDArray, *_: object) -> npt.NDArray:
    return data


def flattened(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of nested dictionaries and lists, by their names joined with points.

    Raises:
        TypeError: There is something else in it.
    """
    if isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from flattened(branch, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, (list, tuple)):
        for number, branch in enumerate(tree):
            yield from flattened(branch, f"{prefix}.{number}" if prefix else str(number))
    elif isinstance(tree, (np.ndarray, mx.array)):
        yield prefix, tree
    else:
        raise TypeError(f"{prefix or 'weights'} is {a_type(tree)}; allowed are arrays in dictionaries and lists.")


_RECURRENT = re.compile(r"^(?:(.*)\.)?(weight|bias)_(ih|hh)_l(\d+)$")


def from_pytorch(arrays: Arrays, model: nn.Module) -> Arrays:
    """*arrays* under the names of MLX, where they have those of PyTorch's layers.

    - ``weight_ih_l0`` and so on of a GRU or LSTM become ``Wx``, ``Wh`` and the biases of layer 0. The gates have the
      same order in both, and MLX has the sum of the two biases, except inside the reset gate of a GRU.
    - Kernels of convolutions go from (out, in, ...) to (out, ..., in).
    - The packed projections of an attention are split.

    Names that MLX has, too, stay as they are.

    Raises:
        ValueError: A layer has only some of its weights.
    """
    names = {name for name, _ in _parameters(model)}
    found = {name: value for name, value in arrays.items() if not name.endswith("num_batches_tracked")}
    for name in [name for name in found if (match := _RECURRENT.match(name)) and match.group(2, 3) == ("weight", "ih")]:
        _rename_cells(found, name, names)
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    for path, module in modules:
        weight = f"{path}.weight" if path else "weight"
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and weight in found:
            expected, given = tuple(module.weight.shape), tuple(found[weight].shape)
            # A square kernel may be either; a file with MLX's own names has MLX's order, and no other sign of PyTorch.
            if given != expected and given == (expected[0], expected[-1], *expected[1:-1]):
                order = (0, *range(2, len(given)), 1)
                found[weight] = found[weight].transpose(order)
        packed = f"{path}.in_proj_weight" if path else "in_proj_weight"
        if isinstance(module, nn.MultiHeadAttention) and packed in found:
            for kind in ("weight", "bias"):
                value = found.pop(f"{path}.in_proj_{kind}", None)
                for number, part in enumerate(("query", "key", "value")):
                    if value is not None:
                        n = value.shape[0] // 3
                        found[f"{path}.{part}_proj.{kind}"] = value[number * n : (number + 1) * n]
    return found


def _rename_cells(found: Arrays, name: str, names: set[str]) -> None:
    match = _RECURRENT.match(name)
    assert match is not None
    prefix, layer = match[1], match[4]
    of = f"{prefix}." if prefix else ""
    candidates = [f"{of}layers.{layer}.", f"{of}{layer}.", *([of] if layer == "0" else [])]
    target = next((candidate for candidate in candidates if f"{candidate}Wx" in names), None)
    if target is None:
        return
    parts = [f"{of}{kind}_{way}_l{layer}" for kind in ("weight", "bias") for way in ("ih", "hh")]
    if missing := [part for part in parts[: 2 if parts[2] not in found else 4] if part not in found]:
        raise ValueError(f"{', '.join(missing)} is missing beside {name}.")
    found[f"{target}Wx"], found[f"{target}Wh"] = found.pop(parts[0]), found.pop(parts[1])
    if parts[2] not in found:
        return
    of_input, of_hidden = (np.asarray(found.pop(part), np.float32) for part in parts[2:])
    if f"{target}bhn" in names:
        n = len(of_input) // 3
        found[f"{target}bhn"] = of_hidden[2 * n :]
        of_hidden = np.concatenate([of_hidden[: 2 * n], np.zeros(n, np.float32)])
    found[f"{target}b" if f"{target}b" in names else f"{target}bias"] = of_input + of_hidden


def _parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    # Where it is given no place, what this returns is a list.
    return cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))


def template_of(plain: nn.Module, quantized: nn.Module | None, dtype: mx.Dtype) -> dict[str, Weight]:
    """The weights that a model takes, by their names before they are quantized, and what becomes of each."""
    found = {}
    modules = dict(quantized.named_modules()) if quantized is not None else {}
    for name, value in _parameters(plain):
        path, _, last = name.rpartition(".")
        module, made = modules.get(path), None
        if module is not None and last in module and module[last].dtype == mx.uint32:
            prefix = f"{path}." if path else ""
            parts = [f"{last}_{part}" if f"{last}_{part}" in module else part for part in ("scales", "biases")]
            bits = cast("int", module.bits)
            group = 32 * module[last].shape[-1] // bits // module[parts[0]].shape[-1]
            made = (name, f"{prefix}{parts[0]}", f"{prefix}{parts[1]}", group, bits)
        kept = dtype if mx.issubdtype(value.dtype, mx.floating) else value.dtype
        found[name] = Weight(tuple(value.shape), kept, made)
    return found


def check_weights(arrays: Arrays, template: Mapping[str, Weight]) -> None:
    """Check names and shapes of weights.

    Raises:
        ValueError: A weight is missing, unknown or of another shape; the message names up to three.
    """
    faults = [f"{name} is missing" for name in template if name not in arrays]
    faults += [f"{name} is unknown" for name in arrays if name not in template]
    faults += [
        f"{name} has shape {tuple(arrays[name].shape)} in place of {weight.shape}"
        for name, weight in template.items()
        if name in arrays and tuple(arrays[name].shape) != weight.shape
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"the weights do not fit the model: {', '.join(faults[:3])}{more}")


def converted(arrays: Arrays, template: Mapping[str, Weight], pause: bool) -> list[tuple[str, mx.array]]:
    """Weights in the dtype of the model, quantized where it is, in memory of their own and computed.

    Args:
        arrays: That :func:`check_weights` has nothing against.
        template: Of the model.
        pause: Whether other threads are to get their turn between pieces.
    """
    found = []
    for name, weight in template.items():
        value = _copied(arrays[name], pause).astype(weight.dtype)
        if weight.quantized is None:
            made = [(name, value)]
        else:
            *names, group, bits = weight.quantized
            made = list(zip(map(str, names), mx.quantize(value, group_size=group, bits=bits), strict=True))
        mx.eval([array for _, array in made])
        found += made
    return found


def _copied(array: mx.array | npt.NDArray, pause: bool) -> mx.array:
    if isinstance(array, mx.array):
        # Computed, so that the device has them in its memory before the first message that needs them.
        return array * 1 if mx.issubdtype(array.dtype, mx.floating) else mx.array(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if not pause or array.nbytes <= PIECE:
        return mx.array(np.ascontiguousarray(array))
    flat = np.asarray(array if array.flags.c_contiguous else array.copy()).reshape(-1)
    step, pieces = PIECE // flat.itemsize, []
    for begin in range(0, flat.size, step):
        # First to memory of NumPy: that copy, which may read from a file, keeps nobody waiting.
        pieces.append(mx.array(np.array(flat[begin : begin + step])))
        time.sleep(_PAUSE)
    return mx.concatenate(pieces).reshape(array.shape)
