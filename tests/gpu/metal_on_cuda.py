"""The kernels for Metal on an NVIDIA GPU: `python tests/gpu/metal_on_cuda.py --out FOLDER`.

The text that MLX writes for Metal is compiled with nvcc (``helpers/metal_cuda.py``). Each launch of all cases is
recorded with what the emulation on the CPU makes of it, and repeated on the GPU: to the last bit, and under the four
tools of compute-sanitizer. All cases run on the GPU with contraction allowed. Then the faults of
``helpers/metal_mutants.py`` are put in one by one: by which way each is noticed. The tables are printed last, and
written to ``metal_on_cuda.json``.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from helpers import metal_cuda, metal_emulation
from helpers.metal_mutants import CHECKS, MUTANTS
from helpers.metal_suite import suite
from helpers.metal_texts import MODULES

from ezmsg.mlx.kernels.metal import kernel

TOOLS = {"memcheck": [], "racecheck": [], "synccheck": [], "initcheck": ["--initcheck-address-space", "all"]}
"""Of compute-sanitizer, with options that older versions of it do not have."""

EACH = 3
"""Launches under a tool that are alike in all but values."""

WORKERS = 8
"""Processes on the GPU at a time that put faults in."""

OF_FAULT = 30
"""Seconds for a fault, with which a kernel may not end; four times as much under a tool."""

FOUND = 99
"""Exit code of compute-sanitizer for a finding."""

REPLAY = pathlib.Path(__file__).with_name("metal_replay.py")

ON_GPU = {"EZMSG_MLX_METAL": "cuda"}

UNWRITTEN = {"EZMSG_MLX_METAL_UNWRITTEN": "1"}

SLOW = {"EZMSG_MLX_METAL_SLOW": "4"}


# ------------------------------------------------------------------------------------ what runs in processes of its own


def installed() -> contextlib.AbstractContextManager[None]:
    return metal_emulation.installed(pytest.MonkeyPatch(), *MODULES.values())


def run_cases(group: str) -> dict:
    """All cases of a kernel; what was wrong with those that failed."""
    failed, n_passed = {}, 0
    with installed():
        for name, case in suite()[group].items():
            try:
                case()
                n_passed += 1
            except Exception as error:  # What a case meets is what is asked for.
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return {"passed": n_passed, "failed": failed}


def record_cases(group: str, file: pathlib.Path) -> dict:
    """The same in the emulation, and each launch into *file*. What has to be compiled is told with it."""
    from helpers.cuda_launch import Recorded

    launches, sources, seen = [], set(), set()

    def run(launch: metal_emulation.Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        metal_emulation.run_emulated(launch, inputs, results)
        source = metal_cuda.source_of(launch)
        digest = hashlib.sha256(source.encode())
        for array in (np.array([*launch.grid, *launch.threadgroup]), *inputs):
            digest.update(array.tobytes())
        if digest.digest() in seen:
            return
        seen.add(digest.digest())
        sources.add(source)
        cubin, *rest = metal_cuda.arguments_of(launch, inputs)
        copies = [np.array(result) for result in results]
        launches.append(Recorded(str(cubin), *rest[:3], [*map(np.array, rest[3])], copies, metal_cuda.is_exact(launch)))

    metal_emulation.run = run
    found = run_cases(group)
    file.write_bytes(pickle.dumps(launches))
    return {**found, "launches": len(launches), "sources": sorted(sources)}


def put_in(numbers: Iterable[int], file: pathlib.Path) -> None:
    """What each fault does to the values, a line of *file* each; the process ends where CUDA fails."""
    for number in numbers:
        start, noticed = time.monotonic(), ""
        # Ends the process wherever it waits.
        signal.alarm(OF_FAULT * int(os.environ.get("EZMSG_MLX_METAL_SLOW", 1)))
        with file.open("a") as lines:
            lines.write(json.dumps({"begun": number}) + "\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernel, "read_source", MUTANTS[number].read_source)
            with installed():
                try:
                    CHECKS[MUTANTS[number].recurrence]()
                except AssertionError as error:
                    noticed = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        with file.open("a") as lines:
            lines.write(json.dumps({"number": number, "noticed": noticed, "s": time.monotonic() - start}) + "\n")
        if "cudaError" in noticed or "CUDA_ERROR" in noticed:
            os._exit(0)


# ------------------------------------------------------------------------------------------------- how they are started


class Run:
    """What one call of this script has: where files lie, when it has to end, and what it has found."""

    def __init__(self, folder: pathlib.Path, seconds: float, groups: Sequence[str]) -> None:
        self.folder, self.groups = folder, groups
        self.end = time.monotonic() + seconds
        self.start = time.monotonic()
        self.findings: list[str] = []
        self._ports = itertools.count(20000, 20)

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {text}", flush=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def process(self, *arguments: object, before: Sequence[str] = (), script: pathlib.Path | None = None, **env) -> int:
        """A process and a session of its own; its exit code, or -1 where it was ended for the time it took."""
        if self.left < 5.0:
            return -1
        command = [*before, sys.executable, str(script or __file__), *map(str, arguments)]
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
        process = subprocess.Popen(
            command,
            env={**os.environ, **threads, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.left)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = -1
        if code:
            self.findings.append(f"=== {code}: {' '.join(map(str, arguments))[:200]} {before[:3]}\n{output[-6000:]}\n")
        return code

    def sanitizer(self, tool: str) -> list[str]:
        """The command that comes before another one, with those options that this version has."""
        command = [SANITIZER, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "10"]
        # Several at a time must not ask for the same port.
        more = [*TOOLS[tool], "--port", str(next(self._ports)), "--kernel-name", f"kns={metal_cuda.ENTRY}"]
        for option, value in zip(more[::2], more[1::2], strict=True):
            command += [option, value] if option in _options_of_sanitizer() else []
        return command

    # ------------------------------------------------------------------------------------------------------- its parts

    def recorded(self, group: str) -> dict:
        """In the emulation; all that it launched is compiled as well."""
        file, result = self.folder / f"{group}.pickle", self.folder / f"{group}.json"
        code = self.process("--record", group, file, result)
        found = _read(result) or {"passed": 0, "failed": {"process": f"exit code {code}"}, "sources": [], "launches": 0}
        sources = found.pop("sources")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for flag in (metal_cuda.EXACT, metal_cuda.CONTRACTED):
                list(pool.map(functools.partial(metal_cuda.compiled, flag=flag), sources))
        self.tell(f"{group}: {found['launches']} launches of {len(sources)} texts recorded and compiled")
        return {"group": group, "way": "emulation", "findings": 0, "n": found["passed"], "failed": found["failed"]}

    def contracted(self, group: str) -> dict:
        result = self.folder / f"{group}.contracted.json"
        code = self.process("--cases", group, result, EZMSG_MLX_METAL_FLAG=metal_cuda.CONTRACTED, **ON_GPU)
        found = _read(result) or {"passed": 0, "failed": {"process": f"exit code {code}"}}
        self.tell(f"{group}: cases with contraction")
        return {
            "group": group,
            "way": "float64, contracted",
            "findings": 0,
            "n": found["passed"],
            "failed": found["failed"],
        }

    def replayed(self, tool: str) -> list[dict]:
        """All recorded launches, bare or under a tool."""
        result = self.folder / f"replayed {tool}.json"
        files = [self.folder / f"{group}.pickle" for group in self.groups]
        env = UNWRITTEN if tool == "initcheck" else {}
        before = self.sanitizer(tool) if tool else []
        code = self.process(result, EACH if tool else 0, *files, before=before, script=REPLAY, **env)
        found = _read(result) or {}
        self.tell(f"launches repeated: {tool or 'same bits'}, exit code {code}")
        rows = []
        for group in self.groups:
            one = found.get(group, {"launches": 0, "n_wrong": 1, "wrong": ["did not come to it"]})
            failed = dict(enumerate(one["wrong"]))
            rows.append({"group": group, "way": tool or "same bits", "n": one["launches"], "failed": failed})
            # What is found is of the process as a whole; its output tells of which kernel.
            rows[-1]["findings"] = int(code != 0)
        return rows

    def judged(self, numbers: Sequence[int]) -> Iterator[dict]:
        """What is noticed of faults by values, in one process after the other."""
        left = list(numbers)
        file = self.folder / f"faults {left[0]}.jsonl"
        while left and self.left > 5.0:
            code = self.process("--put-in", file, *left, **ON_GPU)
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            done = {line["number"]: line for line in lines if "number" in line}
            begun = [line["begun"] for line in lines if "begun" in line]
            if not begun or self.left < 5.0:
                break
            for number in [n for n in left if n in done or n in begun]:
                line = done.get(number)
                by = "" if line is None else line["noticed"]
                if line is None or "cudaError" in by or "CUDA_ERROR" in by:
                    kind = ["no end" if code == -signal.SIGALRM else "an error of CUDA"]
                else:
                    kind = ["values"] if by else []
                yield {"number": number, "by": kind, "message": by or (f"exit code {code}" if line is None else "")}
                left.remove(number)

    def sanitized(self, fault: dict) -> dict:
        """*fault*, which values do not show, under each tool."""
        for tool in TOOLS if not fault["by"] else ():
            file = self.folder / f"faults {fault['number']} {tool}.jsonl"
            env = {**ON_GPU, **(UNWRITTEN if tool == "initcheck" else {})}
            code = self.process("--put-in", file, fault["number"], before=self.sanitizer(tool), **SLOW, **env)
            if code == FOUND:
                fault["by"].append(tool)
            elif code:
                fault["message"] = f"no time for {tool}"
        return fault


SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


@functools.cache
def _options_of_sanitizer() -> str:
    return subprocess.run([SANITIZER, "--help"], capture_output=True, text=True).stdout


def _read(file: pathlib.Path) -> dict | None:
    return json.loads(file.read_text()) if file.exists() else None


# ----------------------------------------------------------------------------------------------------------------- main


def tables(rows: Iterable[dict], faults: Sequence[dict]) -> Iterator[str]:
    yield f"{'kernel':16}{'way':24}{'right':>8}{'wrong':>8}  findings of the way"
    for row in rows:
        yield f"{row['group']:16}{row['way']:24}{row['n']:8}{len(row['failed']):8}  {row['findings'] or '-'}"
    for row in rows:
        for name, error in row["failed"].items():
            yield f"WRONG {row['group']}, {row['way']}: {name}: {error[:250]}"
    counts = Counter(", ".join(fault["by"]) or fault["message"] or "nothing on the GPU" for fault in faults)
    yield f"faults: {len(faults)}; noticed by " + "; ".join(f"{by}: {n}" for by, n in counts.most_common())
    for fault in faults:
        if fault["by"] != ["values"]:
            yield f"  {', '.join(fault['by']) or fault['message'] or 'NOT NOTICED'}: {MUTANTS[fault['number']]}"


def run_everything(arguments: argparse.Namespace) -> int:
    groups = [group for group in suite() if not arguments.only or group in arguments.only]
    numbers = [i for i, mutant in enumerate(MUTANTS) if not arguments.only or mutant.recurrence in arguments.only]
    numbers = [] if arguments.without_mutants else numbers
    rows, faults = [], []
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        os.environ["EZMSG_MLX_METAL_CUBINS"] = os.environ.get("EZMSG_MLX_METAL_CUBINS", f"{name}/cubins")
        run = Run(pathlib.Path(name), arguments.seconds, groups)
        run.tell(f"{len(groups)} kernels, {len(numbers)} faults, {metal_cuda.architecture()}, {SANITIZER}")
        parts = [numbers[i::WORKERS] for i in range(WORKERS)]
        judged = [pool.submit(lambda part=part: list(run.judged(part))) for part in parts if part]
        rows += list(pool.map(run.recorded, groups))
        repeated = [pool.submit(run.replayed, tool) for tool in ("", *TOOLS)]
        contracted = [pool.submit(run.contracted, group) for group in groups]
        rows += [row for each in repeated for row in each.result()]
        rows += [each.result() for each in contracted]
        print("\n".join(tables(rows, [])), flush=True)
        faults = sorted((fault for each in judged for fault in each.result()), key=lambda fault: fault["number"])
        run.tell(f"values of {len(faults)} faults")
        faults = list(pool.map(run.sanitized, faults))
        run.tell("the others under compute-sanitizer")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "metal_findings.txt").write_text("".join(run.findings))
    named = [{**fault, "mutant": str(MUTANTS[fault["number"]])} for fault in faults]
    (arguments.out / "metal_on_cuda.json").write_text(json.dumps({"rows": rows, "faults": named}, indent=1))
    print("\n".join(tables(rows, faults)))
    return int(any(row["failed"] or row["findings"] for row in rows) or len(faults) < len(numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_results"))
    parser.add_argument("--seconds", type=float, default=145.0, help="after which what is not done is left out")
    parser.add_argument("--workers", type=int, default=max(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--only", action="append", metavar="KERNEL", help="these kernels")
    parser.add_argument("--without-mutants", action="store_true", help="put no faults in")
    parser.add_argument("--record", nargs=3, metavar=("KERNEL", "FILE", "RESULT"), help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs=2, metavar=("KERNEL", "RESULT"), help=argparse.SUPPRESS)
    parser.add_argument("--put-in", nargs="+", metavar="FILE N", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # What MLX itself computes is none of this.
    mx.set_default_device(mx.cpu)
    metal_emulation.options.cuda_flag = os.environ.get("EZMSG_MLX_METAL_FLAG", metal_cuda.EXACT)
    if arguments.record:
        group, file, result = arguments.record
        pathlib.Path(result).write_text(json.dumps(record_cases(group, pathlib.Path(file))))
    elif arguments.cases:
        group, result = arguments.cases
        pathlib.Path(result).write_text(json.dumps(run_cases(group)))
    elif arguments.put_in:
        file, *numbers = arguments.put_in
        put_in(map(int, numbers), pathlib.Path(file))
    else:
        return run_everything(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
