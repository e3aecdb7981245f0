"""``ezmsg-mlx show``: what the page is made of, and the page."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers import nwb_files, recording_files
from helpers.command_chains import make_chain

pytest.importorskip("mlx.core")
pytest.importorskip("pynwb")
zarr = pytest.importorskip("zarr")
matplotlib = pytest.importorskip("matplotlib")

from ezmsg.mlx import NWBSource, RechunkSettings, ZarrSink, command, process_recording
from ezmsg.mlx.command import page
from ezmsg.mlx.command import page as overview
from ezmsg.mlx.command import page as rawtraces
from ezmsg.mlx.command.options import UsageError
from ezmsg.mlx.command.page import read_overview

LABELS = ["e2", "e0", "e3"]


def write(path, data, rate, pieces=((0, 0.0),), chunk_mb=4.0, **attrs):
    """Results whose rows from each of *pieces* on begin at a time."""
    sink = ZarrSink(path, chunk_mb=chunk_mb)
    sink.open("session.nwb /acquisition/Raw, 1 sample\nchain", "fingerprint")
    bounds = [*(row for row, _ in pieces), len(data)]
    for (row, start), end in zip(pieces, bounds[1:], strict=True):
        axes = {
            "time": AxisArray.TimeAxis(fs=rate, offset=start),
            "ch": AxisArray.CoordinateAxis(data=np.array(LABELS), dims=["ch"]),
        }
        dims = ["time", "ch", "band"][: data.ndim]
        sink.append(AxisArray(data[row:end], dims=dims, axes=axes, attrs=attrs, stream_dim="time"))
    sink.commit()
    sink.close()
    return path


@pytest.fixture(scope="module")
def features() -> np.ndarray:
    return np.random.default_rng(0).uniform(1.0, 2.0, (400, 3)).astype(np.float32) * np.array([1, 5, 1], np.float32)


@pytest.fixture(scope="module")
def results(tmp_path_factory, features):
    """Twenty rows a second, with gaps after 5 and after 16 seconds."""
    path = tmp_path_factory.mktemp("results") / "session.zarr"
    return write(path, features, 20.0, [(0, 3.0), (100, 8.5), (300, 20.0)], unit="uV")


def test_short_results_are_shown_row_by_row(results, features):
    found = read_overview(results)
    np.testing.assert_array_equal(found.middle, features)
    np.testing.assert_array_equal(found.low, found.high)
    np.testing.assert_allclose(found.times[[0, 99, 100, 400]], [3.0, 7.95, 8.5, 25.0])
    assert (found.labels, found.n_rows, found.unit, found.source) == (LABELS, 400, "uV", "session.nwb")
    assert found.step == pytest.approx(0.05)
    np.testing.assert_allclose(found.gaps, [(7.95, 8.5), (18.45, 20.0)])
    assert found.n_gaps == 2 and not found.is_signal and not found.is_partial


def test_a_part_is_that_between_two_times(results, features):
    found = read_overview(results, 8.0, 20.0)
    np.testing.assert_array_equal(found.middle, features[100:300])
    assert found.n_gaps == 0
    with pytest.raises(UsageError, match="has no rows to draw from 8.1 to 8.2 s"):
        read_overview(results, 8.1, 8.2)


def test_long_results_are_read_in_parts_of_columns(tmp_path, monkeypatch):
    """A signal of 30 kHz: root of the mean square and range of the first rows of each column."""
    monkeypatch.setattr(overview, "COLUMNS", 20)
    monkeypatch.setattr(overview, "BLOCK", 64)
    data = np.random.default_rng(1).normal(size=(10_000, 3)).astype(np.float32)
    found = read_overview(write(tmp_path / "signal.zarr", data, 30_000.0, chunk_mb=0.01))
    parts = np.stack([data[begin : begin + 64] for begin in range(0, 10_000, 500)])
    assert found.is_signal and found.is_partial
    np.testing.assert_allclose(found.middle, np.sqrt((parts.astype(float) ** 2).mean(axis=1)), rtol=1e-6)
    np.testing.assert_array_equal(found.low, parts.min(axis=1))
    np.testing.assert_array_equal(found.high, parts.max(axis=1))
    np.testing.assert_allclose(found.times, np.arange(21) * 500 / 30_000)


def test_only_one_chunk_is_held_at_a_time(tmp_path, monkeypatch):
    asked = []

    class Array:
        chunks = (1000, 1)
        shape = (100_000, 1)

        def __getitem__(self, rows):
            asked.append((rows.start, rows.stop))
            return np.arange(rows.start, min(rows.stop, 100_000))[:, None]

    edges = np.linspace(0, 100_000, 51).astype(int)
    blocks = dict(overview._blocks(Array(), edges, 256))
    assert max(end - begin for begin, end in asked) == 1000
    # Of every second chunk no column begins in it, so it is not read.
    assert len(asked) == 50
    assert [int(block[0, 0]) for block in blocks.values()] == edges[:-1].tolist()


def test_further_dimensions_are_averaged(tmp_path):
    data = np.random.default_rng(2).normal(size=(50, 3, 4)).astype(np.float32)
    found = read_overview(write(tmp_path / "bands.zarr", data, 10.0))
    np.testing.assert_allclose(found.middle, data.mean(axis=2), rtol=1e-5, atol=1e-6)
    assert found.others == ("band",)
    assert page._what_is_shown(found).endswith("50 rows, one every 100 ms, averaged over band")


@pytest.fixture
def drawn(monkeypatch):
    """The figure, before it is gone, in place of the file."""
    figures = []

    def keep(figure, found, channels, chosen, raw):
        drawing(figure, found, channels, chosen, raw)
        figures.append(figure)

    drawing = page._draw
    monkeypatch.setattr(page, "_draw", keep)
    return figures


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def legend_of(figure) -> list[str]:
    (legend,) = (axes.get_legend() for axes in figure.axes if axes.get_legend())
    return [text.get_text() for text in legend.texts]


def test_the_page_has_traces_a_map_and_marks(results, tmp_path, drawn, capsys):
    picture = tmp_path / "page.png"
    assert command.main(["show", str(results), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(picture)
    (figure,) = drawn
    traces = next(axes for axes in figure.axes if axes.get_title(loc="left").startswith("features"))
    assert [label.get_text() for label in traces.get_yticklabels()] == LABELS
    assert traces.get_title(loc="left") == "features of the channels that vary most"
    greys = [patch for patch in traces.patches if patch.get_facecolor()[:3] == (0.8, 0.8, 0.8)]
    assert len(greys) == 2
    texts = [
        text.get_text() for axes in figure.axes for legend in [axes.get_legend()] if legend for text in legend.texts
    ]
    assert texts == ["2 gaps", "0 seams"]
    # Each trace is drawn around its own line: the middle of what is shown of a channel.
    lines = [line.get_ydata() for line in traces.lines if len(line.get_ydata()) > 2]
    ticks = traces.get_yticks().repeat(3)
    np.testing.assert_allclose([line.mean() for line in lines], ticks, rtol=0, atol=0.2 * (ticks[0] - ticks[-1]) / 2)
    # The map is empty in the gaps.
    (mesh,) = next(axes for axes in figure.axes if axes.get_title(loc="left") == "all channels").collections
    assert mesh.get_array().shape == (3, 402) and mesh.get_array().mask.sum() == 6


def test_seams_are_where_pieces_meet(tmp_path, drawn, capsys):
    nwb_files.write(tmp_path / "session.nwb", {})
    path = tmp_path / "session.zarr"
    with ThreadPoolExecutor(1) as executor:
        process_recording(
            NWBSource(tmp_path / "session.nwb"),
            make_chain,
            ZarrSink(path),
            rechunk=RechunkSettings(sizes=(100,)),
            checkpoint_seconds=0.2,
            workers=executor,
            margin=0.0,
        )
    # Of half a second from 5 s on.
    np.testing.assert_allclose(read_overview(path).seams, [5.208, 5.416])
    np.testing.assert_allclose(read_overview(path, 5.3, 6.0).seams, [5.416])
    assert command.main(["show", str(path), "--output", str(tmp_path / "page.png")]) == 0
    colours = [
        {line.get_color() for line in axes.lines if line.get_linestyle() == "--" and len(set(line.get_xdata())) == 1}
        for axes in drawn[0].axes
        if axes.get_title(loc="left") in ("all channels", "signal of the channels that vary most")
    ]
    # That can be seen on the map as well.
    assert {"white"} in colours and {page.SEAM} in colours
    assert "2 seams" in [
        text.get_text() for axes in drawn[0].axes if (legend := axes.get_legend()) for text in legend.texts
    ]


def test_channels_and_times_are_those_asked_for(results, tmp_path, drawn, capsys):
    options = ["--channels", "e3,e2", "--start", "9", "--stop", "11", "--output", str(tmp_path / "page.svg")]
    assert command.main(["show", str(results), *options]) == 0
    traces = next(axes for axes in drawn[0].axes if axes.get_title(loc="left").startswith("features"))
    assert [label.get_text() for label in traces.get_yticklabels()] == ["e3", "e2"]
    np.testing.assert_allclose(traces.get_xlim(), (9.0, 11.0))


def test_the_recording_is_drawn_above_in_microvolts(tmp_path, drawn, monkeypatch, capsys):
    nwb_files.write(tmp_path / "session.nwb", {})
    path = write(tmp_path / "session.zarr", np.ones((10, 3), np.float32), 20.0, [(0, 5.0)])
    assert command.main(["show", str(path), "--output", str(tmp_path / "page.png")]) == 0
    assert "as recorded: session.nwb" in titles(drawn[0])
    times = np.array([5.1, 5.3])
    found = rawtraces.read_traces(tmp_path / "session.nwb", {}, ["e0", "none"], times)
    rows = slice(200, 600)
    assert (found.labels, found.unit) == (["e0"], "µV")
    assert (found.low.min(), found.high.max()) == pytest.approx(
        (nwb_files.DATA[rows, 1].min() * 0.25, nwb_files.DATA[rows, 1].max() * 0.25)
    )
    assert 5.1 <= found.times[0] and found.times[-1] <= 5.301
    # From the first sample on, where the results begin before it.
    first = rawtraces.read_traces(tmp_path / "session.nwb", {}, ["e0"], np.array([4.0, 5.1]))
    assert first.low[0, 0] <= nwb_files.DATA[0, 1] * 0.25 <= first.high[0, 0]
    assert first.times[0] == pytest.approx(5.0, abs=1.1 / nwb_files.RATE)
    # In places only, if it is long.
    monkeypatch.setattr(rawtraces, "WHOLE_MB", 0.0)
    monkeypatch.setattr(rawtraces, "PLACES", 7)
    places = rawtraces.read_traces(tmp_path / "session.nwb", {}, ["e0"], times)
    assert len(places.times) == 7
    assert rawtraces.read_traces(tmp_path / "session.nwb", {}, ["none"], times) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["{tmp}/none.zarr"], "argument RESULTS: "),
        (["{tmp}"], "argument RESULTS: "),
        (["{results}", "--channels", "e9"], "argument --channels: must be labels (e2, e0, e3) or "),
        (["{results}", "--raw", "{tmp}/none.nwb"], "argument --raw: "),
        (["{results}", "--output", "page.txt"], "argument --output: must be a name in .png,"),
        (["{results}", "--output", "{tmp}/no/page.png"], "argument --output: there is no folder"),
        (["{results}", "--start", "nan"], "argument --start: must be a finite number, got nan"),
        (["{results}", "--start", "100"], "argument RESULTS: "),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, said, results, tmp_path, capsys):
    arguments = [option.format(tmp=tmp_path, results=results) for option in options]
    if "--output" not in arguments:
        arguments += ["--output", str(tmp_path / "page.png")]
    try:
        status = command.main(["show", *arguments])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert capsys.readouterr().err.startswith(f"ezmsg-mlx show: error: {said}")


@pytest.mark.parametrize(
    "data",
    [
        np.full((50, 3), np.nan, np.float32),
        np.where(np.arange(150).reshape(50, 3) % 3, np.inf, 1.0).astype(np.float32),
        np.ones((1, 3), np.float32),
        np.zeros((50, 3), np.float32),
        np.where(np.arange(150).reshape(50, 3) < 60, np.nan, 1.0).astype(np.float32),
    ],
    ids=["nothing finite", "a finite channel", "one row", "constant", "nothing finite for a while"],
)
@pytest.mark.parametrize("rate", [20.0, 30_000.0])
def test_results_of_any_kind_are_drawn(data, rate, tmp_path, capsys):
    path = write(tmp_path / "odd.zarr", data, rate)
    assert command.main(["show", str(path)]) == 0
    assert (tmp_path / "odd.zarr.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


def test_results_without_channels_are_refused_in_one_line(tmp_path, capsys):
    path = write(tmp_path / "none.zarr", np.ones((5, 3), np.float32), 20.0)
    zarr.open_group(str(path), mode="a")["data"].resize((5, 0))
    zarr.consolidate_metadata(str(path))
    assert command.main(["show", str(path)]) == 2
    assert capsys.readouterr().err.endswith("none.zarr' has no channels to draw.\n")


def test_a_recording_that_cannot_be_read_is_left_out_unless_it_is_named(tmp_path, drawn, capsys):
    """As after the guide's own run over a file without a header."""
    nwb_files.DATA.tofile(tmp_path / "noise.bin")
    how = ["--format", "rawbinary", "--source", "sampling_rate=2000", "--source", "n_channels=3"]
    chain = ["--chain", "helpers.command_chains:make_chain", "--channels", "ch2,0"]
    out = tmp_path / "out"
    assert command.main(["process", str(tmp_path / "noise.bin"), *how, *chain, "--output", str(out)]) == 0
    results = str(out / "noise.zarr")
    np.testing.assert_array_equal(zarr.open_group(results, mode="r")["data"][:], nwb_files.DATA[:, [2, 0]])
    capsys.readouterr()
    assert command.main(["show", results]) == 0
    assert capsys.readouterr().err.startswith("ezmsg-mlx show: drawn without the recording: ")
    assert command.main(["show", results, "--raw", str(tmp_path / "noise.bin")]) == 2
    assert command.main(["show", results, *how, "--channels", "1"]) == 0
    assert [any("as recorded" in title for title in titles(figure)) for figure in drawn] == [False, True]


def test_channels_are_chosen_by_kind_where_there_are_several(tmp_path, drawn):
    path = recording_files.write_blackrock_as(
        tmp_path / "mixed.ns2", recording_files.DATA, [(b"e1", b"uV", 8191), (b"a1", b"mV", 4999), (b"e2", b"uV", 8191)]
    )
    options = ["--chain", "helpers.command_chains:make_chain", "--channels", "electrode,analog"]
    assert command.main(["process", str(path), *options, "--output", str(tmp_path)]) == 0
    assert command.main(["show", str(tmp_path / "mixed.zarr"), "--channels", "analog,e2"]) == 0
    traces = next(axes for axes in drawn[0].axes if axes.get_title(loc="left").startswith("signal"))
    assert [label.get_text() for label in traces.get_yticklabels()] == ["a1", "e2"]


def test_without_matplotlib_the_error_says_what_to_install(results, tmp_path, monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main(["show", str(results), "--output", str(tmp_path / "page.png")]) == 2
    assert 'pip install "ezmsg-mlx[examples]"' in capsys.readouterr().err
