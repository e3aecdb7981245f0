"""Memory that results are given in and messages uploaded from: used again, and never while somebody may look at it."""

import ctypes
import functools
import gc
import math
import pickle
import threading
import types
import weakref

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers import cuda_emulation
from helpers.on_no_gpu import as_on_a_gpu, compiled_run, results_written
from helpers.processes import in_forked_child
from helpers.speed_messages import messages_of

from ezmsg.mlx import AsArrayTransformer, ChainTransformer, EWMATransformer, PowTransformer, ReadLateTransformer
from ezmsg.mlx.cache import auto
from ezmsg.mlx.chain import compiledrun
from ezmsg.mlx.memory import memory_snapshot
from ezmsg.mlx.stream import convert, hostmemory, sharedcopy
from ezmsg.mlx.stream import device as hostdevice
from ezmsg.mlx.stream.fusible import FusedStage
from ezmsg.mlx.stream.hostmemory import Block, HostMemory, memory_in_use, used_again

KIB, FLOAT = 1024, np.dtype(np.float32)
SHAPE = (64, 256)


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(hostmemory, "SMALL_RESULT", 0)
    return HostMemory(hostmemory._plain_block)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def lent(memory: HostMemory, shape=SHAPE, dtype=FLOAT) -> np.ndarray:
    return memory.lend(memory.take(4 * math.prod(shape)), shape, dtype)


HOLDERS = {
    "array": lambda array: array,
    "base": lambda array: array if array.base is None else array.base,
    "slice": lambda array: array[3:7],
    "view of a view": lambda array: array[1:].T[::2].view(np.int32)[..., :1],
    "subclass": lambda array: array.view(np.recarray)[2:],
    "item": lambda array: array[0:1, 0].view(np.void),
    "memoryview": lambda array: memoryview(array)[2:],
    "buffer": lambda array: array[5:].data,
    "ctypes": lambda array: np.ctypeslib.as_ctypes(array[:2]),
    "ctypes buffer": lambda array: (ctypes.c_char * 8).from_buffer(array),
    "frombuffer": lambda array: np.frombuffer(array, np.uint8)[7:],
    "DLPack": lambda array: np.from_dlpack(array)[1:],
    "interface": lambda array: np.asarray(
        type("Other", (), {"__array_interface__": array.__array_interface__, "a": array})()
    ),
    "out of band": lambda array: _out_of_band(array[2:]),
    "copied flags": lambda array: _read_only(array[4:]),
    "in a cycle": lambda array: _cycle(array),
    "iterator": lambda array: np.nditer(array[1:]),
    "closure": lambda array: lambda: array[0],
}


def _out_of_band(array):
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(array, protocol=5, buffer_callback=buffers.append), buffers


def _read_only(array):
    view = array[:]
    view.flags.writeable = False
    return view


def _cycle(array):
    cycle: list = [array]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_comes_back_when_nothing_refers_to_it(name, memory):
    array = lent(memory)
    at = address(array)
    holder = HOLDERS[name](array)
    del array
    gc.collect()
    other = lent(memory)
    assert memory.use().lent == 2 * 64 * KIB and address(other) != at
    del holder
    gc.collect()
    assert memory.use() == (64 * KIB, 64 * KIB, 128 * KIB)
    assert address(lent(memory)) == at
    del other


def test_a_result_that_a_dying_cycle_hands_on_is_not_written_to(memory):
    kept = []

    class HandsOn:
        def __init__(self, array):
            self.array, self.itself = array, self

        def __del__(self):
            kept.append(self.array)

    array = lent(memory)
    array[:] = 1
    HandsOn(array)
    del array
    gc.collect()
    assert len(kept) == 1 and memory.use().idle == 0
    lent(memory)[:] = 2
    assert (kept[0] == 1).all()


def test_arrays_are_those_that_a_user_expects(memory):
    for shape, dtype in (((3, 5, 7), "f4"), ((4,), "i2"), ((), "f8"), ((2, 3), "c8"), ((0, 3), "f4")):
        array = memory.lend(memory.take(1), shape, np.dtype(dtype))
        assert type(array) is np.ndarray and array.shape == shape and array.dtype == dtype
        assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned
        array[...] = 1
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(array, protocol=5)), np.ones(shape, dtype))
        assert array.copy().flags.owndata


