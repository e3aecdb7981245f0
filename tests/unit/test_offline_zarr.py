"""Results in Zarr: what the group holds, and what of it an interruption leaves."""

import contextlib
import errno
import json
import os
import re
import shutil

import numcodecs
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.offline_memory import CH_AXIS, MemorySource
from helpers.processes import RecordedLog

from ezmsg.mlx import AsArrayTransformer, EWMATransformer, RechunkSettings, ZarrSink, process_recording
from ezmsg.mlx.offline import zarrsink
from ezmsg.mlx.offline import zarrsink as durable
from ezmsg.mlx.offline.zarrlayout import RowWriter, checksum
from ezmsg.mlx.offline.zarrsink import _Results

zarr = pytest.importorskip("zarr")
pytest.importorskip("mlx.core")

SOURCE = {"n_samples": 1500, "chunk": 100}
CHUNK_MB = 256 * 16 / 2**20
"""Of 256 rows of four float32."""


def make_chain():
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        EWMATransformer(time_constant=0.1),
        AsArrayTransformer(backend="numpy"),
    ]


def process(path, source=None, chain=make_chain, **options):
    return process_recording(
        source or MemorySource(**SOURCE),
        chain,
        ZarrSink(path, chunk_mb=CHUNK_MB, **options),
        rechunk=RechunkSettings(sizes=(64,)),
        checkpoint_seconds=0.5,
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("expected") / "results.zarr"
    process(path)
    return contents(path)


def contents(path):
    group = zarr.open_group(str(path), mode="r")
    return {name: group[name][:] for name in ("data", "time", "ch")}


def assert_same(path, expected):
    found = contents(path)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]


def test_the_group_holds_data_times_labels_and_the_recipe(tmp_path):
    path = tmp_path / "a" / "results.zarr"
    process(path)
    group = zarr.open_group(str(path), mode="r")
    assert group["data"].shape == (1500, 4) and group["data"].chunks == (256, 4)
    assert group["data"].dtype == np.float32
    np.testing.assert_allclose(group["time"][:], np.arange(1500) / 1000.0, rtol=0, atol=1e-12)
    assert list(group["ch"][:]) == list(CH_AXIS.data)
    assert [list(group[name].attrs["_ARRAY_DIMENSIONS"]) for name in ("data", "time", "ch")] == [
        ["time", "ch"],
        ["time"],
        ["ch"],
    ]
    assert group.attrs["key"] == "noise"
    assert "noise 0, 1500 samples" in group.attrs["recipe"]
    assert "time_constant=0.1" in group.attrs["recipe"]
    assert [entry.name for entry in path.parent.iterdir()] == ["results.zarr"]


@pytest.mark.parametrize("name", ["default", "none", "zstd"])
def test_data_is_compressed_as_asked_for(tmp_path, expected, name):
    numcodecs = pytest.importorskip("numcodecs")
    compressor = {"default": "default", "none": None, "zstd": numcodecs.Blosc("zstd", clevel=1)}[name]
    process(tmp_path / "results.zarr", compressor=compressor)
    with open(tmp_path / "results.zarr" / "data" / ".zarray") as file:
        written = json.load(file)["compressor"]
    if name == "default":
        assert written is not None
    else:
        assert written == (None if name == "none" else compressor.get_config())
    found = contents(tmp_path / "results.zarr")
    np.testing.assert_array_equal(found["data"], expected["data"])


def test_what_is_no_compressor_is_refused(tmp_path):
    with pytest.raises(TypeError, match="'compressor' must be a codec of numcodecs, None or 'default', got 5"):
        ZarrSink(tmp_path / "results.zarr", compressor=5)


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"chunk_samples": 100}, (100, 4)),
        ({"chunk_channels": 3}, (256, 3)),
        ({"chunk_samples": 70, "chunk_channels": 1}, (70, 1)),
        ({"chunk_channels": 9}, (256, 4)),
    ],
)
def test_chunks_are_as_long_as_asked_for(tmp_path, expected, options, chunks):
    path = tmp_path / "results.zarr"
    process(path, **options)
    assert zarr.open_group(str(path), mode="r")["data"].chunks == chunks
    assert_same(path, expected)


