"""What any source of recordings has to do, see :obj:`ezmsg.mlx.RecordingSource`.

A test module makes a subclass of :class:`SourceContract` whose ``make`` gives a source.
"""

import itertools
import math
import pickle

import numpy as np
import pytest
from ezmsg.baseproc import resolve_stream_dim
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArrayTransformer, RecordingSource, process_recording

from .offline_memory import MemorySink


def _length(message: AxisArray) -> int:
    return message.data.shape[message.get_axis_idx(resolve_stream_dim(message))]


def _same(one: AxisArray, other: AxisArray) -> bool:
    return (
        np.array_equal(one.data, other.data)
        and one.data.dtype == other.data.dtype
        and (one.dims, one.axes, one.key) == (other.dims, other.axes, other.key)
    )


class SourceContract:
    """Tests of one source; the recording has two messages or more."""

    @pytest.fixture
    def source(self) -> RecordingSource:
        """The source under test. Overridden."""
        raise NotImplementedError

    def test_it_says_what_it_is(self, source: RecordingSource) -> None:
        assert isinstance(source.n_samples, int) and source.n_samples > 0
        assert 0 < float(source.sampling_rate) < math.inf
        assert isinstance(source.identity, str) and source.identity and "\n" not in source.identity

    def test_all_samples_come_once_in_messages_with_samples(self, source: RecordingSource) -> None:
        lengths = [_length(message) for message in source.read(0)]
        assert sum(lengths) == source.n_samples and min(lengths) > 0 and len(lengths) > 1

    def test_messages_go_on_in_time_under_one_set_of_other_axes(self, source: RecordingSource) -> None:
        messages = list(source.read(0))
        dim = resolve_stream_dim(messages[0])
        for one, other in itertools.pairwise(messages):
            assert one.dims == other.dims and one.key == other.key and one.data.dtype == other.data.dtype
            assert one.axes[dim].gain == other.axes[dim].gain == pytest.approx(1 / source.sampling_rate)
            assert type(one.axes[dim].offset) is float
            others = [{name: axis for name, axis in each.axes.items() if name != dim} for each in (one, other)]
            assert others[0] == others[1]

    def test_reading_again_gives_the_same(self, source: RecordingSource) -> None:
        assert all(_same(*pair) for pair in zip(source.read(0), source.read(0), strict=True))

    def test_reading_goes_on_wherever_a_message_ended(self, source: RecordingSource) -> None:
        messages = list(source.read(0))
        ends = list(itertools.accumulate(map(_length, messages)))
        for number in sorted({0, len(messages) // 2, len(messages) - 2}):
            rest = list(source.read(ends[number]))
            assert len(rest) == len(messages) - number - 1
            assert all(_same(*pair) for pair in zip(rest, messages[number + 1 :], strict=True))

    def test_reading_inside_a_message_begins_right_there(self, source: RecordingSource) -> None:
        first, second, *_ = source.read(0)
        dim = resolve_stream_dim(first)
        axis = first.get_axis_idx(dim)
        start = _length(first) + _length(second) // 2
        messages = list(pickle.loads(pickle.dumps(source)).read(start))
        assert sum(map(_length, messages)) == source.n_samples - start
        rest = np.moveaxis(second.data, axis, 0)[start - _length(first) :]
        np.testing.assert_array_equal(np.moveaxis(messages[0].data, axis, 0)[: len(rest)], rest)
        expected = second.axes[dim].value(start - _length(first))
        assert messages[0].axes[dim].offset == pytest.approx(expected, rel=1e-12)

    def test_reading_may_be_left_and_two_may_read_at_a_time(self, source: RecordingSource) -> None:
        left = source.read(0)
        next(left)
        assert sum(map(_length, source.read(0))) == source.n_samples
        left.close()

    def test_a_message_that_was_kept_does_not_change(self, source: RecordingSource) -> None:
        messages = source.read(0)
        first = next(messages)
        before = np.array(first.data)
        for _ in messages:
            pass
        np.testing.assert_array_equal(first.data, before)

    def test_it_can_be_processed(self, source: RecordingSource) -> None:
        sink = MemorySink()
        process_recording(source, lambda: AsArrayTransformer(backend="numpy"), sink, rechunk=None, progress=False)
        np.testing.assert_array_equal(sink.results, np.concatenate([message.data for message in source.read(0)]))
