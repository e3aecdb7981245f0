"""The kernel of crossings on a GPU finds what the one for the CPU finds."""

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from ezmsg.util.messages.axisarray import AxisArray
from helpers.crossing_cases import check_all, signal

from ezmsg.mlx import BinnedEventAggregator, ThresholdCrossingTransformer
from ezmsg.mlx.kernels import default_path, kernel, proof


def test_every_kind_of_crossings():
    path = default_path()
    assert proof.trouble_of("crossings", kernel("crossings", path), path) is None
    check_all(path)


@pytest.mark.parametrize("output_format", ["dense", "sparse"])
def test_events_are_counted_where_they_are(output_format):
    x, counts = signal(3000, 40), []
    for to_backend in (np.array, mx.array):
        find = ThresholdCrossingTransformer(threshold=-0.5, output_format=output_format)
        count = BinnedEventAggregator(bin_duration=0.0023, scale_output=False)
        results = []
        for start in range(0, len(x), 70):
            axes = {"time": AxisArray.TimeAxis(fs=30000.0, offset=start / 30000.0)}
            results.append(
                np.array(count(find(AxisArray(to_backend(x[start : start + 70]), ["time", "ch"], axes=axes))).data)
            )
        counts.append(np.concatenate(results))
    np.testing.assert_array_equal(*counts)
