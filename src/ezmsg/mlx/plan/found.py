"""Run a chain and leave its state as it was found."""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ezmsg.baseproc import BaseProcessor

from ..stream.steps import Chain, Step, steps_of


@contextlib.contextmanager
def steps_left_as_found(chain: Chain | Callable[[], Chain], factory: bool | None) -> Iterator[list[Step]]:
    """The steps of *chain*, whose state is the same afterwards as before."""
    is_factory = _takes_no_argument(chain) if factory is None else factory
    built = cast("Chain", cast("Callable[[], Chain]", chain)() if is_factory else chain)
    steps = steps_of(built)
    keepers = [] if is_factory else list(_keepers_of_state(steps, set()))
    found = [dict(vars(keeper)) for keeper in keepers]
    try:
        copies = copy.deepcopy(found)
    except Exception as error:
        raise TypeError(
            f"The state of the chain cannot be copied ({error}), so it could not be left as it is; give a factory, "
            "a callable without arguments that builds the chain."
        ) from error
    # The chain runs on copies, so that whoever holds an object of its state finds that one unchanged, too.
    for keeper, attributes in zip(keepers, copies, strict=True):
        vars(keeper).update(attributes)
    try:
        yield steps
    finally:
        for keeper, attributes in zip(keepers, found, strict=True):
            vars(keeper).clear()
            vars(keeper).update(attributes)


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
    """What a function refers to by name, except for the functions of other modules."""
    variables = inspect.getclosurevars(function)
    values = (*variables.nonlocals.values(), *variables.globals.values())
    return [
        value
        for value in values
        if getattr(value, "__module__", None) == function.__module__ or not inspect.isfunction(value)
    ]
