"""Results that are read from a GPU while the next ones are computed: the same bits, states in their places, bounds.

On a machine without one: what is fused is fused as there, on MLX's CPU device.
"""

import contextlib
import functools
import threading
from unittest import mock

import numpy as np
import pytest
from helpers.offline_memory import MemorySink, MemorySource

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers.on_no_gpu import as_on_a_gpu, compiled_run, results_written

from ezmsg.mlx import AsArrayTransformer, BaseChainTransformer, DetrendTransformer, RechunkSettings, chains
from ezmsg.mlx.chain.transformer import ChainTransformer
from ezmsg.mlx.offline import engine as overlap
from ezmsg.mlx.offline import engine as sequential
from ezmsg.mlx.offline import process_recording
from ezmsg.mlx.stream import convert as readback
from ezmsg.mlx.stream.convert import mlx_to_numpy

SIZES = RechunkSettings(sizes=(64,))


@contextlib.contextmanager
def on_a_gpu(*, reads_behind: bool = True):
    mx.disable_compile()
    try:
        with as_on_a_gpu(), mock.patch.object(sequential, "uses_gpu", lambda: reads_behind):
            yield
    finally:
        mx.enable_compile()


def stages():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        DetrendTransformer(time_constant=0.3),
        AsArrayTransformer(backend="numpy", dtype="int16", rounding="nearest"),
    ]


def band_pass(dtype="float32"):
    return chains.band_pass(low=50.0, high=200.0, order=2, reference="mean", dtype=dtype)


CHAINS = {
    "one unit": band_pass,
    "one unit, int16": functools.partial(band_pass, "int16"),
    "stage by stage": stages,
    "results of another rate": functools.partial(chains.spike_band_power, 50.0, 200.0, bin_seconds=0.05),
}


def processed(make_chain, sink=None, **options):
    sink = sink or MemorySink()
    process_recording(
        MemorySource(2000), make_chain, sink, rechunk=SIZES, checkpoint_seconds=0.4, progress=False, **options
    )
    return sink


@pytest.mark.parametrize("name", CHAINS)
def test_results_and_checkpoints_are_those_of_reading_at_once(name):
    with on_a_gpu(reads_behind=False):
        expected = processed(CHAINS[name])
    made = []
    make = lambda *args: made.append(ReadBehind(*args)) or made[-1]  # noqa: E731
    ReadBehind = overlap.ReadBehind
    with on_a_gpu(), mock.patch.object(sequential, "ReadBehind", mock.Mock(wraps=ReadBehind, side_effect=make)) as kind:
        kind.takes_over = ReadBehind.takes_over
        with mock.patch.object(readback, "begin_reading", wraps=readback.begin_reading) as begun:
            found = processed(CHAINS[name])
    assert len(made) == 1 and begun.call_count > 20
    assert found.results.dtype == expected.results.dtype
    np.testing.assert_array_equal(found.results, expected.results)
    assert found.lengths == expected.lengths and found.n_checkpoints == expected.n_checkpoints > 1


@pytest.mark.parametrize("name", ["one unit", "stage by stage"])
@pytest.mark.parametrize("event", ["append", "checkpoint"])
def test_an_interrupted_run_goes_on_at_its_checkpoint(name, event):
    with on_a_gpu():
        expected = processed(CHAINS[name])
        sink, seen = MemorySink(), []

        def before(what):
            seen.append(what)
            if seen.count("checkpoint") == 2 and what == event:
                raise OSError(28, "No space left on device")

        sink.before = before
        with pytest.raises(OSError, match="No space left"):
            processed(CHAINS[name], sink)
        assert sink.n_checkpoints and sink.results is None
        sink.before = lambda what: None
        processed(CHAINS[name], sink)
    np.testing.assert_array_equal(sink.results, expected.results)


def test_the_chain_is_fused_with_its_conversions_and_few_results_wait():
    waiting = []
    chain = band_pass()
    put = overlap.ReadBehind._put

    def counting(self, action, n_bytes=0):
        put(self, action, n_bytes)
        waiting.append(len(self._waiting))

    with on_a_gpu(), mock.patch.object(overlap.ReadBehind, "_put", counting):
        processed(lambda: chain)
        assert compiled_run(chain).stop == 3
    assert len(waiting) > 20 and max(waiting) <= overlap.MOST_UNREAD
    assert not any(thread.name.startswith(("reading", "writing")) for thread in threading.enumerate())


class Doubled(ChainTransformer):
    def _post_process(self, output):
        assert isinstance(output.data, np.ndarray)
        return output


def test_what_changes_results_itself_reads_them_itself():
    with on_a_gpu():
        sink = processed(lambda: Doubled(make_chain=stages))
    assert sink.results is not None


@pytest.mark.parametrize(
    ("step", "taken"),
    [
        (AsArrayTransformer(backend="numpy"), True),
        (AsArrayTransformer(backend="numpy", dtype="float64"), True),
        (AsArrayTransformer(backend="numpy", dtype="int16", rounding="nearest"), True),
        # The log says once what is cut off.
        (AsArrayTransformer(backend="numpy", dtype="int16"), False),
        (AsArrayTransformer(backend="mlx"), False),
        (DetrendTransformer(), False),
    ],
)
def test_conversions_that_can_be_done_in_another_thread(step, taken):
    assert overlap.ReadBehind.takes_over(step) is taken


def test_a_chain_of_one_stage_keeps_it():
    chain = ChainTransformer(make_chain=lambda: AsArrayTransformer(backend="numpy"))
    assert isinstance(chain, BaseChainTransformer) and not chain.leave_last()


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rounds"), [(None, False), ("float64", False), ("int16", True), ("short", True), ("complex64", False)]
)
@pytest.mark.parametrize("source", ["float32", "bfloat16", "int16"])
def test_what_is_read_in_two_halves_is_what_is_read_at_once(source, dtype, rounds, writes):
    x = mx.array([[1.5, -2.5, 4e4], [0.49, -7.0, 3.0]]).astype(getattr(mx, source))
    expected = mlx_to_numpy(x, dtype, rounds=rounds)
    with results_written() if writes else contextlib.nullcontext():
        unread = readback.begin_reading(x, dtype, rounds=rounds)
        found = []
        thread = threading.Thread(target=lambda: found.append(unread.read()))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(found[0], expected)
    assert found[0].dtype == expected.dtype and found[0].flags.writeable


def test_complex_results_do_not_lose_their_imaginary_part():
    with pytest.raises(TypeError, match="imaginary"):
        readback.begin_reading(mx.array([1j]), "float32")
