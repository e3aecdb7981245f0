"""The kernels for Metal on an NVIDIA GPU: `python tests/gpu/metal_on_cuda.py --out FOLDER`.

The text that MLX writes for Metal is compiled with nvcc (``helpers/metal_cuda.py``) and goes through all cases: to the
last bit beside the emulation on the CPU, compiled with contraction, and under the four tools of compute-sanitizer. Then
the faults of ``helpers/metal_mutants.py`` are put in one by one: by which way each is noticed. The tables are printed
last, and written to ``metal_on_cuda.json``.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import mlx.core as mx
import pytest
from helpers import metal_cuda, metal_emulation
from helpers.metal_mutants import CHECKS, MUTANTS
from helpers.metal_suite import SIGPROC, suite
from helpers.metal_texts import MODULES

from ezmsg.mlx.kernels.metal import kernel

TOOLS = {"memcheck": [], "racecheck": [], "synccheck": [], "initcheck": ["--initcheck-address-space", "all"]}
"""Of compute-sanitizer, with options that older versions of it do not have."""

FOUND = 99
"""Exit code of compute-sanitizer for a finding. What a case finds is printed: another code would count as one, too."""

NOTICED = "noticed: "

LIMIT = 240.0
"""Seconds for a process, which only a kernel that does not end reaches."""

OF_MUTANT = 60.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    code: int | None
    """None: ended for not ending."""

    output: str
    seconds: float


# ------------------------------------------------------------------------------------ what runs in processes of its own


def run_cases(group: str, part: int, n_parts: int, out: pathlib.Path) -> None:
    """Every *n_parts*-th case of a kernel, from *part* on; those that failed are written with what was wrong."""
    failed, n_passed = {}, 0
    with installed():
        for name, case in list(suite()[group].items())[part::n_parts]:
            try:
                case()
                n_passed += 1
            except Exception as error:  # What a case meets is what is asked for.
                failed[name] = f"{type(error).__name__}: {error}"[:1500]
    out.write_text(json.dumps({"passed": n_passed, "failed": failed}))


def run_mutant(number: int) -> None:
    mutant = MUTANTS[number]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "read_source", mutant.read_source)
        with installed():
            try:
                CHECKS[mutant.recurrence]()
            except AssertionError as error:
                print(NOTICED, type(error).__name__, " ".join(str(error).split())[:300])


def installed() -> contextlib.AbstractContextManager[None]:
    return metal_emulation.installed(pytest.MonkeyPatch(), *MODULES.values())


# ------------------------------------------------------------------------------------------------ what is run, and how


def sanitized(tool: str) -> list[str]:
    """The command that comes before another one, with those options that this version has."""
    program = shutil.which("compute-sanitizer")
    assert program, "compute-sanitizer is not on the PATH"
    options = _options_of_sanitizer()
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    # Several at a time must not ask for the same port.
    more = [*TOOLS[tool], "--target-processes", "all", "--port", str(next(_PORTS))]
    more += ["--kernel-name", f"kns={metal_cuda.ENTRY}"]
    for option, value in zip(more[::2], more[1::2], strict=True):
        command += [option, value] if option in options else []
    return command


_PORTS = itertools.count(20000, 20)


@functools.cache
def _options_of_sanitizer() -> str:
    return subprocess.run([shutil.which("compute-sanitizer"), "--help"], capture_output=True, text=True).stdout


def run_process(arguments: Iterable[object], *, before: Iterable[str] = (), limit: float = LIMIT, **env) -> Outcome:
    """This script with *arguments*, in a process and a session of its own."""
    start = time.monotonic()
    command = [*before, sys.executable, __file__, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return Outcome(code, output, time.monotonic() - start)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which all cases are run."""

    name: str
    env: dict[str, str]
    tool: str = ""
    n_parts: int = 1


ON_GPU = {"EZMSG_MLX_METAL": "cuda"}

ENV_OF_TOOL = {**dict.fromkeys(TOOLS, ON_GPU), "initcheck": {**ON_GPU, "EZMSG_MLX_METAL_UNWRITTEN": "1"}}

WAYS = [
    Way("same bits as the emulation", {"EZMSG_MLX_METAL": "both"}),
    Way("contracted", {**ON_GPU, "EZMSG_MLX_METAL_FLAG": metal_cuda.CONTRACTED}),
    *(Way(tool, ENV_OF_TOOL[tool], tool, 2) for tool in TOOLS),
]


def run_way(way: Way, group: str, part: int, folder: pathlib.Path) -> dict:
    """One part of the cases of a kernel, one way."""
    file = folder / f"{group} {way.name} {part}.json"
    before = sanitized(way.tool) if way.tool else []
    outcome = run_process(["--cases", group, part, way.n_parts, file], before=before, **way.env)
    # What the process did not come to write.
    lost = {"passed": 0, "failed": {"process": outcome.output[-1500:]}}
    found = json.loads(file.read_text()) if file.exists() else lost
    is_right = outcome.code == 0 and not found["failed"]
    return {
        "group": group,
        "way": way.name,
        "findings": outcome.code != 0,
        "seconds": outcome.seconds,
        "output": "" if is_right else outcome.output[-20000:],
        **found,
    }


