"""The example scripts that compare what can be done about memory, each in a tiny form."""

import json
import math
import pathlib

from support.cache_limits_report import Comparison, Course, Run, print_report, search_of

import pytest
from compare_cache_limits import limits
from helpers.examples import run_example
from rich.console import Console

CONFIGURATIONS = ("none", "clear60", "rechunk", "recommended")
N_CHANNELS = 16
COURSES = {"first", "last", "most"}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    """What compare_cache_limits.py prints, and the folder where it ran."""
    folder = tmp_path_factory.mktemp("comparison")
    options = [
        "--minutes",
        "0.02",
        "--stall-every",
        "10",
        "--channels",
        str(N_CHANNELS),
        "--json",
        "numbers.json",
        "--plot",
        "limits.png",
    ]
    return run_example("compare_cache_limits.py", *options, "--configurations", *CONFIGURATIONS, folder=folder), folder


@pytest.fixture(scope="module")
def numbers(comparison: tuple[str, pathlib.Path]) -> dict:
    _, folder = comparison
    return json.loads((folder / "numbers.json").read_text(), parse_constant=pytest.fail)


def _rows(output: str, first_columns: list[str]) -> dict[str, str]:
    """The rest of the one line that begins with each of the texts, in their order."""
    found = {text: [line for line in output.splitlines() if line.startswith(text + "  ")] for text in first_columns}
    assert {text: len(matches) for text, matches in found.items()} == dict.fromkeys(first_columns, 1)
    return {text: matches[0].removeprefix(text) for text, matches in found.items()}


def test_comparison_has_a_row_for_each_configuration_and_its_numbers(comparison, numbers):
    output, _ = comparison
    rows = _rows(output, ["no limit", "Rechunk", "recommended"])
    for row, runs in zip(rows.values(), numbers["runs"].values(), strict=True):
        (run,) = runs
        assert row.split()[0] == str(run["n_lengths"])
        assert f"{run['cache']['last']:.0f} / {run['cache']['most']:.0f}" in row
        assert f"{run['steady_ms_median']:.3g} / {run['steady_ms_p99']:.3g}" in row
    assert "…" not in output


def test_comparison_leaves_out_what_the_stream_is_too_short_for_and_says_so(comparison, numbers):
    output, _ = comparison
    assert "clear every 60 s: left out" in output
    assert "clear60" not in numbers["runs"]


def test_comparison_prints_the_ratios_of_its_numbers(comparison, numbers):
    output, _ = comparison
    (none,), (rechunk,), (recommended,) = numbers["runs"].values()
    share = 100 * rechunk["cache"]["last"] / none["cache"]["last"]
    assert f"Rechunk: {share:.1f} % of the cache without a limit" in output
    assert f"Rechunk: {rechunk['speed'] / none['speed']:.2f} of the speed without a limit" in output
    assert f"Recommended limit: {recommended['speed'] / none['speed']:.2f} of the speed without a limit" in output


def test_comparison_shows_that_rechunk_leaves_few_lengths_and_a_small_cache(numbers):
    (none,), (rechunk,), _ = numbers["runs"].values()
    # All stalls of the stream have different lengths; Rechunk has three sizes.
    assert none["n_lengths"] > 3
    assert rechunk["n_lengths"] == 3
    assert rechunk["cache"]["most"] < none["cache"]["most"]


def test_comparison_measures_the_recommended_limit(comparison, numbers):
    output, _ = comparison
    limit = numbers["limits_mb"]["recommended"]
    assert f"Recommended: {limit:.0f} MiB for these messages" in output
    assert limit >= numbers["runs"]["none"][0]["cache"]["most"]


def test_comparison_saves_every_number_of_every_run(numbers):
    assert numbers["stream"]["n_channels"] == N_CHANNELS
    assert list(numbers["runs"]) == list(numbers["names"]) == list(numbers["limits_mb"])
    for runs in numbers["runs"].values():
        (run,) = runs
        for course in ("cache", "footprint", "resident_set", "device_memory"):
            assert set(run[course]) == COURSES
        # Linux and macOS tell both.
        assert run["footprint"]["last"] > 0 and run["resident_set"]["last"] > 0
        assert run["live_most"] > 0 and run["speed"] > 0
        assert 0 < run["steady_ms_median"] <= run["steady_ms_p99"]
        seconds, caches = zip(*run["curve"], strict=True)
        assert list(seconds) == sorted(seconds)
        assert math.isclose(seconds[-1], numbers["stream"]["duration"])
        assert max(caches) == run["cache"]["most"]


