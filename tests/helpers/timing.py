"""Times that can be compared on a machine that does other things, too: taken in turns, and as ratios."""

import statistics
import time
from collections.abc import Callable


def seconds_in_turns(*functions: Callable[[], object], n: int = 20, repeats: int = 60) -> list[float]:
    """Seconds a call of each function: the lower decile over *repeats* rounds of *n* calls, in turns.

    The lower decile rather than the median, since whatever else runs can only add to a time.
    """
    rounds: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, collected in zip(functions, rounds, strict=True):
            begin = time.perf_counter()
            for _ in range(n):
                function()
            if repeat:
                collected.append((time.perf_counter() - begin) / n)
    return [statistics.quantiles(collected, n=10)[0] for collected in rounds]
