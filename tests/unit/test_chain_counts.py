"""What a message of the example chain takes on a GPU, as far as it can be counted without one.

Each node of the graph that MLX makes costs the host some microseconds, and each launch the device as many.
"""

import functools
import sys

import pytest
from helpers import latency

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers.chain_counts import counts_of, graph_of, kernels_replaced
from helpers.on_no_gpu import as_on_a_gpu, compiled_run, device_replaced
from helpers.speed_messages import messages_of

from ezmsg.mlx import ChainTransformer
from ezmsg.mlx.chain import compiledrun

N_SAMPLES, N_CHANNELS = 30, 16


@pytest.fixture
def compile_later():
    """Functions are compiled when they are counted only: nothing is evaluated then."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def chain_of(bin_duration: float, n_messages: int) -> ChainTransformer:
    chain = ChainTransformer(make_chain=functools.partial(latency.make_chain, bin_duration), lengths=(N_SAMPLES,))
    for message in messages_of(N_SAMPLES, N_CHANNELS, n_messages):
        chain(message)
    return chain


@mx.compile
def by_hand(x, before, before_power):
    x = x.astype(mx.float32)
    x = x - x.mean(axis=1, keepdims=True)
    # One node, as a kernel is.
    x = x - mx.cumsum(x, axis=0)
    y = mx.cumsum(x * x, axis=0).mean(axis=0, keepdims=True)
    return [before, before_power, mx.log(mx.maximum(y, 1e-30)) / mx.log(10.0)]


@pytest.mark.parametrize("path", ["cuda", "metal"])
def test_nodes_and_launches_of_a_message(path, compile_later):
    with as_on_a_gpu(path), kernels_replaced(path):
        run = compiled_run(chain_of(N_SAMPLES / latency.RATE, 3))
        of_message = run._resident.ahead.key
        mx.enable_compile()
        found = counts_of(run)[of_message]
        mx.disable_compile()
        run = compiled_run(chain_of(10 * N_SAMPLES / latency.RATE, 12))
        mx.enable_compile()
        of_bins = {key[1][4][0]: counts for key, counts in counts_of(run).items()}
    # An integer that is widened, a mean, its subtraction, two averages, a square in between, a bin, a logarithm.
    assert found.nodes <= 8 and found.launches <= 8, found.kinds
    state = mx.zeros((4, N_CHANNELS))
    least = graph_of(by_hand, mx.zeros((N_SAMPLES, N_CHANNELS), mx.int16), state, state)
    assert found.nodes <= least.nodes
    without_a_bin, with_a_bin = of_bins[()], of_bins[(10 * N_SAMPLES,)]
    # One more node, which is no launch, says that a message without a result is done.
    assert without_a_bin.nodes <= 10 and without_a_bin.launches <= 8, without_a_bin.kinds
    assert with_a_bin.nodes <= 14 and with_a_bin.launches <= 12, with_a_bin.kinds


def test_nothing_of_a_message_is_read_but_its_result(compile_later, monkeypatch):
    """What is read from the device waits for it, and moves pages: of the state, nothing."""
    with as_on_a_gpu():
        chain = chain_of(N_SAMPLES / latency.RATE, 4)
        read, original = [], compiledrun.copied

        def noted(y, *args):
            read.append(y.shape)
            return original(y, *args)

        monkeypatch.setattr(compiledrun, "copied", noted)
        for message in messages_of(N_SAMPLES, N_CHANNELS, 3):
            chain(message)
    assert read == [(1, N_CHANNELS)] * 3


def test_the_device_begins_before_what_can_be_worked_out_meanwhile(compile_later):
    """Calls of Python functions, which tell what no busy machine's clock does: few before the device, few behind."""
    messages, calls = messages_of(N_SAMPLES, N_CHANNELS, 5), []
    with as_on_a_gpu():
        chain = chain_of(N_SAMPLES / latency.RATE, 4)
        with device_replaced(compiled_run(chain)):
            chain(messages[0])
            sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
            try:
                chain(messages[1])
            finally:
                sys.setprofile(None)
    begins, ends = calls.index("_nothing"), calls.index("_finish")
    assert "advance" in calls[begins:ends] and "relabel" in calls[begins:ends]
    assert begins <= 20, calls[:begins]
    assert len(calls) - ends <= 10, calls[ends:]
