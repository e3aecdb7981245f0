"""The option ``--chain``: a ready chain with options of its own, or a function of the user's."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

if typing.TYPE_CHECKING:
    from ..stream.steps import Chain

FORM = 'the name of a ready chain (see --list-chains) or "module:function"'


@dataclass(frozen=True)
class ChainChoice:
    """A chain by its name, so that each process that runs it can build it."""

    name: str
    """Of a ready chain, or ``module:function``."""

    parameters: Mapping[str, float | int | str | bool]
    """Those of a ready chain that were given."""

    def factory(self) -> Callable[[], Chain]:
        """What builds the chain.

        Raises:
            ValueError: There is no such chain; the message says what is wrong with the name.
        """
        if ":" in self.name:
            return _own(self.name)
        return functools.partial(_ready(self.name), **self.parameters)

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.parameters.items())])


def _ready(name: str) -> Callable[..., Chain]:
    from ..chains import READY

    if name not in READY:
        raise ValueError(f'it is {name!r}; allowed are {", ".join(READY)} and "module:function"')
    return READY[name]


def _own(name: str) -> Callable[[], Chain]:
    module_name, _, function_name = name.partition(":")
    # As "python -m" does, since a module of the user's is usually where the command is called.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does
        raise ValueError(f"module {module_name!r} cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} has no function {function_name!r}")
    return function


def add_parameters(parser: argparse.ArgumentParser, chain: str) -> list[str]:
    """Add an option for each parameter of a ready chain; their names.

    Raises:
        ValueError: There is no such chain.
    """
    if ":" in chain:
        return []
    function = _ready(chain)
    group = parser.add_argument_group(f"of the chain {chain}")
    types, texts = typing.get_type_hints(function, localns={"ChainTransformer": object}), _texts(function)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        kind, option = types[name], f"--{name.replace('_', '-')}"
        text = f"{texts[name]} [{parameter.default}]".replace("%", "%%")
        if kind is bool:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif typing.get_origin(kind) is typing.Literal:
            group.add_argument(option, choices=typing.get_args(kind), help=text)
        else:
            metavar = "N" if kind is int else "X"
            group.add_argument(option, type=kind, metavar=metavar, help=text)
    return list(parameters)


def _texts(function: Callable[..., object]) -> dict[str, str]:
    """What the docstring says of each argument, in one line."""
    part = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", part, re.M)}


def described() -> dict[str, str]:
    """The ready chains, and what each does in one sentence."""
    from ..chains import READY

    return {name: inspect.cleandoc(function.__doc__ or "").partition("\n")[0] for name, function in READY.items()}