@pytest.mark.parametrize("dtype", ["int16", "float64"])
def test_results_have_the_dtype_that_is_asked_for_which_is_part_of_the_recipe(tmp_path, expected, dtype):
    path = tmp_path / "results.zarr"
    process(path, dtype=dtype)
    rounded = expected["data"].astype(np.float64)
    assert_same(path, expected | {"data": (np.rint(rounded) if dtype == "int16" else rounded).astype(dtype)})
    assert zarr.open_group(str(path), mode="r").attrs["recipe"].endswith(f"\nresults as {dtype}")
    with pytest.raises(FileExistsError, match="other settings"):
        process(path)
    process(path, dtype=dtype)


def test_integers_saturate_and_what_is_not_real_is_refused(tmp_path):
    with opened(tmp_path / "r.zarr", dtype="int8") as sink:
        sink.append(message(np.array([[300.0], [-300.0], [np.nan], [2.5]])))
        sink.commit()
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "r.zarr"), mode="r")["data"][:, 0], [127, -128, 0, 2])
    with opened(tmp_path / "c.zarr", dtype="int8") as sink, pytest.raises(TypeError, match="complex128, which cannot"):
        sink.append(message(np.ones((2, 1), complex)))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"chunk_samples": 0}, ValueError, "'chunk_samples' must be an integer of at least 1, got 0"),
        ({"chunk_channels": 1.5}, TypeError, "'chunk_channels' must be an integer of at least 1, got 1.5"),
        ({"dtype": "text"}, TypeError, "'dtype' must be None or one of 'float16', "),
    ],
)
def test_layouts_are_checked(tmp_path, options, error, said):
    with pytest.raises(error, match=re.escape(said)):
        ZarrSink(tmp_path / "r.zarr", **options)