def test_what_users_hold_and_what_is_idle_have_a_bound(memory, monkeypatch):
    monkeypatch.setattr(hostmemory, "MOST_LENT", 10 * 64 * KIB)
    monkeypatch.setattr(hostmemory, "MOST_IDLE", 4 * 64 * KIB)
    freed, free = [], hostmemory._free
    monkeypatch.setattr(hostmemory, "_free", lambda block: (freed.append(block.size), free(block)))
    held = []
    for number in range(50):
        held.append(lent(memory))
        held[-1][:] = number
    use = memory.use()
    assert use.lent == 10 * 64 * KIB and use.idle == 64 * KIB
    assert sum(array.flags.owndata for array in held) == 40
    assert all((array == number).all() for number, array in enumerate(held))
    held.clear()
    assert memory.use() == (0, 4 * 64 * KIB, 4 * 64 * KIB)
    assert freed == [64 * KIB] * 7
    # What was used last is there.
    assert lent(memory, (16, 8)) is not None and memory.use().idle <= 4 * 64 * KIB
    # All that has come back, however short it has been idle.
    assert memory.use().idle
    memory.free()
    assert memory.use().idle == 0


def test_what_nobody_uses_is_freed(memory, monkeypatch):
    freed, done = [], threading.Event()
    monkeypatch.setattr(hostmemory, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(hostmemory, "_free", lambda block: (freed.append(block.size), len(freed) == 2 and done.set()))
    first, second = lent(memory), memory.take(1)
    memory.give_back(second)
    del first
    assert done.wait(60) and sorted(freed) == [16 * KIB, 64 * KIB]
    sweeper = memory._sweeper
    if sweeper is not None:
        sweeper.join(60)
    assert memory._sweeper is None and memory.use()[:2] == (0, 0)
    # And begins again.
    lent(memory)
    assert memory._sweeper is not None


def test_memory_is_gone_with_its_owner():
    memory = HostMemory(hostmemory._plain_block)
    array, known = lent(memory), weakref.ref(memory)
    array[:] = 3
    del memory
    assert known() is None and (array == 3).all()


def test_sizes_are_few():
    sizes = {hostmemory._size_class(n) for n in range(1, 4 << 20, 4097)}
    assert len(sizes) < 16 + 8 * 5
    assert all(
        n <= hostmemory._size_class(n) <= max(1.13 * n, n + 16 * KIB) for n in (1, 5000, 10**6, 49_152_000, 10**9)
    )


def test_threads_that_read_and_drop_results():
    memory, errors = HostMemory(hostmemory._plain_block), []

    def work(number: int) -> None:
        held: list[np.ndarray] = []
        for turn in range(300):
            array = lent(memory, (32, 128))
            array[:] = number * 1000 + turn
            held.append(array[turn % 8 :])
            if len(held) > 5:
                first = held.pop(0)
                if len(np.unique(first)) != 1 or int(first[0, 0]) != number * 1000 + turn - 5:
                    errors.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and memory.use().lent == 0


def test_other_processes_have_the_results_that_they_are_given_and_memory_of_their_own(monkeypatch):
    monkeypatch.setattr(hostmemory, "LEAST_COMPUTED", 0)
    first = used_again(SHAPE, FLOAT)
    first[:] = 1
    pickled, buffers = _out_of_band(first[1:])
    before = memory_in_use()

    def in_child() -> tuple[bool, bool, int, float]:
        is_same = bool((first == 1).all()) and bool((pickle.loads(pickled, buffers=buffers) == 1).all())
        second = used_again(SHAPE, FLOAT)
        second[:] = 2
        first[:] = 3
        return is_same, address(second) != address(first), memory_in_use().lent, float(second.mean())

    assert in_forked_child(in_child) == (True, True, 64 * KIB, 2.0)
    assert memory_in_use() == before and (first == 1).all()


def test_snapshots_count_it_and_the_limit_that_finds_itself_does_not(monkeypatch, device):
    monkeypatch.setattr(hostmemory, "_plain", HostMemory(hostmemory._plain_block))
    monkeypatch.setattr(hostmemory, "_device", device)
    result, block = used_again((256, 1024), FLOAT), device.take(3 << 20)
    assert memory_snapshot().result_memory == 4.0
    mlx = types.SimpleNamespace(get_active_memory=lambda: 7 << 20)
    assert auto._active(mlx) == 4 << 20
    del result, block
    # What a user has let go of is there for the next result; what was taken and never given back is gone.
    assert memory_snapshot().result_memory == 1.0 and auto._active(mlx) == 7 << 20


# Messages


@pytest.fixture
def device():
    return HostMemory(hostmemory._device_block)


@pytest.mark.parametrize("source", ["int8", "uint16", "int16", "float16", "float32", "float64", "int32", "bool"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (30, 256), (5, 2, 3)])
def test_a_message_is_copied_to_the_same_memory_each_time(source, shape, device):
    rng = np.random.default_rng(0)
    dtype = np.dtype(source) if np.dtype(source).itemsize < 4 else FLOAT
    kept = None
    for _ in range(3):
        x = rng.integers(0, 100, shape).astype(source)
        block = device.take(x.size * dtype.itemsize)
        array = block.filled(x, dtype)
        np.testing.assert_array_equal(np.array(array == array) * np.array(array), x.astype(dtype))
        assert array.shape == shape and (kept is None or array is kept)
        kept = array
        device.give_back(block)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 64])
