"""The check of the workflows that no test was skipped which should have run."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "skipped.py"

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_kernels" name="test_run"/>
<testcase classname="tests.unit.test_kernels" name="test_more"><skipped message="needs {}"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("reason", "fails"), [("MLX with Metal", True), ("a CUDA device", False)])
def test_skip_for_the_given_reason_fails(reason: str, fails: bool, tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(reason))
    run = subprocess.run([sys.executable, SCRIPT, report, "metal"], capture_output=True, text=True, check=False)
    assert run.returncode == fails
    assert ("needs MLX with Metal" in run.stdout) == fails