def test_results_that_are_there_are_left_alone(tmp_path, expected):
    path = tmp_path / "results.zarr"
    process(path)
    before = {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")}
    done = process(path)
    assert done.first_sample == done.n_samples
    assert {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")} == before
    assert_same(path, expected)


@pytest.mark.parametrize("what", ["other settings", "another recording", "something else"])
def test_a_name_that_is_taken_is_refused_and_left_alone(tmp_path, what):
    path = tmp_path / "results.zarr"
    if what == "something else":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    else:
        process(path)
    before = sorted(path.rglob("*"))
    with pytest.raises(FileExistsError, match=r"results\.zarr"):
        if what == "other settings":
            process(path, chain=lambda: EWMATransformer(time_constant=0.2))
        else:
            process(path, MemorySource(**SOURCE, seed=1))
    assert sorted(path.rglob("*")) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.zarr"]


# ---------------------------------------------------------------------------------------------------- interruptions


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(monkeypatch, module, name, call, after=False):
    """Raise Killed in place of (or right after) call number *call* of ``module.name``."""
    original, left = getattr(module, name), call

    def patched(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == 0 and not after:
            raise Killed
        result = original(*args, **kwargs)
        if left == 0:
            raise Killed
        return result

    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr(module, name, patched)
        yield
    assert left <= 0


@pytest.mark.parametrize(
    ("module", "name", "call", "after", "first_sample"),
    [
        # Chunks of the group are full at 256, 512, ... rows; checkpoints are made at 500 and 1000 samples.
        (_Results, "_write", 1, False, 0),
        (_Results, "_write", 2, True, 500),
        (zarrsink, "pack", 2, False, 500),
        (zarrsink.os, "fsync", 2, False, 500),
        (ZarrSink, "checkpoint", 2, True, 1000),
        (ZarrSink, "commit", 1, False, 1000),
        (zarrsink, "sync_tree", 1, True, 1000),
        (zarrsink.os, "rename", 2, True, 1500),
    ],
)
def test_killed_anywhere_it_goes_on_with_the_same_bits(
    tmp_path, monkeypatch, expected, module, name, call, after, first_sample
):
    path = tmp_path / "results.zarr"
    with killed_at(monkeypatch, module, name, call, after):
        process(path)
    assert path.exists() == (name == "rename")
    assert process(path).first_sample == first_sample
    assert_same(path, expected)


def interrupted(path, monkeypatch):
    with killed_at(monkeypatch, _Results, "_write", 4, True):
        process(path)


@pytest.mark.parametrize("damage", ["checkpoint cut off", "chunk lost", "chunk damaged", "group gone"])
def test_what_cannot_be_gone_on_with_is_made_anew(tmp_path, monkeypatch, expected, damage):
    path = tmp_path / "results.zarr"
    interrupted(path, monkeypatch)
    partial = tmp_path / "results.zarr.partial"
    (results,) = partial.glob("results-*")
    chunk = results / "data" / "2.0"
    if damage == "checkpoint cut off":
        (partial / "checkpoint").write_bytes((partial / "checkpoint").read_bytes()[:-20])
    elif damage == "chunk lost":
        chunk.unlink()
    elif damage == "chunk damaged":
        chunk.write_bytes((results / "data" / "1.0").read_bytes())
    else:
        shutil.rmtree(results)
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    assert any("starting over" in info for info in log.infos)
    assert_same(path, expected)


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    rows = np.arange(700.0).reshape(-1, 1)
    with opened(tmp_path / "r.zarr", chunk_mb=100 * 8 / 2**20) as sink:
        sink.append(message(rows[:250]))
        sink.checkpoint(b"state")
        sink.append(message(rows[250:]))
    with opened(tmp_path / "r.zarr", b"state", chunk_mb=100 * 8 / 2**20) as sink:
        sink.commit()
    np.testing.assert_array_equal(zarr.open_group(str(tmp_path / "r.zarr"), mode="r")["data"][:], rows[:250])


def test_what_was_interrupted_without_a_checkpoint_starts_over_and_says_so(tmp_path, monkeypatch, expected):
    path = tmp_path / "results.zarr"
    with RecordedLog() as log, killed_at(monkeypatch, _Results, "_write", 1, True):
        process(path)
    assert not any("starting over" in info for info in log.infos)
    assert not (tmp_path / "results.zarr.partial" / "checkpoint").exists()
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    (told,) = [info for info in log.infos if "starting over" in info]
    assert "results.zarr.partial was interrupted without a checkpoint" in told
    assert f"starting over with {MemorySource(**SOURCE).identity}" in told
    assert_same(path, expected)


def test_partial_results_of_other_settings_are_made_anew(tmp_path, monkeypatch, expected):
    path = tmp_path / "results.zarr"
    with killed_at(monkeypatch, _Results, "_write", 4, True):
        process(path, chain=lambda: [AsArrayTransformer(backend="mlx"), EWMATransformer(time_constant=0.2)])
    with RecordedLog() as log:
        assert process(path).first_sample == 0
    assert any("of other settings" in info and "starting over" in info for info in log.infos)
    assert_same(path, expected)


def test_a_full_disk_leaves_the_partial_results_to_go_on_with(tmp_path, monkeypatch, expected):
    path = tmp_path / "results.zarr"
    left, write = 5, RowWriter.write

    def write_until_full(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    with monkeypatch.context() as context, pytest.raises(OSError, match="No space left"):
        context.setattr(RowWriter, "write", write_until_full)
        process(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.zarr.partial"]
    assert process(path).first_sample == 500
    assert_same(path, expected)


# ---------------------------------------------------------------------------------------------------- two at a time


def test_two_do_not_write_the_same_results(tmp_path):
    sinks = [ZarrSink(tmp_path / "results.zarr") for _ in range(2)]
    assert sinks[0].open("recipe", "fingerprint") == (False, None)
    with pytest.raises(BlockingIOError, match=r"results\.zarr is being written by another process"):
        sinks[1].open("recipe", "fingerprint")
    sinks[0].close()
    assert sinks[1].open("recipe", "fingerprint") == (False, None)
    sinks[1].close()


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    sinks = [ZarrSink(tmp_path / "results.zarr") for _ in range(2)]
    flock, n_removed = durable.fcntl.flock, 0

    def remove_and_lock(*args):
        nonlocal n_removed
        if n_removed < 1:
            n_removed += 1
            shutil.rmtree(sinks[0].partial)
        flock(*args)

    monkeypatch.setattr(durable.fcntl, "flock", remove_and_lock)
    sinks[0].open("recipe", "fingerprint")
    with pytest.raises(BlockingIOError):
        sinks[1].open("recipe", "fingerprint")
    sinks[0].close()


def test_who_waits_finds_the_results_of_the_other_or_goes_on(tmp_path, monkeypatch, expected):
    path = tmp_path / "results.zarr"
    first = ZarrSink(path)
    first.open("another", "another")

    def close_first(seconds):
        first.close()
        if finish:
            shutil.rmtree(first.partial)
            process(path)

    monkeypatch.setattr(durable.time, "sleep", close_first)
    finish = True
    assert process(path, wait=60.0).first_sample == 1500
    assert_same(path, expected)

    shutil.rmtree(path)
    first.open("another", "another")
    finish = False
    assert process(path, wait=60.0).first_sample == 0
    assert_same(path, expected)


# -------------------------------------------------------------------------------------------------------- messages


def message(data, dims=("time", "ch"), **axes):
    axes = {"time": AxisArray.TimeAxis(fs=100.0, offset=3.0)} | axes
    return AxisArray(data=data, dims=list(dims), axes=axes, key="k", stream_dim="time")


@contextlib.contextmanager
def opened(path, checkpoint=None, **options):
    sink = ZarrSink(path, **options)
    assert sink.open("recipe", "fingerprint") == (False, checkpoint)
    with contextlib.closing(sink):
        yield sink


def test_time_comes_first_and_other_axes_keep_their_values(tmp_path):
    data = np.arange(24.0).reshape(2, 4, 3)
    freq = AxisArray.LinearAxis(unit="Hz", gain=2.0, offset=10.0)
    structured = AxisArray.CoordinateAxis(data=np.array([("x",), ("y",)], [("label", "U4")]), dims=["ch"])
    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(data, ("ch", "time", "freq"), ch=structured, freq=freq))
        sink.commit()
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:], np.moveaxis(data, 1, 0))
    assert group["data"].attrs["_ARRAY_DIMENSIONS"] == ["time", "ch", "freq"]
    np.testing.assert_allclose(group["time"][:], [3.0, 3.01, 3.02, 3.03])
    np.testing.assert_array_equal(group["freq"][:], [10.0, 12.0, 14.0])
    assert list(group["ch"][:]) == ["x", "y"]


def test_gaps_and_irregular_times_are_kept(tmp_path):
    later = AxisArray.CoordinateAxis(data=np.array([9.0, 9.5]), dims=["time"])
    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(np.zeros((2, 1))))
        sink.append(message(np.ones((2, 1)), time=later))
        sink.commit()
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    np.testing.assert_allclose(group["time"][:], [3.0, 3.01, 9.0, 9.5])


def with_attrs(path, attrs, data=None):
    """A group whose first message has *attrs*."""
    data = np.arange(400, dtype=np.int16).reshape(100, 4) if data is None else data
    with opened(path) as sink:
        sink.append(replace(message(data), attrs=attrs))
        sink.commit()
    return zarr.open_group(str(path), mode="r")["data"]


MEANING = [
    {"scale_factor": 0.195, "add_offset": 10.0},
    {"_FillValue": 0},
    {"missing_value": 100},
    {"_Unsigned": "true"},
    {"units": "seconds since 2020-01-01"},
    {"unit": "seconds since 2020-01-01"},
    {"unit": "seconds"},
    {"dtype": "bool"},
    {"_ARRAY_DIMENSIONS": ["x", "y"], "coordinates": "nothing", "calendar": "noleap"},
]


@pytest.mark.parametrize("attrs", MEANING, ids=str)
def test_attributes_by_which_readers_change_values_are_kept_under_other_names(tmp_path, attrs):
    xarray = pytest.importorskip("xarray")
    data = with_attrs(tmp_path / "r.zarr", attrs)
    found = dict(data.attrs)
    for name, value in attrs.items():
        assert found["unit" if name == "unit" else f"attr_{name}"] == value
    with xarray.open_zarr(tmp_path / "r.zarr") as shown:
        assert shown["data"].dtype == np.int16 and shown["data"].dims == ("time", "ch")
        np.testing.assert_array_equal(shown["data"], data[:])


def test_attributes_are_json_and_nested_values_of_numpy_are_kept(tmp_path):
    attrs = {
        "impedance": np.nan,
        "range": [0.0, np.inf, -np.inf],
        "nested": {"gain": np.float32(0.5), "map": np.arange(4).reshape(2, 2), "names": (np.str_("a"), b"b"), 3: {4}},
        "when": np.datetime64("2026-12-01"),
        "phase": 1 + 2j,
        "attr_units": "mine",
        "units": "other",
        "function": print,
    }
    found = dict(with_attrs(tmp_path / "r.zarr", attrs).attrs)
    expected = {
        "impedance": "NaN",
        "range": [0.0, "Infinity", "-Infinity"],
        "nested": {"gain": 0.5, "map": [[0, 1], [2, 3]], "names": ["a", "b"], "3": [4]},
        "when": "2026-12-01",
        "phase": "(1+2j)",
        "attr_units": "mine",
        "attr_attr_units": "other",
    }
    assert {name: found.get(name) for name in expected} == expected and "function" not in found
    for file in (tmp_path / "r.zarr").rglob(".z*"):
        json.loads(file.read_text(), parse_constant=pytest.fail)


def test_a_slash_or_a_dot_in_a_name_is_no_group_and_no_hidden_file(tmp_path):
    kinds = np.array([("x", 1), ("y", 2)], [("label", "U1"), ("a/b", "i4")])
    ch = AxisArray.CoordinateAxis(data=kinds, dims=["bank/ch"])
    freq = AxisArray.LinearAxis(unit="Hz", gain=2.0)
    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(np.zeros((5, 2, 3)), ("time", "bank/ch", "..freq"), **{"bank/ch": ch, "..freq": freq}))
        sink.append(message(np.ones((5, 2, 3)), ("time", "bank/ch", "..freq"), **{"bank/ch": ch, "..freq": freq}))
        sink.commit()
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    assert {name for name, _ in group.arrays()} == {"data", "time", "bank_ch", "bank_ch_a_b", "_..freq"}
    assert not list(group.groups())
    assert list(group["bank_ch"][:]) == ["x", "y"]
    assert list(group["data"].attrs["_ARRAY_DIMENSIONS"]) == ["time", "bank_ch", "_..freq"]