def test_several_threads_copy_all_of_a_large_message(n_rows, device, monkeypatch):
    for module in (hostmemory, sharedcopy):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(sharedcopy, "CHUNK", 100)
    monkeypatch.setattr(sharedcopy, "HELPERS", 3)
    monkeypatch.setattr(sharedcopy, "_helpers", functools.cache(lambda process: sharedcopy._Helpers()))
    # Neither contiguous nor writable, as what comes from another process may be; what overflows does so in silence.
    whole = 10.0 ** np.random.default_rng(n_rows).integers(-99, 99, (2 * n_rows, 6))
    whole.flags.writeable = False
    for x in (whole[::2], whole[1::2, ::-1]):
        with np.errstate(all="ignore"):
            expected = x.astype(np.float32)
        np.testing.assert_array_equal(np.array(device.take(4 * x.size).filled(x, FLOAT)), expected)


def test_a_copy_that_fails_in_another_thread_raises_where_it_is_waited_for(monkeypatch):
    monkeypatch.setattr(sharedcopy, "HELPERS", 0)
    copy = sharedcopy.SharedCopy(np.zeros((4, 3)), np.zeros((4, 2)))
    thread = threading.Thread(target=copy.help)
    thread.start()
    thread.join()
    with pytest.raises(ValueError, match="broadcast"):
        copy.wait_for(4)


def test_memory_of_messages_is_written_to_again_when_the_device_has_read_it(device, monkeypatch):
    waited_for: list[object] = []
    monkeypatch.setattr(mx, "eval", lambda what: waited_for.append(what))
    blocks: list[Block] = []
    for number in range(10):
        blocks.append(device.take(1))
        assert waited_for == [[each] for each in range(number - hostmemory.MOST_READ + 1)]
        device.give_back_after(blocks[-1], [number])
    assert len(set(map(id, blocks))) == hostmemory.MOST_READ
    assert blocks[4:] == blocks[:6]


