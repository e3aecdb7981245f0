"""Reading ahead and writing behind: order, bounds, errors, and threads that end."""

import itertools
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers.offline_memory import MemorySink, MemorySource
from helpers.processes import TESTS, TIME_LIMIT

from ezmsg.mlx.offline.engine import MOST_AHEAD, WriteBehind, read_ahead


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("reading", "writing"))]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not threads()


class Counting(MemorySource):
    n_read = 0
    n_closed = 0

    def read(self, start):
        try:
            for message in super().read(start):
                self.n_read += 1
                yield message
        finally:
            self.n_closed += 1


def test_messages_come_in_order_and_not_many_are_read_before_they_are_asked_for():
    source = Counting(n_samples=2000, chunk=100)
    with read_ahead(source.read(0)) as messages:
        for number, message in enumerate(messages):
            np.testing.assert_array_equal(message.data, source.data[100 * number : 100 * number + 100])
            # One more is in the hands of the thread.
            assert source.n_read <= number + 1 + MOST_AHEAD + 1
    assert (source.n_read, source.n_closed) == (20, 1)


def test_what_reading_raises_is_raised_behind_the_messages_before_it():
    def failing():
        yield from itertools.islice(MemorySource().read(0), 3)
        raise OSError(5, "Input/output error")

    taken = []
    with pytest.raises(OSError, match="Input/output"), read_ahead(failing()) as messages:
        taken.extend(messages)
    assert len(taken) == 3


def test_reading_ends_when_nobody_asks_any_more():
    source = Counting(n_samples=2000, chunk=1)
    with pytest.raises(KeyboardInterrupt), read_ahead(source.read(0)) as messages:
        next(messages)
        assert threads()
        raise KeyboardInterrupt
    assert source.n_closed == 1 and source.n_read <= 1 + MOST_AHEAD + 1


def test_a_thread_that_outlives_the_main_one_goes_on_reading_and_writing():
    code = """
import sys, threading
sys.path[:0] = sys.argv[1:]
from helpers.offline_memory import MemorySink, MemorySource
from helpers.processes import TESTS, TIME_LIMIT
from ezmsg.mlx import process_recording

def run():
    threading.main_thread().join()
    sink = MemorySink()
    process_recording(MemorySource(2000), lambda: lambda message: message, sink, progress=False)
    print(len(sink.results))

threading.Thread(target=run).start()
"""
    done = subprocess.run([sys.executable, "-c", code, str(TESTS)], capture_output=True, text=True, timeout=TIME_LIMIT)
    if "can't create new thread at interpreter shutdown" in done.stderr:
        pytest.skip("needs a Python that starts threads after its main one has ended, which 3.12.1 does not")
    assert (done.stdout, done.stderr) == ("2000\n", "")


def messages():
    return list(MemorySource(n_samples=1000, chunk=100).read(0))


def test_results_and_states_are_written_in_order_and_few_wait():
    sink, events, given = MemorySink(), [], []

    def before(event):
        events.append(event)
        # Those that were given, that which is being given, and this one.
        assert len(given) - len(events) < 2

    sink.before = before
    with WriteBehind(sink, most=1) as behind:
        for number, message in enumerate(messages()):
            behind.append(message)
            given.append(number)
            if number % 4 == 3:
                behind.checkpoint(bytes([number]))
                given.append(number)
    assert events == (["append"] * 4 + ["checkpoint"]) * 2 + ["append"] * 2
    assert sink.kept[1] == bytes([7]) and len(sink.kept[2]) == 8
    np.testing.assert_array_equal(np.concatenate([row.data for row in sink.rows]), MemorySource(1000).data)


def test_a_result_may_be_overwritten_once_it_was_given():
    sink = MemorySink()
    buffer = messages()[0]
    expected = buffer.data.copy()
    with WriteBehind(sink) as behind:
        behind.append(buffer)
        buffer.data[:] = 0
    np.testing.assert_array_equal(sink.rows[0].data, expected)


@pytest.mark.parametrize("n", [1, 10])
def test_what_writing_raises_is_raised_and_nothing_is_written_after_it(n):
    """By the next call, or at the end."""
    sink = MemorySink()
    events = []

    def before(event):
        events.append(event)
        if len(events) == 1:
            raise OSError(28, "No space left on device")

    sink.before = before
    with pytest.raises(OSError, match="No space left"), WriteBehind(sink, most=1) as behind:
        for message in messages()[:n]:
            behind.append(message)
    assert events == ["append"] and not sink.rows


def test_what_waits_is_written_after_an_error_elsewhere():
    sink = MemorySink()
    with pytest.raises(KeyboardInterrupt), WriteBehind(sink) as behind:
        for message in messages():
            behind.append(message)
        behind.checkpoint(b"state")
        raise KeyboardInterrupt
    assert sink.kept[1] == b"state" and len(sink.rows) == 10
