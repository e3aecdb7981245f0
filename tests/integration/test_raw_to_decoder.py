"""The examples from raw samples to a decoded cursor, run as a user runs them."""

import re

import pytest
from helpers.scripts import Script

pytest.importorskip("mlx.core")

OPTIONS = ("--train", "8", "--seconds", "2", "--channels", "40", "--seed", "2")


@pytest.mark.parametrize("name", ["raw_to_decoder.py", "raw_to_decoder_graph.py"])
def test_the_cursor_is_decoded_and_drawn(name, tmp_path):
    figures = pytest.importorskip("matplotlib.pyplot")
    script = Script(name, *OPTIONS, "--plot", f"{tmp_path}/cursor.png")
    try:
        code, out, errors = script.finish()
    finally:
        script.kill()
    assert code == 0, errors
    correlations = [float(found) for found in re.findall(r"^cursor [xy]: correlation (\S+)$", out, re.MULTILINE)]
    assert len(correlations) == 2 and min(correlations) > 0.25
    assert re.search(r"^time .*: median \d+\.\d\d ms", out, re.MULTILINE)
    if name == "raw_to_decoder.py":
        assert out.count("fused with stages 1 to 7") == 7
    picture = figures.imread(tmp_path / "cursor.png")
    assert picture.std() > 0.1


def test_options_that_do_not_fit_are_refused():
    code, _, errors = Script("raw_to_decoder.py", "--train", "1").finish()
    assert code == 2 and "--train above 3" in errors