def test_memory_of_messages_is_given_back_without_a_look_at_what_another_thread_computes(device, monkeypatch):
    monkeypatch.setattr(hostmemory, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(mx, "eval", lambda *what: pytest.fail("asked for in a thread of its own"))
    for n_bytes in (1, 1, 1 << 20):
        device.give_back_after(device.take(n_bytes), [mx.zeros(1)])
    sweeper = device._sweeper
    assert sweeper is not None
    sweeper.join(60.0)
    assert not sweeper.is_alive() and device.use() == (0, 0, 0)


def test_messages_of_many_lengths_take_no_more_than_is_kept(device, monkeypatch):
    monkeypatch.setattr(hostmemory, "MOST_IDLE", 1 << 20)
    mark = mx.zeros(1)
    mx.eval(mark)
    for n_bytes in range(100_000, 400_000, 10_000):
        device.give_back_after(device.take(n_bytes), [mark])
        assert device.use().kept <= (2 << 20) + 500_000


# Results of chains


def stages():
    return [AsArrayTransformer(backend="mlx", dtype="float32"), PowTransformer(), AsArrayTransformer(backend="numpy")]


@pytest.fixture(params=["cpu", "as on a GPU"])
def on(request):
    if request.param == "cpu":
        yield request.param
        return
    mx.disable_compile()
    with as_on_a_gpu(), results_written():
        yield request.param
    mx.enable_compile()


@pytest.mark.parametrize(
    ("kind", "source", "n"),
    [("fused", "int16", 2500), ("fused", "float64", 500), ("bare", "float32", 500), ("late", "int16", 500)],
)
def test_what_is_held_never_changes_while_the_stream_goes_on(kind, source, n, on, monkeypatch):
    """Thousands of results, and of what can be made of them without a copy."""
    most = 500 * 16 * KIB
    monkeypatch.setattr(hostmemory, "MOST_LENT", most)
    monkeypatch.setattr(convert, "LEAST_STAGED", 0)
    # Small ones, so that there can be many.
    monkeypatch.setattr(hostmemory, "SMALL_RESULT", 0)
    monkeypatch.setattr(hostmemory, "LEAST_COMPUTED", 0)
    rng, makers = np.random.default_rng(1), list(HOLDERS.items())
    messages = messages_of(8, 64, 8)
    results_of = {"fused": as_one, "bare": converted, "late": converted_late}[kind]()
    held: list[tuple[str, object, np.ndarray]] = []
    due: list[np.ndarray] = []
    for number in range(n):
        message = replace(messages[number % 8], data=(messages[number % 8].data + number).astype(source))
        due.append(message.data.astype(np.float32) ** (2 if kind == "fused" else 1))
        for result in results_of(message):
            expected = due.pop(0)
            np.testing.assert_array_equal(result.data, expected)
            assert result.data.flags.writeable
            name, make = makers[rng.integers(len(makers))]
            held.append((name, make(result.data), expected))
            del result
        # Dropped in no order, and some kept from the beginning on.
        while len(held) > 0.8 * n:
            held.pop(int(rng.integers(100, len(held))))
    assert memory_in_use().lent <= 2 * most
    for name, holder, expected in held:
        assert _bytes_of(name, holder) == _bytes_of(name, HOLDERS[name](expected)), name


def test_what_other_threads_wait_for_is_nothing_that_the_stream_computes_with(device, monkeypatch):
    """MLX ends the process where one thread waits for an array that another one computes with."""
    monkeypatch.setattr(compiledrun, "device_memory", lambda: device)
    mx.disable_compile()
    with as_on_a_gpu(), results_written():
        chain = ChainTransformer(
            make_chain=lambda: [
                AsArrayTransformer(backend="mlx", dtype="float32"),
                EWMATransformer(time_constant=0.1),
                BinnedAggregateTransformer(bin_duration=0.01),
                AsArrayTransformer(backend="numpy"),
            ],
            lengths=(30,),
        )
        n_results = [len(chain(message).data) for message in messages_of(30, 8, 24)]
        state = set(map(id, compiled_run(chain).resident.arrays))
    mx.enable_compile()
    marks = [mark for read in device._read.values() for _, marks in read for mark in marks]
    assert sum(n_results) == 2 and n_results[-1] == 0 and marks and state
    assert not state & set(map(id, marks))


def as_one():
    chain = ChainTransformer(make_chain=stages)
    return lambda message: [chain(message)]


def converted():
    to_mlx, to_numpy = AsArrayTransformer(backend="mlx", dtype="float32"), AsArrayTransformer(backend="numpy")
    return lambda message: [to_numpy(to_mlx(message))]


def converted_late():
    to_mlx, late = AsArrayTransformer(backend="mlx", dtype="float32"), ReadLateTransformer(depth=2)
    return lambda message: late(to_mlx(message))


def _bytes_of(name: str, holder: object) -> bytes:
    if name == "out of band":
        _, buffers = holder
        return b"".join(bytes(buffer) for buffer in buffers)
    if name == "in a cycle":
        return holder[0].tobytes()
    if name == "closure":
        return holder().tobytes()
    if name == "iterator":
        return b"".join(bytes(value) for value in holder)
    return bytes(holder) if name.startswith("ctypes") else np.asarray(holder).tobytes()


# Copies over the bus


@pytest.mark.parametrize("kind", ["fused", "bare"])
@pytest.mark.parametrize("source", ["bool", "int16", "float64"])
def test_a_large_message_goes_up_in_parts(kind, source, monkeypatch):
    monkeypatch.setattr(convert, "LEAST_STAGED", 0)
    monkeypatch.setattr(convert, "LARGE_MESSAGE", 1)
    monkeypatch.setattr(compiledrun, "LARGE_MESSAGE", 1)
    mx.disable_compile()
    with as_on_a_gpu(), results_written():
        results_of = {"fused": as_one, "bare": converted}[kind]()
        for number, message in enumerate(messages_of(31, 8, 6)):
            message = replace(message, data=message.data.astype(source))
            (result,) = results_of(message)
            expected = message.data.astype(np.float32) ** (2 if kind == "fused" else 1)
            np.testing.assert_array_equal(result.data, expected, err_msg=str(number))
    mx.enable_compile()


@pytest.mark.parametrize("n_rows", [2, 64])
def test_memory_of_an_upload_is_used_again_when_the_kernels_have_read_it(n_rows, device, monkeypatch):
    monkeypatch.setattr(convert, "LARGE_MESSAGE", 1000)
    monkeypatch.setattr(convert, "device_memory", lambda: device)
    marks = []

    def read(x, dtype):
        marks.append(mx.zeros(1))
        return x * 1, marks[-1]

    convert.upload(hostdevice.Bus(lambda *given: None, read), np.ones((n_rows, 8), np.float32), FLOAT, "float32")
    ((block, waits_for),) = device._read[16 * KIB]
    # The last one: kernels run in order.
    assert len(marks) == (1 if n_rows == 2 else convert.N_PARTS) and waits_for == [marks[-1]]
    assert device.use() == (0, block.size, block.size) and device.take(1) is not block


@pytest.mark.parametrize("source", ["int16", "float32", "float64", "bool", "int64"])
def test_a_small_message_needs_no_kernel(source, monkeypatch):
    data = np.arange(12).reshape(3, 4).astype(source)
    never = hostdevice.Bus(lambda *given: pytest.fail("written"), lambda *given: pytest.fail("read"))
    monkeypatch.setattr(convert, "bus", lambda: never)
    with as_on_a_gpu():
        found, _ = convert.numpy_to_mlx(data, "float32")
    assert found.dtype == mx.float32
    np.testing.assert_array_equal(np.asarray(found), data.astype(np.float32))


@pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="needs Linux and a C++ compiler")
def test_kernels_copy_all_items_and_no_more(monkeypatch):
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_emulation.CudaKernel)
    copies = hostdevice._bus.__wrapped__()
    assert copies is not None
    for n in (1, 3, 4, 7, 8, 1024, 5000):
        counts = np.arange(n, dtype=np.int16) - 7
        wide, done = copies.read(mx.array(counts), mx.float32)
        np.testing.assert_array_equal(np.array(wide), counts.astype(np.float32))
        same, _ = copies.read(wide, mx.float32)
        memory = mx.zeros(4 * n + 8, mx.uint8) + 9
        mx.eval(memory, done)
        mx.eval(copies.write(same, memory))
        window = np.asarray(memory)
        np.testing.assert_array_equal(window[: 4 * n].view(np.float32), counts.astype(np.float32))
        assert (window[4 * n :] == 9).all()


