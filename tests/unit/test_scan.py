"""chunked_scan, driven with a running sum: integers in float32, so that every result is exact."""

import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

import ezmsg.mlx.scan as scan
from ezmsg.mlx.scan import chunked_scan, normalize_chunk_sizes

mx = pytest.importorskip("mlx.core")

SIZE_SETS = [(1,), (32,), (1, 7), (3, 8, 20), (16, 17), (5, 1, 5, 12)]
AXES = [0, 1, -1]


def lengths_around(sizes: tuple[int, ...]) -> list[int]:
    largest = max(sizes)
    marks = {1, 2, 3, *sizes, 2 * largest, 3 * largest, 3 * largest + min(sizes), 4 * largest}
    return sorted({n + step for n in marks for step in (-1, 0, 1) if n + step >= 1})


def integers(n: int, axis: int, seed: int = 0) -> np.ndarray:
    shape = [2, 3, 2]
    shape[axis] = n
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


class RunningSum:
    """A recurrence kernel whose sizes are fixed, which records its launches and leaves *garbage* in the padding."""

    def __init__(self, axis: int, garbage: float = np.nan):
        self.axis, self.garbage = axis, garbage
        self.chunks: list[np.ndarray] = []
        self.sizes: list[int] = []
        self.valid: list[int] = []
        self.valid_lengths: list[mx.array] = []
        self.states: list[tuple[mx.array, mx.array]] = []

    def __call__(self, chunk, state, size, valid_length):
        valid = valid_length.item()
        x = np.moveaxis(np.array(chunk), self.axis, 0)
        y = np.full((size, *x.shape[1:]), self.garbage, np.float32)
        y[:valid] = np.cumsum(x, axis=0)[:valid] + np.array(state)
        new_state = mx.array(y[valid - 1])
        self.chunks.append(x)
        self.sizes.append(size)
        self.valid.append(valid)
        self.valid_lengths.append(valid_length)
        self.states.append((state, new_state))
        return mx.array(np.moveaxis(y, 0, self.axis)), new_state


def run(x: np.ndarray, sizes, axis: int = 0, garbage: float = np.nan, **options):
    launch = RunningSum(axis, garbage)
    state = mx.array(np.full(np.moveaxis(x, axis, 0).shape[1:], 1000.0, np.float32))
    y, last = chunked_scan(mx.array(x), x.shape[axis], sizes, state, launch, axis=axis, **options)
    return np.array(y), np.array(last), launch


def run_with_scan(code: str, *options: str) -> str:
    """Run *code* in a fresh process in which ``scan`` is the module, without the rest of the package (seconds)."""
    load = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("scan", {scan.__file__!r})
