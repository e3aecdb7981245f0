"""What any sink of results has to do, see :obj:`ezmsg.mlx.ResultSink`.

A test module makes a subclass of :class:`SinkContract` whose ``place`` stands for a place for results.
"""

import abc
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import ResultSink

RATE = 100.0
RECIPE = "a recording\nsettings"
CHANNELS = AxisArray.CoordinateAxis(data=np.array(["a", "b", "c"]), dims=["ch"])


class Place(abc.ABC):
    """Where results go: every sink of it is one that a process makes anew."""

    @abc.abstractmethod
    def sink(self) -> ResultSink:
        """A fresh sink for this place."""

    @abc.abstractmethod
    def results(self) -> tuple[npt.NDArray, npt.NDArray] | None:
        """Data and times under the final name; None if there is nothing."""


def rows(begin: int, end: int) -> AxisArray:
    """The results number *begin* to *end*."""
    return AxisArray(
        data=np.arange(3.0 * begin, 3.0 * end).reshape(-1, 3),
        dims=["time", "ch"],
        axes={"time": AxisArray.TimeAxis(fs=RATE, offset=begin / RATE), "ch": CHANNELS},
        key="results",
        stream_dim="time",
    )


class SinkContract:
    """Tests of one kind of sink."""

    @pytest.fixture
    def place(self) -> Iterator[Place]:
        """An empty place. Overridden."""
        raise NotImplementedError

    def expect(self, place: Place, n: int) -> None:
        data, times = place.results()
        np.testing.assert_array_equal(data, rows(0, n).data)
        np.testing.assert_allclose(times, np.arange(n) / RATE, rtol=0, atol=1e-9)

    def test_results_appear_when_they_are_complete(self, place: Place) -> None:
        sink = place.sink()
        assert sink.open(RECIPE, "fingerprint") == (False, None)
        sink.append(rows(0, 7))
        sink.append(rows(7, 7))
        sink.append(rows(7, 500))
        assert place.results() is None
        sink.commit()
        sink.close()
        self.expect(place, 500)

    def test_complete_results_of_the_same_recipe_are_found(self, place: Place) -> None:
        self.test_results_appear_when_they_are_complete(place)
        sink = place.sink()
        assert sink.open(RECIPE, "another fingerprint") == (True, None)
        sink.close()
        self.expect(place, 500)

    def test_complete_results_of_another_recipe_are_not_replaced(self, place: Place) -> None:
        self.test_results_appear_when_they_are_complete(place)
        sink = place.sink()
        with pytest.raises(FileExistsError):
            sink.open("another recording\nsettings", "fingerprint")
        sink.close()
        self.expect(place, 500)

    def interrupted(self, place: Place) -> None:
        sink = place.sink()
        sink.open(RECIPE, "fingerprint")
        sink.append(rows(0, 100))
        sink.checkpoint(b"first")
        sink.append(rows(100, 310))
        sink.checkpoint(b"second")
        sink.append(rows(310, 400))
        sink.close()
        assert place.results() is None

    def test_a_run_goes_on_behind_the_last_checkpoint(self, place: Place) -> None:
        self.interrupted(place)
        sink = place.sink()
        assert sink.open(RECIPE, "fingerprint") == (False, b"second")
        sink.append(rows(310, 500))
        sink.commit()
        sink.close()
        self.expect(place, 500)

    def test_a_run_may_be_interrupted_again(self, place: Place) -> None:
        self.interrupted(place)
        sink = place.sink()
        sink.open(RECIPE, "fingerprint")
        sink.append(rows(310, 320))
        sink.close()
        sink = place.sink()
        assert sink.open(RECIPE, "fingerprint") == (False, b"second")
        sink.append(rows(310, 500))
        sink.commit()
        sink.close()
        self.expect(place, 500)

    def test_a_checkpoint_of_another_fingerprint_is_not_used(self, place: Place) -> None:
        self.interrupted(place)
        sink = place.sink()
        assert sink.open(RECIPE, "another fingerprint") == (False, None)
        sink.append(rows(0, 50))
        sink.commit()
        sink.close()
        self.expect(place, 50)

    def test_a_restart_forgets_checkpoint_and_results(self, place: Place) -> None:
        self.interrupted(place)
        sink = place.sink()
        assert sink.open(RECIPE, "fingerprint").checkpoint == b"second"
        sink.restart()
        sink.append(rows(0, 20))
        sink.close()
        sink = place.sink()
        assert sink.open(RECIPE, "fingerprint") == (False, None)
        sink.append(rows(0, 50))
        sink.commit()
        sink.close()
        self.expect(place, 50)

    def test_memory_of_messages_may_be_used_again(self, place: Place) -> None:
        sink = place.sink()
        sink.open(RECIPE, "fingerprint")
        message = rows(0, 10)
        sink.append(message)
        message.data[:] = -1
        sink.commit()
        sink.close()
        self.expect(place, 10)

    def test_closing_twice_does_no_harm(self, place: Place) -> None:
        sink = place.sink()
        sink.close()
        sink.open(RECIPE, "fingerprint")
        sink.close()
        sink.close()
