"""What the soak test holds its run to."""

import math
from typing import TypeAlias

from soak.observe import Observer, Visitor, first_and_last

LONGEST_MIB = 60000 * 16 * 4 / 2**20
"""One buffer: the longest message as float32."""

PROCESSES = ("source", "chain", "sink")
QUANTITIES = {"resident_set": "resident set", "shared": "shared memory"}
DEVICE = "device memory in use"


Reports: TypeAlias = dict[str, dict]
"""What each process has told of itself, by its name."""


def growth_allowed(quantity: str, first: float, settled_after: float) -> float:
    """MiB by which a process may have more at the end than *first*."""
    if settled_after < 60.0:
        # Until a longest message has been in every stage, all processes have met, and allocators know their sizes.
        return {"resident_set": 256.0, "shared": 64.0}[quantity]
    # Allocators keep the room of a longest message or two; segments are as they are.
    return {"resident_set": 0.05 * first + 4 * LONGEST_MIB, "shared": 0.0}[quantity]


def courses_on_device(reports: Reports, observer: Observer) -> dict[str, tuple[float, float]]:
    """Of MLX's memory, and of a device that has memory of its own, first and last in MiB; NaN if there is none."""
    names = ("MLX's active memory", "MLX's cache", DEVICE)
    samples = reports.get("chain", {}).get("memory", ())
    courses = {}
    for number, name in enumerate(names, start=1):
        course = [(sample[0] - observer.started_at, sample[number]) for sample in samples if sample[number] is not None]
        if course or name != DEVICE:
            courses[name] = first_and_last(course, observer.settled_after)
    return courses


def problems(status: int | None, reports: Reports, observer: Observer, visitor: Visitor, left: list[str]) -> list[str]:
    """What is not as it should be, a sentence each."""
    found = []
    if status != 0:
        found.append("the graph did not end by itself" if status is None else f"the graph ended with status {status}")
    found += [f"{one} is left" for one in left]
    found += [f"the visitor met {error}" for error in visitor.errors]
    if not visitor.rows or not min(visitor.rows):
        found.append(f"the monitor told its visitors {visitor.rows} rows")
    if missing := [name for name in PROCESSES if name not in reports]:
        return [*found, f"no report from {', '.join(missing)}"]
    chain, sink = reports["chain"], reports["sink"]
    found += sink["wrong"] + chain["wrong"]
    if not chain["spectrum"] == chain["band"] > 0:
        found.append(f"{chain['spectrum']} spectra and {chain['band']} filtered messages have arrived")
    if len(chain["lengths"]) > 1:
        found.append("many message lengths were warned of more than once")
    if sorted(chain["refused"]) != sink["gaps"]:
        found.append(f"samples are missing that no unit refused: {lost(reports)}; or refused ones are not logged once")
    if not sink["at_end"]:
        found.append("the last sample has not arrived")
    if not sink["n_taken"]:
        found.append("no change of settings was seen")
    if not sink["gaps"]:
        found.append("no message was refused")
    if chain["excess"] > LONGEST_MIB:
        found.append(f"MLX's cache was {chain['excess']:.1f} MiB above its limit")
    for name in PROCESSES:
        found += [f"{name} logged: {text}" for text in reports[name]["others"]]
        for quantity, words in QUANTITIES.items():
            first, last = observer.first_and_last(name, quantity)
            # Shared memory cannot be told everywhere.
            is_unknown = math.isnan(first) and (quantity == "shared" or observer.settled_after == math.inf)
            if not is_unknown and not last - first <= growth_allowed(quantity, first, observer.settled_after):
                found.append(f"the {words} of {name} grew from {first:.1f} to {last:.1f} MiB")
    first, last = courses_on_device(reports, observer).get(DEVICE, (math.nan, math.nan))
    if last - first > growth_allowed("resident_set", first, observer.settled_after):
        found.append(f"the {DEVICE} grew from {first:.1f} to {last:.1f} MiB")
    return found


def lost(reports: Reports) -> list[tuple[int, int]]:
    """First sample, and the one after the last, of what is missing though no unit refused it."""
    refused = reports.get("chain", {}).get("refused", ())
    return [gap for gap in reports.get("sink", {}).get("gaps", ()) if gap not in refused]


def print_table(reports: Reports, observer: Observer, visitor: Visitor, left: list[str]) -> None:
    chain, sink = reports.get("chain", {}), reports.get("sink", {})
    rows = [
        ("messages received", sink.get("n_messages")),
        ("samples compared", sink.get("n_samples")),
        ("bins compared", sink.get("n_bins")),
        ("messages refused / logged", f"{len(sink.get('gaps', ()))} / {len(chain.get('refused', ()))}"),
        ("settings changed / seen", f"{sink.get('n_changes')} / {sink.get('n_taken')}"),
        ("spectra / filtered messages", f"{chain.get('spectrum')} / {chain.get('band')}"),
        ("monitor: visits / rows", f"{len(visitor.rows)} / {sum(visitor.rows)}"),
        ("cache: limits", f"{chain.get('limits')} MiB"),
        (
            "cache: most / most above the limit",
            f"{chain.get('cache', math.nan):.1f} / {chain.get('excess', 0):.1f} MiB",
        ),
        ("one buffer", f"{LONGEST_MIB:.1f} MiB"),
    ]
    for name in PROCESSES if math.isfinite(observer.settled_after) else ():
        for quantity, words in QUANTITIES.items():
            first, last = observer.first_and_last(name, quantity)
            rows.append((f"{name}: {words} at {observer.settled_after:.0f} s, at end", f"{first:.1f}, {last:.1f} MiB"))
    if math.isfinite(observer.settled_after):
        for name, (first, last) in courses_on_device(reports, observer).items():
            rows.append((f"{name} at {observer.settled_after:.0f} s, at end", f"{first:.1f}, {last:.1f} MiB"))
    rows.append(("left behind", ", ".join(left) or "nothing"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}", flush=True)
