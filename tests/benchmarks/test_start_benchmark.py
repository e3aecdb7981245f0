"""What importing costs, and the first message: `pytest tests/benchmarks/test_start_benchmark.py -s`."""

import statistics
import subprocess
import sys

BASE = "import ezmsg.sigproc.asarray, ezmsg.sigproc.ewma, ezmsg.sigproc.detrend, ezmsg.sigproc.math.pow"
ALL = "from ezmsg.mlx import *"


def seconds(before: str, timed: str) -> float:
    code = f"import time\n{before}\nbegin = time.process_time()\n{timed}\nprint(time.process_time() - begin)"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def test_import_takes_less_than_50_ms_more_than_what_it_extends():
    extra = statistics.median(seconds(BASE, ALL) for _ in range(5))
    bare = statistics.median(seconds(BASE, "import ezmsg.mlx") for _ in range(5))
    print(f"\nafter the ezmsg-sigproc modules: import ezmsg.mlx {bare * 1e3:.1f} ms, all names {extra * 1e3:.0f} ms")
    assert bare < 0.050


def test_first_message_is_told():
    prepare = (
        "import numpy as np\nfrom ezmsg.mlx import AsArrayTransformer, EWMATransformer\n"
        "from ezmsg.util.messages.axisarray import AxisArray\n"
        "m = AxisArray(np.ones((300, 256), np.float32), ['time', 'ch'], axes={'time': AxisArray.TimeAxis(fs=3e4)})\n"
        "convert, average = AsArrayTransformer(backend='mlx'), EWMATransformer(time_constant=1.0)"
    )
    first, second = seconds(prepare, "x = convert(m)"), seconds(prepare + "\nx = convert(m)", "average(x)")
    print(f"\nfirst message: AsArray {first * 1e3:.0f} ms (loads MLX), EWMA {second * 1e3:.0f} ms (loads numba)")
