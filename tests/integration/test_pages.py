"""The Python of README and documentation runs as it is printed, each block by itself, and shows something."""

import json
import os
import re
from pathlib import Path

import pytest
from helpers import warm

pytest.importorskip("mlx.core")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _blocks() -> dict[str, str]:
    blocks = {}
    for page in PAGES:
        for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            line = page.read_text(encoding="utf-8")[: match.start()].count("\n") + 1
            blocks[f"{page.relative_to(ROOT)}:{line}"] = match[1]
    return blocks


BLOCKS = _blocks()
GRAPHS = {name: block for name, block in BLOCKS.items() if "ez.run(" in block}
OF_GRAPHS = {"README.md": "msg=AxisArray(data=array([[", "docs/guides/graphs.md": "(300, 64)"}
"""What each of a hundred messages prints, by the page of the graph."""

RUN_ALL = """
import contextlib, io, json, os, sys, traceback

# Some of them write files.
os.chdir(os.path.dirname(sys.argv[1]))
shown = {}
for name, block in json.load(open(sys.argv[1])).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(block, name, "exec"), {"__name__": "a_page"})
        except Exception:
            shown[name] = ["raised", traceback.format_exc()]
            continue
    shown[name] = ["printed", out.getvalue()]
print("SHOWN " + json.dumps(shown))
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What became of each block that starts no graph, each with names of its own, in one process."""
    file = tmp_path_factory.mktemp("pages") / "blocks.json"
    file.write_text(json.dumps({name: block for name, block in BLOCKS.items() if name not in GRAPHS}))
    run = warm.run(["-c", RUN_ALL, str(file)])
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.rpartition("SHOWN ")[2])


def test_there_are_blocks():
    assert len(BLOCKS) >= 8 and {name.partition(":")[0] for name in GRAPHS} == set(OF_GRAPHS)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in GRAPHS])
def test_block_prints_something(name: str, shown: dict[str, tuple[str, str]]):
    outcome, text = shown[name]
    assert outcome == "printed", text
    assert text.strip()


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_prints_and_ends(name: str, tmp_path: Path):
    script = tmp_path / "graph.py"
    script.write_text(BLOCKS[name])
    # One of them shows its messages in the log, whatever level other tests, or who runs them, have chosen.
    run = warm.run([str(script)], environment=os.environ | {"EZMSG_LOGLEVEL": "INFO"})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(OF_GRAPHS[name.partition(":")[0]]) >= 100, run.stdout + run.stderr


def test_readme_fits():
    assert len((ROOT / "README.md").read_bytes()) <= 7168


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) >= 8
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_unit_is_in_the_table_of_units_and_transformers():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    units = set(re.findall(r'^"mlx\.(\w+)" = ', project, re.MULTILINE))
    page = (ROOT / "docs" / "guides" / "from_sigproc.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| `\w+` \|", page, re.MULTILINE)) == units
