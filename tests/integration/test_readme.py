"""The README's Python runs as it is printed."""

import re
from pathlib import Path

import pytest
from helpers.processes import run_code

pytest.importorskip("mlx.core")

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_blocks_run_one_after_the_other():
    # The graph is built but not started: what stands under the __main__ guard runs until it is interrupted.
    assert len(BLOCKS) == 5 and any("ez.run(" in block for block in BLOCKS)
    output = run_code("import sys\n__name__ = 'readme'\nfor block in sys.argv[1:]:\n    exec(block)", *BLOCKS)
    assert "CacheLimit(limit_mb=512.0, source='node'" in output
    assert "the working set of the steady message (300 samples)" in output