scan = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scan)
"""
    done = subprocess.run([sys.executable, *options, "-c", load + code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------ length and values


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("sizes", SIZE_SETS, ids=str)
def test_result_is_the_recurrence_with_exactly_the_samples_asked_for(sizes, axis):
    for n in lengths_around(sizes):
        x = integers(n, axis, seed=n)
        y, last, _ = run(x, sizes, axis)
        expected = np.cumsum(x, axis=axis) + 1000
        np.testing.assert_array_equal(y, expected, err_msg=f"length {n}")
        np.testing.assert_array_equal(last, np.take(expected, -1, axis=axis), err_msg=f"state at length {n}")


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_what_a_launch_leaves_in_the_padding_reaches_neither_result_nor_state(garbage):
    x = integers(45, 0)
    y, last, launch = run(x, (3, 32), garbage=garbage)
    assert launch.valid == [32, 13]
    np.testing.assert_array_equal(y, np.cumsum(x, axis=0) + 1000)
    np.testing.assert_array_equal(last, y[-1])


def test_zero_samples_give_an_empty_result_and_leave_the_state_alone():
    state = object()

    def launch(*_):
        raise AssertionError("launched without samples")

    for axis, shape in ((0, (0, 3)), (1, (3, 0)), (-1, (2, 3, 0)), (1, (2, 0, 3))):
        for dtype in (mx.float32, mx.int32):
            y, last = chunked_scan(mx.zeros(shape, dtype=dtype), 0, (4, 16), state, launch, axis=axis)
            assert (y.shape, y.dtype) == (shape, dtype)
            assert last is state


def test_inf_in_the_last_sample_before_the_padding_stays_in_its_channel():
    x = integers(21, 0)
    x[-1, 1, 0] = np.inf
    y, last, _ = run(x, (16,))
    np.testing.assert_array_equal(y, np.cumsum(x, axis=0) + 1000)
    np.testing.assert_array_equal(np.isinf(last), np.isinf(x[-1]))


def test_time_first_needs_no_transpose_and_the_trim_is_contiguous():
    x = mx.array(integers(21, 0))
    shapes = []

    def launch(chunk, state, size, _):
        shapes.append(chunk.shape)
        return chunk + 0, state

    y, _ = chunked_scan(x, 21, (8,), None, launch, axis=0)
    mx.eval(y)
    assert shapes == [(8, 3, 2)] * 3
    assert np.asarray(y).flags.c_contiguous


def test_input_is_not_changed():
    data = integers(21, 1)
    x = mx.array(data)
    chunked_scan(x, 21, (4, 16), mx.zeros((2, 2)), RunningSum(1), axis=1)
    np.testing.assert_array_equal(np.array(x), data)


# --------------------------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("sizes", SIZE_SETS, ids=str)
def test_each_launch_takes_the_smallest_size_that_holds_the_rest_and_pads_the_tail_only(sizes, axis):
    for n in lengths_around(sizes):
        x = integers(n, axis, seed=n)
        _, _, launch = run(x, sizes, axis)
        *whole, tail = launch.valid
        assert whole == [max(sizes)] * len(whole)
        assert launch.sizes == [*whole, min(size for size in sizes if size >= tail)]
        assert sum(launch.valid) == n
        assert [chunk.shape[0] for chunk in launch.chunks] == launch.sizes
        padded = np.concatenate(launch.chunks)
        np.testing.assert_array_equal(padded[:n], np.moveaxis(x, axis, 0))
        assert not padded[n:].any()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("sizes", SIZE_SETS, ids=str)
def test_launch_that_asks_for_no_padding_gets_the_last_chunk_as_short_as_it_is(sizes, axis):
    for n in lengths_around(sizes):
        x = integers(n, axis, seed=n)
        y, last, launch = run(x, sizes, axis, pad=False)
        np.testing.assert_array_equal(y, np.cumsum(x, axis=axis) + 1000)
        np.testing.assert_array_equal(last, np.take(y, -1, axis=axis))
        assert [chunk.shape[0] for chunk in launch.chunks] == launch.valid
        np.testing.assert_array_equal(np.concatenate(launch.chunks), np.moveaxis(x, axis, 0))


def test_state_goes_from_launch_to_launch_as_it_is():
    states = [object() for _ in range(4)]
    received = []

    def launch(chunk, state, size, _):
        received.append(state)
        return chunk, states[len(received)]

    _, last = chunked_scan(mx.zeros((30,)), 30, (12,), states[0], launch)
    assert received == states[:3]
    assert last is states[3]


def test_valid_length_is_one_uint32():
    _, _, launch = run(integers(21, 0), (4, 16))
    assert [length.item() for length in launch.valid_lengths] == [16, 5]
    assert {(length.dtype, length.shape) for length in launch.valid_lengths} == {(mx.uint32, (1,))}


def test_valid_length_first_seen_in_one_thread_serves_another():
    # 4001: a length no other test has used, so that the thread is the first to make its array. It does not look at it.
    x = np.ones((4001, 1, 1), np.float32)
    scanned = []

    def first():
        scanned.append(chunked_scan(mx.array(x), 4001, (4096,), None, lambda chunk, *_: (chunk, None), axis=0))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert scanned
    _, last, launch = run(x, (4096,))
    assert launch.valid == [4001]
    assert last.item() == 5001


# ------------------------------------------------------------------------------------------------------ broken rules


def pads_before_the_last(remaining: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    return sizes[-1], min(remaining, sizes[-1] // 2)


def pads_none(remaining: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    return sizes[-1], 0


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("rule", [pads_before_the_last, pads_none])
def test_size_rule_that_pads_a_chunk_before_the_last_is_noticed(monkeypatch, rule, pad):
    monkeypatch.setattr(scan, "_next_chunk", rule)
    with pytest.raises(AssertionError, match="before the last"):
        run(integers(30, 0), (4, 16), pad=pad)


def test_size_rule_that_pads_a_chunk_before_the_last_is_noticed_by_optimized_python():
    code = f"""
import mlx.core as mx
{inspect.getsource(pads_before_the_last)}
scan._next_chunk = pads_before_the_last
try:
    scan.chunked_scan(mx.zeros((30,)), 30, (16,), None, lambda chunk, state, size, valid: (chunk, state))
except AssertionError as error:
    print(error)