def test_kernels_that_are_wrong_or_fail_are_not_used(monkeypatch, caplog):
    def broken(**arguments):
        raise RuntimeError("NVRTC")

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: broken)
    with caplog.at_level("WARNING", logger="ezmsg"):
        assert hostdevice._bus.__wrapped__() is None
    nothing = lambda inputs, output_shapes, **arguments: [mx.zeros(shape) for shape in output_shapes]  # noqa: E731
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **arguments: nothing)
    with caplog.at_level("WARNING", logger="ezmsg"):
        assert hostdevice._bus.__wrapped__() is None
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["failed.", "wrong."]


class Difference(BaseTransformer[ez.Settings, AxisArray, AxisArray]):
    """From the last sample of the message before, which it keeps as a part of that message."""

    last: mx.array | None = None

    def _process(self, message):
        x, last = message.data, self.last
        self.last = x[-1:]
        return replace(message, data=x - (mx.zeros((1, x.shape[1])) if last is None else last))

    def fuse(self, message):
        return FusedDifference(self, message)


class FusedDifference(FusedStage[Difference]):
    def apply(self, x, arrays, variant):
        return x - arrays[0], (x[-1:],)

    def load(self):
        return (self.transformer.last,), None

    def store(self, arrays, counts):
        (self.transformer.last,) = arrays


def test_what_a_stage_keeps_of_a_message_is_not_in_memory_that_is_written_to_again():
    def differences():
        to_mlx = AsArrayTransformer(backend="mlx", dtype="float32")
        return [to_mlx, Difference(), AsArrayTransformer(backend="numpy")]

    messages = [replace(message, data=message.data.astype(np.float32)) for message in messages_of(30, 4, 8)]
    before = np.zeros((1, 4), np.float32)
    mx.disable_compile()
    with as_on_a_gpu(), results_written():
        chain = ChainTransformer(make_chain=differences, lengths=(30,))
        for message in messages:
            np.testing.assert_array_equal(chain(message).data, message.data - before)
            before = message.data[-1:]
        assert compiled_run(chain).stop == 3
    mx.enable_compile()