def test_mlx_data_is_converted_and_the_callers_memory_is_not_kept(tmp_path):
    import mlx.core as mx

    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(mx.ones((2, 1), dtype=mx.bfloat16)))
        data = np.full((2, 1), 2, np.float32)
        sink.append(message(data))
        data[:] = 0
        sink.commit()
    group = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")
    np.testing.assert_array_equal(group["data"][:, 0], [1, 1, 2, 2])


@pytest.mark.parametrize(
    "other",
    [
        message(np.zeros((2, 4))),
        message(np.zeros((2, 3), np.float32)),
        message(np.zeros((2, 3)), ("time", "bin")),
    ],
    ids=["shape", "dtype", "dims"],
)
def test_results_that_do_not_fit_those_before_are_refused(tmp_path, other):
    with opened(tmp_path / "r.zarr") as sink:
        sink.append(message(np.zeros((2, 3))))
        with pytest.raises(ValueError, match="do not fit together"):
            sink.append(other)


def test_results_without_a_dimension_are_refused(tmp_path):
    with opened(tmp_path / "r.zarr") as sink, pytest.raises(ValueError, match="without a dimension"):
        sink.append(AxisArray(np.array(1.0), []))


def test_results_without_times_are_refused(tmp_path):
    with opened(tmp_path / "r.zarr") as sink, pytest.raises(ValueError, match="need an axis 'time'"):
        sink.append(replace(message(np.zeros((2, 3))), axes={}))


