"""Rechunk in front of a process boundary keeps ezmsg's shared memory small: in rechunk_before_boundary.py."""

import json

import pytest
from helpers.examples import run_example

N_CHANNELS = 32
"""Few, so that the test is fast. An ordinary message, 37.5 KiB, fits into the ring that a publisher begins with."""


@pytest.fixture(scope="module")
def boundary(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict[str, float]]]:
    """What the script prints, and its numbers for both graphs."""
    folder = tmp_path_factory.mktemp("boundary")
    output = run_example(
        "rechunk_before_boundary.py", "--channels", str(N_CHANNELS), "--json", "numbers.json", folder=folder
    )
    return output, json.loads((folder / "numbers.json").read_text())


def test_a_stall_blows_up_the_ring_of_shared_memory(boundary):
    _, numbers = boundary
    as_it_comes = numbers["as it comes"]
    assert as_it_comes["longest_message"] == 15000
    assert as_it_comes["last_segment"] > 20 * as_it_comes["first_segment"] > 0


def test_rechunk_keeps_the_ring_as_it_was(boundary):
    _, numbers = boundary
    rechunked = numbers["Rechunk"]
    assert rechunked["longest_message"] == 300
    assert rechunked["last_segment"] == rechunked["first_segment"] == numbers["as it comes"]["first_segment"]


def test_no_sample_is_lost(boundary):
    _, numbers = boundary
    assert [result["n_samples"] for result in numbers.values()] == [45000, 45000]


def test_the_script_prints_a_row_for_each_graph(boundary):
    output, numbers = boundary
    for name, result in numbers.items():
        (row,) = (line for line in output.splitlines() if name in line)
        assert f"{result['last_segment']:.0f} MiB" in row
        assert f"{result['longest_gap']:.2f} s" in row
