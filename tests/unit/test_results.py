"""Tables of figures come from files that say where the figures come from."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "results" / "data"

_spec = importlib.util.spec_from_file_location("render", ROOT / "docs" / "results" / "render.py")
render = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(render)

NAMES = sorted(file.stem for file in DATA.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_file_is_complete_and_makes_a_table(name: str):
    text = render.markdown(name)
    found = render.load(name)
    assert text.count("\n| ") >= len(found["rows"]) + 1
    assert found["command"] in text and found["date"] in text


def test_each_file_is_on_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"^```\{results\} (\w+)$", pages, re.MULTILINE))
    assert shown == set(NAMES)


def test_readme_has_the_figures_of_the_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- results: " in text
    assert render.replaced(text) == text
    # One that begins a line ends the paragraph in Markdown.
    assert not re.search("^<!-- value", text, re.MULTILINE)


@pytest.mark.parametrize(("field", "value"), [("form", "a guess"), ("date", "today"), ("machine", None)])
def test_incomplete_file_is_refused(field: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = render.load(NAMES[0])
    found[field] = value
    if value is None:
        del found[field]
    (tmp_path / "x.json").write_text(render.json.dumps(found))
    monkeypatch.setattr(render, "DATA", tmp_path)
    with pytest.raises(ValueError, match=field):
        render.load("x")


def test_speed_is_computed_from_time():
    row = {"us": [500, 1000], "samples": 300, "channels": 256, "rate": 30000}
    columns = [
        {"head": "a", "derive": "times_real_time", "digits": 1},
        {"head": "b", "derive": "channels_times_real_time", "digits": 0},
    ]
    assert (
        render.table({"columns": columns, "rows": [row]}).splitlines()[-1]
        == "| 10.0\u00a0to\u00a020.0 | 2560\u00a0to\u00a05120 |"
    )


def test_value_in_a_sentence_is_that_of_the_file():
    text = "It takes <!-- value: chain_cpu 0 ratio -->9<!-- end --> times."
    low, high = render.load("chain_cpu")["rows"][0]["ratio"]
    assert render.replaced(text) == text.replace(">9<", f">{low}\u00a0to\u00a0{high}<")