def test_no_results_at_all_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="no results"):
        process(tmp_path / "r.zarr", chain=lambda: lambda message: None)
    assert not (tmp_path / "r.zarr").exists()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
        pytest.param(10**400, ValueError, id="10**400"),
        ("1", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
    ids=str,
)
def test_chunk_size_is_checked(tmp_path, value, error):
    with pytest.raises(error, match=f"^'chunk_mb' must be a finite number > 0, got {value!r}"):
        ZarrSink(tmp_path / "r.zarr", chunk_mb=value)


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (np.nan, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_seconds_to_wait_are_checked(tmp_path, value, error):
    with pytest.raises(error, match=f"^'wait' must be a number >= 0, got {value!r}"):
        ZarrSink(tmp_path / "r.zarr", wait=value)
    for allowed in (0, np.inf):
        ZarrSink(tmp_path / "r.zarr", wait=allowed)


def test_a_path_is_required():
    with pytest.raises(TypeError, match="^'path' must be a path, got None"):
        ZarrSink(None)


@pytest.mark.parametrize(
    "compressor", [None, "default", numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE), numcodecs.LZMA()]
)
@pytest.mark.parametrize("dtype", ["float32", "complex64", "bool", ">i2"])
def test_values_are_those_that_were_given_whoever_writes_a_codec(tmp_path, compressor, dtype):
    """tensorstore has no LZMA, so zarr-python writes it."""
    values = (100 * np.random.default_rng(0).normal(size=(256, 32))).astype(dtype)
    with opened(tmp_path / "r.zarr", compressor=compressor, chunk_samples=100) as sink:
        sink.append(message(values[:70]))
        sink.append(message(values[70:]))
        sink.commit()
    data = zarr.open_group(str(tmp_path / "r.zarr"), mode="r")["data"]
    assert data.dtype == dtype
    np.testing.assert_array_equal(data[:], values)


