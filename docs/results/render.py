"""Make the tables of figures on the pages from the files in ``docs/results/data``.

Each file is one measurement: a JSON object with

``title``
    What was measured, in a few words.
``machine``, ``versions``, ``date``, ``command``
    Where, with which packages, on which day and by which command.
``form``
    ``"function"`` (one call), ``"bare chain"``, ``"graph"`` or ``"script"`` (a whole program).
``state``
    ``"settled"``, ``"from the start"``, or ``"not applicable"``.
``input``
    ``"host"``, ``"device"`` or ``"not applicable"``: where the data lies when the clock starts.
``spread``
    What a range in the table is a range of.
``columns``
    Objects with ``head`` and either ``key``, the name of a value in each row, or ``derive``, the name of a function
    below that computes it from ``us`` (microseconds a message), ``samples``, ``channels`` and ``rate`` (Hz).
    ``digits``: how many to show after the point.
``rows``
    Objects with the values. A value is a number, text, a pair of numbers (a range), a list of those, or null (not
    measured).
``notes``
    Sentences below the table. May be left out.

On a page, the directive ``results`` shows one file::

    ```{results} chain_h200
    ```

In README.md, which is not built by Sphinx, ``python docs/results/render.py README.md`` replaces what stands between
``<!-- results: NAME -->`` and ``<!-- end -->``. ``NAME 0 1 9`` takes only those rows, counted from 0, and the
columns in which they differ. In a sentence,
``<!-- value: NAME 0 KEY -->`` and ``<!-- end -->`` enclose one value of a row.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DATA = Path(__file__).parent / "data"

NO_SCRIPT = "no script in the repository"
"""How a ``command`` begins where there is none; what was done follows after a colon."""

REQUIRED = ("title", "machine", "versions", "date", "command", "form", "state", "input", "spread", "columns", "rows")
FORMS = ("function", "bare chain", "graph", "script")
STATES = ("settled", "from the start", "not applicable")
INPUTS = ("host", "device", "not applicable")

Number = int | float
Value = Number | str | list | None


def load(name: str) -> dict:
    """Read and check one file of results.

    Raises:
        ValueError: The file lacks a field, or a field has a value that is not allowed.
    """
    found = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    missing = [field for field in REQUIRED if field not in found]
    if missing:
        raise ValueError(f"{name}.json lacks {', '.join(missing)}.")
    for field, allowed in (("form", FORMS), ("state", STATES), ("input", INPUTS)):
        if found[field] not in allowed:
            raise ValueError(f"{field} of {name}.json is {found[field]!r}; allowed are {', '.join(allowed)}.")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["date"]):
        raise ValueError(f"date of {name}.json is {found['date']!r}; allowed is YYYY-MM-DD.")
    for column in found["columns"]:
        if ("key" in column) == ("derive" in column):
            raise ValueError(f"Column {column['head']!r} of {name}.json needs either key or derive.")
        if column.get("derive", "times_real_time") not in DERIVED:
            raise ValueError(f"derive is {column['derive']!r}; allowed are {', '.join(DERIVED)}.")
    return found


def _times_real_time(row: dict, us: Number) -> float:
    return row["samples"] / row["rate"] * 1e6 / us


def _channels_times_real_time(row: dict, us: Number) -> float:
    # Three digits: more than any of these times has.
    return float(f"{row['channels'] * _times_real_time(row, us):.2e}")


DERIVED: dict[str, Callable[[dict, Number], float]] = {
    "times_real_time": _times_real_time,
    "channels_times_real_time": _channels_times_real_time,
}


def _derived(row: dict, function: Callable[[dict, Number], float], us: Value) -> Value:
    if us is None:
        return None
    if isinstance(us, list):
        values = [_derived(row, function, value) for value in us]
        return values if any(isinstance(value, list) for value in values) else sorted(values)
    return function(row, us)


def _text(value: Value, digits: int | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value.replace(" × ", "\u00a0×\u00a0")
    if isinstance(value, list):
        if len(value) == 2 and not any(isinstance(part, (list, str)) for part in value):
            low, high = (_text(part, digits) for part in value)
            return low if low == high else f"{low}\u00a0to\u00a0{high}"
        return "; ".join(_text(part, digits) for part in value)
    number = f"{value:,.{digits}f}" if digits is not None else _two_digits(value)
    # Thousands are set off by a thin space from 10 000 on, as SI has it.
    return number.replace(",", "\u202f" if abs(value) >= 10_000 else "")


def _two_digits(value: Number) -> str:
    """An integer as it is; any other number with two digits, or with those before its point."""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10 else f"{float(f'{value:.2g}'):g}"


def table(found: dict, rows: Sequence[int] | None = None) -> str:
    """The table of *found* in Markdown, or those *rows* of it, without what stands below it.

    Of some rows, columns are left out in which all of them are the same.
    """
    columns = found["columns"]
    lines = [[column["head"] for column in columns], ["---"] * len(columns)]
    for row in found["rows"] if rows is None else [found["rows"][number] for number in rows]:
        values = (
            row.get(column["key"]) if "key" in column else _derived(row, DERIVED[column["derive"]], row.get("us"))
            for column in columns
        )
        lines.append([_text(value, column.get("digits")) for value, column in zip(values, columns, strict=True)])
    if rows is not None and len(rows) > 1:
        differing = [len({line[number] for line in lines[2:]}) > 1 for number in range(len(columns))]
        lines = [list(itertools.compress(line, differing)) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(found: dict) -> str:
    """Where the figures of *found* come from, in Markdown."""
    flags = [found["form"].capitalize()]
    if found["state"] != "not applicable":
        flags.append(found["state"])
    if found["input"] != "not applicable":
        flags.append(f"{found['input']} input")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    spread = found["spread"].rstrip(".")
    command = found["command"] if found["command"].startswith(NO_SCRIPT) else f"`{found['command']}`"
    lines = [f"{', '.join(flags)}. {spread}. {found['machine']}; {versions}; {found['date']}; {command}."]
    return "\n\n".join(found.get("notes", []) + lines)


def markdown(name: str) -> str:
    """The table of one file of results with its provenance, in Markdown."""
    found = load(name)
    return f"**{found['title']}**\n\n{table(found)}\n\n{provenance(found)}"


def replaced(text: str) -> str:
    """*text* with fresh tables and values between the comments that ask for them."""

    def fresh(match: re.Match[str]) -> str:
        rows = [int(number) for number in match[3].split()] or None
        return f"{match[1]}{table(load(match[2]), rows)}\n{match[4]}"

    def fresh_value(match: re.Match[str]) -> str:
        return f"{match[1]}{_text(load(match[2])['rows'][int(match[3])][match[4]], None)}{match[5]}"

    text = re.sub(r"(<!-- results: (\w+)([ \d]*) -->\n).*?(<!-- end -->)", fresh, text, flags=re.DOTALL)
    return re.sub(r"(<!-- value: (\w+) (\d+) (\w+) -->).*?(<!-- end -->)", fresh_value, text)


def setup(app: Sphinx) -> dict:
    from docutils import nodes
    from docutils.parsers.rst import Directive
    from docutils.statemachine import StringList

    class Results(Directive):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            name = self.arguments[0]
            self.state.document.settings.env.note_dependency(str(DATA / f"{name}.json"))
            lines = StringList(markdown(name).splitlines(), source=f"{name}.json")
            container = nodes.container(classes=["results"])
            self.state.nested_parse(lines, self.content_offset, container)
            return [container]

    app.add_directive("results", Results)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(replaced(file.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{file}: the tables are those of docs/results/data.")
