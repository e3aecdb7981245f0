"""Write results, and compare what several readers make of them: zarr-python (the installed version), xarray, zarrita.

    python tests/readers/compare.py [FOLDER WITH node_modules] [PYTHON WITH ANOTHER zarr-python]

The folder has ``zarrita`` and ``@zarrita/storage`` from npm. By hand: neither comes with the package.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numcodecs
import numpy as np
import xarray
import zarr
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import ZarrSink

ATTRS = {
    "unit": "uV",
    "scale_factor": 0.195,
    "_FillValue": 0,
    "impedance": float("nan"),
    "nested": {"gain": np.float32(0.5), "map": np.arange(3)},
}
CASES = {
    "default": {},
    "none": {"compressor": None},
    "lz4": {"compressor": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE), "chunk_channels": 2},
    "int16": {"dtype": "int16"},
}

BY_ZARR = """
import json, sys, numpy, zarr
group = zarr.open_group(sys.argv[1], mode="r")
def about(array):
    values = array[:]
    total = "|".join(map(str, values)) if values.dtype.kind in "UO" else float(values.sum(dtype=float))
    return {"shape": list(array.shape), "attrs": dict(array.attrs), "sum": total}
print(json.dumps({"attrs": dict(group.attrs), "arrays": {name: about(array) for name, array in group.arrays()}}))
"""


def write(path: Path, **options: object) -> None:
    """Results of three messages."""
    sink = ZarrSink(path, chunk_samples=100, **options)  # type: ignore[arg-type]
    sink.open("recipe", "fingerprint")
    channels = AxisArray.CoordinateAxis(data=np.array(["a", "b", "c/d"]), dims=["bank/ch"])
    data = np.random.default_rng(0).normal(0.0, 50.0, (250, 3)).astype(np.float32)
    for begin in range(0, 250, 100):
        axes = {"time": AxisArray.TimeAxis(fs=100.0, offset=begin / 100.0), "bank/ch": channels}
        sink.append(AxisArray(data[begin : begin + 100], ["time", "bank/ch"], axes=axes, attrs=ATTRS))
    sink.commit()
    sink.close()


def read(*command: str | Path) -> dict[str, dict]:
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def assert_same(one: dict, other: dict) -> None:
    """Sums of floats may be taken in another order."""
    assert one["attrs"] == other["attrs"] and one["arrays"].keys() == other["arrays"].keys()
    for name, array in one["arrays"].items():
        twin = other["arrays"][name]
        assert array["shape"] == twin["shape"] and array["attrs"] == twin["attrs"], name
        is_text = isinstance(array["sum"], str)
        assert array["sum"] == twin["sum"] if is_text else np.isclose(array["sum"], twin["sum"]), name


def main(modules: str | None = None, *pythons: str) -> None:
    script = Path(__file__).with_name("read_results.mjs")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CASES.items():
            path = Path(folder, f"{name}.zarr")
            write(path, **options)
            expected = read(sys.executable, "-c", BY_ZARR, path)
            for python in pythons:
                assert_same(read(python, "-c", BY_ZARR, path), expected)
            if modules:
                copy = Path(modules, script.name)
                copy.write_text(script.read_text())
                assert_same(read("node", copy, path), expected)
            with xarray.open_zarr(path) as shown:
                total = float(shown["data"].values.sum(dtype=float))
            assert np.isclose(total, expected["arrays"]["data"]["sum"])
            print(f"{name}: the same to {2 + len(pythons) + bool(modules)} readers (zarr-python {zarr.__version__})")


if __name__ == "__main__":
    main(*sys.argv[1:])