def test_an_error_of_the_system_while_rows_are_written_is_an_oserror(tmp_path):
    with opened(tmp_path / "r.zarr", chunk_samples=10) as sink:
        sink.append(message(np.ones((10, 2))))
        (folder,) = sink.partial.glob("results-*")
        # A folder has the name of the next chunk.
        (folder / "data" / "1.0" / "x").mkdir(parents=True)
        with pytest.raises(OSError, match="directory") as raised:
            sink.append(message(np.ones((10, 2))))
    assert raised.value.errno == errno.EISDIR


def test_a_checksum_finds_what_is_missing_or_elsewhere():
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    lacking, moved = values.copy(), np.roll(values.reshape(5, 1000), 1, axis=0).reshape(-1)
    lacking[2048:3072] = 0.0
    found = {checksum(each) for each in (values, lacking, moved, values[:-1], values[:1024], values[:0])}
    assert len(found) == 6
    assert checksum(values[2048:], checksum(values[:2048])) == checksum(values[2048:], checksum(values[:2048].copy()))


def test_so_much_is_kept_in_memory_and_no_more(tmp_path):
    with opened(tmp_path / "r.zarr", chunk_mb=1000 * 8 / 2**20) as sink:
        for _ in range(50):
            sink.append(message(np.zeros((300, 1))))
            assert sink._results.waiting.rest[1].size < 1000
        sink.commit()
