"""What every unit and its transformer promise, as cases that any of them can be put through::

@pytest.mark.parametrize("case", CASES)
def test_case(case):
    CASES[case](Subject("mlx.Halve", HalveTransformer, Halve, HalveSettings()))
"""

import asyncio
import dataclasses
import pickle
from collections.abc import Callable

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray

FS = 30000.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """A unit to be tested."""

    component: str
    """Its name among the entry points ``ezmsg.components``."""

    transformer: type[BaseTransformer]
    unit: type[BaseTransformerUnit]

    settings: ez.Settings
    """Some with which messages of :func:`message` can be processed."""

    namesake: ez.Settings | None = None
    """The same settings as an object of the class that ezmsg-sigproc has for them, if it has one."""

    changes: frozenset[str] = frozenset()
    """What is another than that of the input by what the unit is for, or as ezmsg-sigproc has it: ``dims``, ``ch``,
    ``key``, ``gain``, ``attrs``."""


def message(data: np.ndarray | mx.array, first: int = 0) -> AxisArray:
    """Samples from number *first* on, of three channels."""
    channels = AxisArray.CoordinateAxis(data=np.array(["a", "b", "c"]), dims=["ch"])
    axes = {"time": AxisArray.TimeAxis(fs=FS, offset=first / FS), "ch": channels}
    return AxisArray(data, ["time", "ch"], axes=axes, attrs={"unit": "uV"}, key="amp")


def samples(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)


def results_of(output: AxisArray | list[AxisArray] | None) -> list[AxisArray]:
    return [] if output is None else output if isinstance(output, list) else [output]


CASES: dict[str, Callable[[Subject], None]] = {}


def case(function: Callable[[Subject], None]) -> Callable[[Subject], None]:
    CASES[function.__name__] = function
    return function


@case
def settings_can_be_pickled(subject: Subject) -> None:
    assert repr(pickle.loads(pickle.dumps(subject.settings))) == repr(subject.settings)
    assert subject.transformer.get_settings_type() is subject.unit.SETTINGS is type(subject.settings)


@case
def settings_of_both_packages_are_taken(subject: Subject) -> None:
    for given in (subject.settings, subject.namesake):
        if given is None:
            continue
        for made in (subject.transformer(given), subject.transformer(settings=given)):
            assert type(made.settings) is type(subject.settings)
        for unit in (subject.unit(given), subject.unit(settings=given)):
            assert type(unit.SETTINGS) is type(subject.settings)


@case
def what_is_not_a_message_is_refused(subject: Subject) -> None:
    transformer = subject.transformer(subject.settings)
    for given in (np.zeros((3, 3), np.float32), None, "text"):
        try:
            transformer(given)
        except TypeError as error:
            assert f"{subject.transformer.__name__} takes an AxisArray" in str(error)
        else:
            raise AssertionError(f"took a {type(given).__name__}")


@case
def called_bare_it_leaves_its_input_alone_and_keeps_what_is_known_of_it(subject: Subject) -> None:
    for to_backend in (np.array, mx.array):
        transformer = subject.transformer(subject.settings)
        for first in (0, 300):
            given = message(to_backend(samples(300)), first)
            before = np.array(given.data), dict(given.axes), dict(given.attrs)
            results = results_of(transformer(given))
            np.testing.assert_array_equal(np.array(given.data), before[0])
            assert (given.axes, given.attrs) == before[1:]
            for result in results:
                kept = {
                    "dims": result.dims == given.dims,
                    "key": result.key == "amp",
                    "ch": result.axes.get("ch") is given.axes["ch"],
                    "gain": result.axes["time"].gain == 1 / FS,
                    "attrs": result.attrs.get("unit") == "uV",
                }
                assert {name for name, is_kept in kept.items() if not is_kept} == subject.changes


@case
def an_empty_message_changes_nothing(subject: Subject) -> None:
    for to_backend in (np.array, mx.array):
        outputs = []
        for with_empty in (False, True):
            transformer = subject.transformer(subject.settings)
            results = results_of(transformer(message(to_backend(samples(300)))))
            if with_empty:
                for result in results_of(transformer(message(to_backend(samples(0)), 300))):
                    assert 0 in result.data.shape
            results += results_of(transformer(message(to_backend(samples(300)), 300)))
            outputs.append(np.concatenate([np.array(result.data) for result in results]))
        # In which order NumPy adds depends on where numbers lie, and that on what they were joined with.
        np.testing.assert_allclose(*outputs, rtol=1e-15, atol=0)


@case
def the_backend_may_change_while_it_runs(subject: Subject) -> None:
    transformer = subject.transformer(subject.settings)
    n_samples = 0
    for number, to_backend in enumerate((np.array, mx.array, np.array, mx.array)):
        for result in results_of(transformer(message(to_backend(samples(300)), 300 * number))):
            assert np.isfinite(np.array(result.data)).all()
            n_samples += len(result.data)
    assert n_samples


@case
def the_unit_publishes_what_the_transformer_returns(subject: Subject) -> None:
    bare, unit = subject.transformer(subject.settings), subject.unit(subject.settings)
    # As a graph does: the address of a unit is what it is called in the log.
    unit._set_name("UNIT")
    unit._set_location(["GRAPH"])
    unit.create_processor()

    async def published(given: AxisArray) -> list[AxisArray]:
        return [result async for _, result in unit.on_signal(given)]

    for first in (0, 300):
        given = message(mx.array(samples(300)), first)
        expected, found = results_of(bare(given)), asyncio.run(published(given))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.array(one.data), np.array(other.data))
            assert one.axes["time"] == other.axes["time"]


@case
def it_says_what_it_does(subject: Subject) -> None:
    for kind in (subject.transformer, subject.unit):
        # Of its own: an inherited one is what a dashboard would show for several units.
        assert kind.__dict__.get("__doc__"), f"{kind.__name__} has no docstring of its own"