def judged(number: int) -> dict:
    """By which ways a fault is noticed on the GPU: wrong values, and if none are, tools."""
    plain = run_process(["--mutant", number], limit=OF_MUTANT, **ON_GPU)
    by, noticed = [], plain.output.partition(NOTICED)[2].strip()
    if plain.code is None:
        by.append("no end")
    elif plain.code or "cudaError" in noticed or "CUDA_ERROR" in noticed:
        by.append("an error of CUDA")
    elif noticed:
        by.append("values")
    for tool in TOOLS if not by else ():
        outcome = run_process(["--mutant", number], before=sanitized(tool), limit=OF_MUTANT, **ENV_OF_TOOL[tool])
        if outcome.code:
            by.append(tool)
    mutant = MUTANTS[number]
    return {"kernel": mutant.recurrence, "mutant": str(mutant), "by": by, "message": noticed, "seconds": plain.seconds}


# ----------------------------------------------------------------------------------------------------------------- main


def tables(results: list[dict], mutants: list[dict]) -> Iterable[str]:
    by_way: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for result in results:
        count = by_way[result["group"], result["way"]]
        count.update(passed=result["passed"], failed=len(result["failed"]), findings=result["findings"])
    yield f"{'kernel':16}{'way':30}{'passed':>8}{'failed':>8}{'findings':>10}"
    for (group, way), count in by_way.items():
        yield f"{group:16}{way:30}{count['passed']:8}{count['failed']:8}{count['findings']:10}"
    yield ""
    for result in results:
        for name, error in result["failed"].items():
            yield f"FAILED {result['group']}, {result['way']}: {name}: {' '.join(error.split())[:300]}"
        if result["findings"]:
            yield f"FINDING {result['group']}, {result['way']}"
    counts = Counter(", ".join(mutant["by"]) or "nothing on the GPU" for mutant in mutants)
    yield f"mutants: {len(mutants)}; noticed by " + "; ".join(f"{by}: {n}" for by, n in counts.most_common())
    for mutant in mutants:
        if mutant["by"] != ["values"]:
            yield f"  {', '.join(mutant['by']) or 'NOT'}: {mutant['mutant']!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs=4, metavar=("KERNEL", "PART", "PARTS", "FILE"), help="run some here")
    parser.add_argument("--mutant", type=int, metavar="N", help="put one fault in, here")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_results"))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", choices=[*CHECKS, SIGPROC], action="append", help="these kernels")
    parser.add_argument("--without-mutants", action="store_true")
    arguments = parser.parse_args()
    # What MLX itself computes is none of this.
    mx.set_default_device(mx.cpu)
    metal_emulation.options.cuda_flag = os.environ.get("EZMSG_MLX_METAL_FLAG", metal_cuda.EXACT)
    if arguments.cases:
        group, part, n_parts, file = arguments.cases
        run_cases(group, int(part), int(n_parts), pathlib.Path(file))
    elif arguments.mutant is not None:
        run_mutant(arguments.mutant)
    else:
        return run_everything(arguments)
    return 0


def run_everything(arguments: argparse.Namespace) -> int:
    arguments.out.mkdir(parents=True, exist_ok=True)
    groups = [group for group in suite() if not arguments.only or group in arguments.only]
    numbers = [i for i, mutant in enumerate(MUTANTS) if not arguments.only or mutant.recurrence in arguments.only]
    parts = [(way, group, part) for way in WAYS for group in groups for part in range(way.n_parts)]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        os.environ["EZMSG_MLX_METAL_CUBINS"] = os.environ.get("EZMSG_MLX_METAL_CUBINS", folder)
        start = time.monotonic()
        # Those of the sanitizers take longest.
        running = [pool.submit(run_way, way, group, part, pathlib.Path(folder)) for way, group, part in reversed(parts)]
        mutants = [pool.submit(judged, number) for number in ([] if arguments.without_mutants else numbers)]
        results = [each.result() for each in reversed(running)]
        print(f"all cases after {time.monotonic() - start:.0f} s", flush=True)
        judgements = [each.result() for each in mutants]
        print(f"all mutants after {time.monotonic() - start:.0f} s", flush=True)
    lines = list(tables(results, judgements))
    findings = [f"=== {each['group']}, {each['way']}\n{each.pop('output')}\n" for each in results]
    (arguments.out / "metal_findings.txt").write_text("".join(text for text in findings if text.count("\n") > 2))
    found = {"results": results, "mutants": judgements}
    (arguments.out / "metal_on_cuda.json").write_text(json.dumps(found, indent=1))
    print("\n".join(lines))
    is_clean = not any(result["failed"] or result["findings"] for result in results)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
