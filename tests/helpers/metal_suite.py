"""All that kernels for Metal go through, wherever they run: by kernel and by name.

A kernel that is entered in :data:`helpers.metal_texts.CALLS` and :data:`helpers.metal_mutants.CHECKS` is in here.
"""

import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from . import crossing_cases, metal_sigproc
from .ewma_cases import OWN_CASES
from .metal_mutants import CELLS, CHECKS, check_cell
from .recurrence_cases import CASES, EXACT_CASES
from .recurrences import RECURRENCES, Recurrence, check_close, check_state, noise
from .sosfilt_cases import CASES as SOSFILT_CASES

SIGPROC = "ezmsg-sigproc"

Suite = dict[str, dict[str, Callable[[], None]]]


def any_size(recurrence: Recurrence, n_channels: int) -> None:
    """Around the ends of strips, of tiles and of threadgroups."""
    some = np.unique(np.linspace(0, n_channels - 1, 20).astype(int))
    for n_samples in (1, 9, 10, 11, 319, 320, 321, 650):
        x = noise(n_samples, n_channels) + 5
        zi = recurrence.settled_state(recurrence.short, x)
        y, zf = recurrence.in_pieces(mx.array(x), [], recurrence.short, recurrence.pairs_of(zi), "metal")
        expected, last = recurrence.reference(x[:, some], recurrence.short, zi[..., some])
        check_close(y[:, some], expected, peak=5.0)
        check_state(recurrence.state_of(zf)[..., some], last, peak=5.0)
        assert np.isfinite(y).all()


N_CHANNELS = (1, 2, 7, 8, 9, 33, 257, 1030)


def suite() -> Suite:
    """The cases of each kernel. The emulation must be installed when one is called."""
    cases: Suite = {}
    for name, recurrence in RECURRENCES.items():
        common = {**CASES, **EXACT_CASES}
        of_kernel = {case: functools.partial(function, recurrence, "metal") for case, function in common.items()}
        for n in N_CHANNELS:
            of_kernel[f"any_size[{n}]"] = functools.partial(any_size, recurrence, n)
        cases[name] = of_kernel
    for name, own in (("ewma", OWN_CASES), ("sosfilt", SOSFILT_CASES)):
        cases[name] |= {f"own {case}": functools.partial(function, "metal") for case, function in own.items()}
    cases["recurrentcell"] = {f"{cell}, {bits} bits": functools.partial(check_cell, cell, bits) for cell, bits in CELLS}
    cases["crossings"] = {kind: functools.partial(crossing_cases.check, kind, "metal") for kind in crossing_cases.KINDS}
    for name, check in CHECKS.items():
        cases.setdefault(name, {})["check"] = check
    modules = functools.cache(metal_sigproc.imported)
    cases[SIGPROC] = {
        case: lambda function=function: function(modules()) for case, function in metal_sigproc.CASES.items()
    }
    return cases