assert False, "the interpreter runs assert statements"
"""
    assert "before the last" in run_with_scan(code, "-O")


@pytest.mark.parametrize("width", [0, 15, 17, 21])
def test_launch_of_another_width_is_refused_with_both_shapes(width):
    def launch(chunk, state, size, _):
        return mx.zeros((3, width)), state

    with pytest.raises(ValueError, match=rf"\(3, {width}\).*\(3, 16\)"):
        chunked_scan(mx.zeros((3, 21)), 21, (16,), None, launch)


def test_launch_that_loses_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 16\)"):
        chunked_scan(mx.zeros((3, 21)), 21, (16,), None, lambda chunk, state, *_: (chunk[:, 0], state))


@pytest.mark.parametrize(("n", "axis"), [(20, 1), (22, 1), (0, 1), (-1, 1), (21, 0), (3, -1)])
def test_number_of_samples_must_be_the_length_of_the_axis(n, axis):
    with pytest.raises(ValueError, match=rf"n_samples is {n}.*\(3, 21\)"):
        chunked_scan(mx.zeros((3, 21)), n, (16,), None, RunningSum(axis), axis=axis)


@pytest.mark.parametrize(("shape", "axis"), [((3, 21), 2), ((3, 21), -3), ((), 0), ((), -1)])
def test_axis_must_be_one_of_the_data(shape, axis):
    with pytest.raises(ValueError, match=f"axis is {axis}"):
        chunked_scan(mx.zeros(shape), 21, (16,), None, RunningSum(0), axis=axis)


@pytest.mark.parametrize("axis", ["time", True, 0.0, None], ids=repr)
def test_axis_must_be_an_integer(axis):
    with pytest.raises(TypeError, match=f"^'axis' must be an integer, got {axis!r}"):
        chunked_scan(mx.zeros((3, 21)), 21, (16,), None, RunningSum(0), axis=axis)


# ------------------------------------------------------------------------------------------------------- chunk sizes


def test_sizes_are_sorted_integers_without_repetition():
    assert normalize_chunk_sizes([1024, 32, np.int64(32), 7]) == (7, 32, 1024)
    assert [type(size) for size in normalize_chunk_sizes((np.int32(8), 4))] == [int, int]
    assert normalize_chunk_sizes(size for size in (2, 1)) == (1, 2)
    assert normalize_chunk_sizes((1024,), 1024) == (1024,)


BAD_SIZES = [(), [], (0,), (-1,), (32, 0), (32.0,), (True,), (32, False), (None,), ("32",), "32", 32, None, ([32],)]


@pytest.mark.parametrize("sizes", BAD_SIZES, ids=repr)
def test_bad_sizes_are_refused(sizes):
    # Whatever came before: True == 1 and 32.0 == 32, which a cache of checked sizes would take for one another.
    for good in ((1,), (32,), (32, 1)):
        chunked_scan(mx.zeros((5,)), 5, good, None, lambda chunk, state, *_: (chunk, state))
    with pytest.raises(ValueError, match="'block_sizes' must be"):
        normalize_chunk_sizes(sizes, name="block_sizes")
    with pytest.raises(ValueError, match="'chunk_sizes' must be"):
        chunked_scan(mx.zeros((5,)), 5, sizes, None, RunningSum(0))


def test_size_above_what_the_kernel_takes_is_refused_with_the_bound():
    with pytest.raises(ValueError, match="<= 1024, got .*1025"):
        normalize_chunk_sizes((32, 1025), 1024)


# ------------------------------------------------------------------------------------------------------------ memory


def cache_after_40_lengths(trim: str) -> int:
    """Bytes in MLX's cache after inputs of 40 lengths, all alive from the start, went through a scan."""
    import mlx.core as mx

    def trimmed_chunk_by_chunk(x, n_samples, sizes, state, launch, axis):
        chunks = []
        for start in range(0, n_samples, sizes[-1]):
            valid = min(n_samples - start, sizes[-1])
            size = min(size for size in sizes if size >= valid)
            chunk = mx.pad(x[start : start + valid], [(0, size - valid), (0, 0)])
            y, state = launch(chunk, state, size, mx.array([valid], dtype=mx.uint32))
            chunks.append(y[:valid])
        return mx.concatenate(chunks, axis=axis), state

    drive = {"once": scan.chunked_scan, "each": trimmed_chunk_by_chunk}[trim]
    mx.set_cache_limit(1 << 40)
    inputs = [mx.ones((300 + (i * 17 % 40) * 217, 64)) for i in range(40)]
    mx.eval(inputs)
    mx.clear_cache()
    for x in inputs:
        y, _ = drive(x, x.shape[0], (32, 1024), None, lambda chunk, state, *_: (chunk * 2, state), axis=0)
        mx.eval(y)
        del y
    return mx.get_cache_memory()


def test_trimming_once_leaves_less_in_the_cache_than_trimming_each_chunk():
    source = inspect.getsource(cache_after_40_lengths)
    once, each = (int(run_with_scan(f"{source}\nprint(cache_after_40_lengths({trim!r}))")) for trim in ("once", "each"))
    # Measured on the CPU backend: 15 and 46 MiB.
    assert 0 < once < 0.6 * each
