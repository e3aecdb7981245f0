"""Launch on the GPU what metal_on_cuda.py has recorded, and compare with what was computed there.

``metal_replay.py RESULT EACH FILE ...`` launches no more than EACH that are alike in all but values, or all with 0.
Nothing but CuPy is imported: this runs under compute-sanitizer.
"""

import json
import pathlib
import pickle
import sys
import time
from collections import Counter

from helpers.cuda_launch import ERRORS, Recorded, function_of, launched


def alike(launch: Recorded) -> tuple:
    return (launch.cubin, launch.blocks, launch.threads, *(array.shape for array in launch.buffers))


def replayed(file: pathlib.Path, each: int) -> dict:
    start, seen, wrong, n = time.monotonic(), Counter(), [], 0
    for launch in pickle.loads(file.read_bytes()):
        seen[alike(launch)] += 1
        if each and seen[alike(launch)] > each:
            continue
        n += 1
        function = function_of(launch.cubin, launch.entry)
        if difference := launch.difference(
            launched(function, launch.blocks, launch.threads, launch.buffers, launch.results)
        ):
            wrong.append(difference)
    return {
        "launches": n,
        "kinds": len(seen),
        "wrong": wrong[:20],
        "n_wrong": len(wrong),
        "s": time.monotonic() - start,
    }


def main() -> None:
    result, each, *files = sys.argv[1:]
    found = {}
    for file in map(pathlib.Path, files):
        try:
            found[file.stem] = replayed(file, int(each))
        except ERRORS as error:
            found[file.stem] = {"launches": 0, "kinds": 0, "wrong": [f"{type(error).__name__}: {error}"], "n_wrong": 1}
        pathlib.Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