def test_comparison_draws_a_png_picture(comparison):
    _, folder = comparison
    picture = (folder / "limits.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    # Complete, too: the last chunk of a PNG is empty and called IEND.
    assert picture[-8:-4] == b"IEND"


def test_transformer_shapes_in_a_tiny_form(tmp_path):
    output = run_example("transformer_shapes.py", "--quick", "--shapes", "4", "--json", "numbers.json", folder=tmp_path)
    rows = _rows(output, ["no limit", "64 MiB", "16 MiB", "0 (no cache)", "clear every 10"])
    assert "Scaled down" in output
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert (numbers["scale"]["n_distinct"], numbers["scale"]["n_repeated"], numbers["scale"]["n_shapes"]) == (4, 10, 1)
    assert list(numbers["runs"]) == list(rows)
    for row, runs in zip(rows.values(), numbers["runs"].values(), strict=True):
        assert list(runs) == ["distinct", "repeated"]
        assert all(f"{run['largest_cache_mb']:.0f} MiB" in row for run in runs.values())
        assert all(f"{run['seconds']:.1f} s" in row for run in runs.values())
    unlimited = numbers["runs"]["no limit"]
    assert unlimited["distinct"]["largest_cache_mb"] > unlimited["repeated"]["largest_cache_mb"] > 0
    assert numbers["runs"]["0 (no cache)"]["distinct"]["largest_cache_mb"] == 0


def test_a_text_is_the_same_in_all_ways_and_the_ring_needs_no_cache(tmp_path):
    options = ("--quick", "--decode", "--tokens", "32", "--json", "texts.json", "--plot", "texts.png")
    output = run_example("transformer_shapes.py", *options, folder=tmp_path)
    rows = _rows(output, ["grows, as published", "grows, 16 MiB", "four lengths", "ring"])
    texts = json.loads((tmp_path / "texts.json").read_text())["texts"]
    assert list(texts) == list(rows) and all(row.endswith("yes") for row in rows.values())
    assert all(len(text["tokens"]) == 32 for text in texts.values())
    ring = texts["ring"]["cache_mb"]
    assert max(ring) < 0.1 < texts["grows, as published"]["cache_mb"][-1]
    assert (tmp_path / "texts.png").read_bytes().startswith(b"\x89PNG")


def searched(**found: list[tuple[float, float]]) -> Comparison:
    """A comparison of limits, of each the speed and the largest cache in MiB, round by round."""
    nothing = Course(None, None, None)
    runs = {
        name.removeprefix("_"): [
            Run("gpu", False, 1, speed, 1.0, 1.0, 1.0, Course(0.0, 0.0, cache), nothing, nothing, nothing, [])
            for speed, cache in rounds
        ]
        for name, rounds in found.items()
    }
    configurations = limits(",".join(runs))
    names = {key: configuration.name for key, configuration in configurations.items()}
    return Comparison(
        names, {key: configuration.limit_mb for key, configuration in configurations.items()}, runs, [], []
    )


@pytest.mark.parametrize(
    ("auto", "smallest", "memory", "is_good"),
    [
        ((10.0, 20.0), "16", 1.25, True),
        ((10.0, 24.0), "16", 1.5, False),
        ((9.7, 12.0), "16", 0.75, False),
    ],
)
def test_auto_is_held_to_the_smallest_limit_that_is_as_fast_as_the_fastest(auto, smallest, memory, is_good, capsys):
    comparison = searched(
        auto=[auto, auto, auto],
        none=[(9.0, 3000.0), (9.9, 3000.0), (9.9, 3000.0)],
        _64=[(10.0, 64.0), (10.0, 64.0), (10.0, 64.0)],
        # One round was slow.
        _16=[(9.85, 16.0), (5.0, 15.0), (9.85, 16.0)],
        _4=[(8.0, 4.0), (8.0, 4.0), (10.0, 4.0)],
    )
    search = search_of(comparison)
    assert (search.fastest, search.smallest, search.memory, search.is_good) == ("64", smallest, memory, is_good)
    assert search.speeds["16"] == (0.985, 0.5, 0.985)
    print_report(comparison, Console(width=200))
    said = capsys.readouterr().out
    assert f"is {memory:.2f} times that of the smallest fixed limit" in said and "16 MiB with 16.0 MiB" in said
    assert said.rstrip().endswith("Both are met." if is_good else "NOT MET.")


def test_without_auto_or_fixed_limits_nothing_was_searched():
    assert search_of(searched(none=[(1.0, 1.0)], _64=[(1.0, 1.0)])) is None
    assert search_of(searched(auto=[(1.0, 1.0)])) is None
    assert search_of(searched(auto=[], _64=[(1.0, 1.0)])) is None
