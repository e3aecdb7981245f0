"""Faults put into the sources of the kernels for Metal one by one, each of which some case must notice."""

import dataclasses
import itertools
import math

import numpy as np

from ezmsg.mlx.kernels.cells import GROUP
from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE
from ezmsg.mlx.kernels.metal import ewma, recurrentcell
from ezmsg.mlx.kernels.plain.recurrentcell import difference_after_steps, random_cell
from ezmsg.mlx.kernels.sources import read_source

from . import crossing_cases
from .ewma_cases import OWN_CASES, state_of
from .metal_cases import check_corrected, check_long_memory_in_single_samples, check_scores, run_scores
from .recurrence_cases import CASES, EXACT_CASES
from .recurrences import EWMA, SOSFILT, alpha_of, check_close, noise
from .sosfilt_cases import CASES as SOSFILT_CASES


@dataclasses.dataclass(frozen=True)
class Mutant:
    recurrence: str
    before: str
    """Text of the source, as MLX gets it."""

    after: str
    which: int = 0
    """Which occurrence is replaced."""

    file: str = ""
    """Which source, where it is not named as the kernel."""

    def read_source(self, package: str, name: str) -> tuple[str, str]:
        """Takes the place of the function of this name."""
        header, body = read_source(package, name)
        if name != (self.file or f"{self.recurrence}.metal"):
            return header, body
        parts = f"{header}\0{body}".split(self.before)
        assert len(parts) > self.which + 1, f"no {self.before!r} in {name}"
        at = self.which + 1
        mutated = self.before.join(parts[:at]) + self.after + self.before.join(parts[at:])
        header, body = mutated.split("\0")
        return header, body

    def __str__(self) -> str:
        return f"{self.file or self.recurrence}: {self.before!r} -> {self.after!r}, {self.which}"


def _check_ewma() -> None:
    EXACT_CASES["bad_samples_in_any_block"](EWMA, "metal")
    x = noise(700, 11) + 5
    x[np.random.default_rng(1).random(x.shape) < 0.05] = math.nan
    x[:20, 3] = math.inf
    for time_constant in (0.001, 300.0):
        check_corrected(x, alpha_of(time_constant), [1, 330])
    CASES["more_samples_and_channels_than_a_block_takes[33]"](EWMA, "metal")
    CASES["state_is_that_of_scipy[pair]"](EWMA, "metal")
    check_long_memory_in_single_samples()
    OWN_CASES["constant_stays_constant[300.0]"]("metal")
    OWN_CASES["alpha_of_one_is_the_identity"]("metal")
    limit = np.float32(LARGEST_SAMPLE)
    y = np.array(ewma.run(_array([[1.0], [limit], [1.0]]), 0.01, state_of([[1.0]], 0.01), 0, ())[0])
    assert y[2, 0] > 1e26


def _array(values: list) -> object:
    import mlx.core as mx

    return mx.array(np.array(values, np.float32))


def _check_sosfilt() -> None:
    keys = ("band-pass 4", "notch 14940 Hz", "high-pass 0.5 Hz 4")
    some = dataclasses.replace(SOSFILT, coefficients={key: SOSFILT.coefficients[key] for key in keys})
    CASES["follows_float64"](some, "metal")
    EXACT_CASES["bad_samples_in_any_block"](SOSFILT, "metal")
    x = noise(1300, 5) + 3
    x[np.random.default_rng(1).random(x.shape) < 0.05] = math.nan
    for key in keys:
        sos = SOSFILT.coefficients[key]
        zi = SOSFILT.settled_state(sos, np.ones_like(x)) * 3
        y, zf = SOSFILT.in_pieces(_array(x), [1, 2, 330, 7], sos, SOSFILT.pairs_of(zi), "metal")
        expected = SOSFILT.without(x, sos, zi)
        check_close(np.nan_to_num(y), np.nan_to_num(expected), 2e-6)
        assert np.isfinite(np.array(zf)).all()
    CASES["more_samples_and_channels_than_a_block_takes[33]"](SOSFILT, "metal")
    SOSFILT_CASES["constant_is_removed_without_a_transient"]("metal")
    SOSFILT_CASES["short_messages_do_not_drift[1]"]("metal")


def _check_zscore() -> None:
    x = noise(1500, 6) + 7
    x[np.random.default_rng(1).random(x.shape) < [0.0, 0.01, 0.3, 0.9, 1.0, 0.0]] = math.nan
    x[:700, 1] = math.inf
    x[[0, 3, 900], 5] = np.float32([2e18, -3e38, 1.001e18])
    for time_constant in (0.001, 0.1, 300.0):
        check_scores(x, alpha_of(time_constant), [1, 320, 5])
    check_scores(noise(700, 33) + np.float32(1e4), alpha_of(300.0), [1] * 100)
    check_scores(np.concatenate([np.full((1, 2), 1e18), noise(900, 2)]).astype(np.float32), 0.9, [])
    constant = np.full((900, 2), 3e7, np.float32)
    constant[:200, 1] += noise(200)
    y, _ = run_scores(constant, alpha_of(0.0003), [1, 300])
    assert not y[:, 0].any() and not y[850:, 1].any()


def _check_crossings() -> None:
    crossing_cases.check_all("metal")


CELLS = [*itertools.product(("GRU", "LSTM"), (32, 16, 8))]
"""Kinds of cells, and bits of their weights."""


def check_cell(cell: str, bits: int) -> None:
    # Of a few more columns than the words that a threadgroup takes at a time, and of fewer; a batch.
    for n_input, n_hidden, n_rows in (({32: 5, 16: 9, 8: 17}[bits] * GROUP, GROUP, 2), (GROUP, 2 * GROUP, 3)):
        difference = difference_after_steps(recurrentcell, random_cell(cell, bits, n_input, n_hidden), n_rows, 2)
        assert difference < 2e-6, (cell, bits, n_input, difference)


def _check_recurrentcell() -> None:
    for cell, bits in CELLS:
        check_cell(cell, bits)


CHECKS = {
    "crossings": _check_crossings,
    "ewma": _check_ewma,
    "recurrentcell": _check_recurrentcell,
    "sosfilt": _check_sosfilt,
    "zscore": _check_zscore,
}
"""What a kernel that is right goes through; AssertionError where one is not."""

_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
_BARRIER_OF_BOTH = "mem_flags::mem_threadgroup | mem_flags::mem_device"

MUTANTS = [
    # What all kernels share.
    Mutant("ewma", "<= LARGEST_SAMPLE", "< LARGEST_SAMPLE"),
    Mutant("ewma", "(a - (total - from_b)) + (b - from_b)", "0.0f"),
    Mutant("ewma", "value.low + change", "change"),
    Mutant("ewma", "channel = min(channel, n_channels - 1);\n", ""),
    Mutant("ewma", "bool is_active = channel < n_channels;", "bool is_active = true;"),
    # Averages.
    Mutant("ewma", _BARRIER, ""),
    Mutant("ewma", "mem_flags::mem_threadgroup", "mem_flags::mem_device"),
    Mutant("ewma", "turn = 1 - turn;\n", ""),
    Mutant("ewma", "i < inside ? x[", "true ? x["),
    Mutant("ewma", "if (i < inside && is_active) y", "if (is_active) y"),
    Mutant("ewma", "if (i < inside && is_active) y", "if (i < inside) y"),
    Mutant("ewma", "if (i == strip) {", "if (i == strip + 1) {"),
    Mutant("ewma", "decays[k], before", "decays[k + 1], before"),
    Mutant("ewma", "decays[all_taken[other]]", "decays[SAMPLES]"),
    Mutant("ewma", "GAINS + n_before + k", "GAINS + k"),
    Mutant("ewma", "moved(average, state * one_over_beta)", "moved(average, -state * one_over_beta)"),
    Mutant("ewma", "state = 0.0f;\n", "", 1),
    Mutant("ewma", "-fma(alpha, average.high", "fma(alpha, average.high"),
    Mutant("ewma", "alone = beta * values[i]", "alone = values[i]"),
    Mutant("ewma", "k <= SAMPLES", "k < SAMPLES"),
    Mutant("ewma", "taken |= 1u << i;\n", ""),
    Mutant("ewma", "start += n_strips * SAMPLES", "start += n_strips * SAMPLES + 1"),
    Mutant("ewma", "if (strip == 0 && is_active)", "if (is_active)"),
    Mutant("ewma", "fma(rest, table[GAINS + n_before + k], weight.low)", "table[GAINS + n_before + k]"),
    # Sections.
    Mutant("sosfilt", _BARRIER_OF_BOTH, "mem_flags::mem_threadgroup", 0),
    Mutant("sosfilt", _BARRIER_OF_BOTH, "mem_flags::mem_threadgroup", 1),
    Mutant("sosfilt", f"threadgroup_barrier({_BARRIER_OF_BOTH});\n", "", 1),
    Mutant("sosfilt", "turn = 1 - turn;\n", ""),
    Mutant("sosfilt", "turn_of_tile = 1 - turn_of_tile;\n", ""),
    Mutant("sosfilt", "sign *= sign_of_next;\n", "", 0),
    Mutant("sosfilt", "sign *= sign_of_next;\n", "", 1),
    Mutant("sosfilt", "n_before & 1u", "n_until & 1u"),
    Mutant("sosfilt", "n_until & 1u", "n_before & 1u"),
    Mutant("sosfilt", "4 * all_taken[turn_of_tile * THREADS + i * lanes + lane]", "4 * SAMPLES"),
    Mutant("sosfilt", "table[power + 1], after.second", "table[power + 2], after.second"),
    Mutant("sosfilt", "moved(z0, after.first)", "moved(z0, s.first)"),
    Mutant("sosfilt", "two_sum(sum.high, -z0.high)", "two_sum(sum.high, z0.high)"),
    Mutant("sosfilt", "fma(c.c10, z0.high, c.c10 * z0.low)", "c.c10 * z0.low"),
    Mutant("sosfilt", "bool is_writer = strip == 0 && is_active", "bool is_writer = is_active"),
    Mutant("sosfilt", "values[i] = sign * (", "values[i] = ("),
    Mutant("sosfilt", "if (i == strip) n_before = n_until;\nn_until +=", "n_until +="),
    Mutant("sosfilt", "if (c.is_mirrored) z1 = {-z1.high, -z1.low};\n", "", 1),
    Mutant("sosfilt", "sum.low - z0.low", "sum.low"),
    Mutant("sosfilt", "zf[place + 3 * n_channels] = z1.low", "zf[place + 3 * n_channels] = 0.0f"),
    Mutant("sosfilt", "zf[place + 2 * n_channels] = z0.low", "zf[place + 2 * n_channels] = 0.0f"),
    # Scores.
    Mutant("zscore", _BARRIER, "", 0),
    Mutant("zscore", _BARRIER, "", 1),
    Mutant("zscore", "uint i = block * BLOCK;", "uint i = 0;"),
    Mutant("zscore", " || strip == n_strips - 1", ""),
    Mutant("zscore", "if (i == block) {", "if (i == block + 1) {"),
    Mutant("zscore", "moved(b.mean, -rest * delta)", "moved(b.mean, rest * delta)"),
    Mutant("zscore", "if (share <= 0.5f) {", "if (true) {"),
    Mutant("zscore", "(delta * (share * rest))", "(delta * share)"),
    Mutant("zscore", "float weight_left = decay * weight_a", "float weight_left = weight_a"),
    Mutant("zscore", "if (n_here > 0) {", "if (true) {"),
    Mutant("zscore", "if (n_here > 0) {", "if (true) {", 1),
    Mutant("zscore", "block_variances[place + BLOCKS] =", "block_variances[place] ="),
    Mutant("zscore", "= n_before + n_taken;", "= n_taken;"),
    Mutant("zscore", " && before.variance.high > least * least", ""),
    Mutant("zscore", "until = now;\n", ""),
    Mutant("zscore", "lack * table[GAINS + n_until]", "lack * table[GAINS + n_before]"),
    Mutant("zscore", "distance = rest * (", "distance = ("),
    Mutant("zscore", "<= LARGEST_SCORED", "<= LARGEST_SAMPLE"),
    Mutant(
        "zscore", "moved(a.variance, fma(share, from(a.variance, b.variance), spread))", "moved(a.variance, spread)"
    ),
    Mutant("zscore", "n_of_stream = n_until;\n", ""),
    Mutant("zscore", "k = n_of_stream + n_before", "k = n_of_stream"),
    Mutant("zscore", "before = of_stream;\n", ""),
    Mutant("zscore", "- before.mean.low", "+ before.mean.low"),
    # Crossings.
    Mutant("crossings", "if (channel >= uint(x_shape[1])) return;\n", ""),
    Mutant("crossings", "sign = threshold >= 0.0f", "sign = threshold > 0.5f"),
    Mutant("crossings", "compared * sign >= bound * sign", "compared * sign > bound * sign"),
    Mutant("crossings", "status == UNDER", "status != OVER"),
    Mutant("crossings", "&& left == 0.0f", ""),
    Mutant("crossings", "left = begins ? refractory", "left = is_over ? refractory"),
    Mutant("crossings", "left - 1.0f : 0.0f", "left - 2.0f : 0.0f"),
    Mutant("crossings", "is_compared = size <= LARGEST_SCALED;\n", ""),
    Mutant("crossings", "spread - share * second.high", "spread"),
    Mutant("crossings", "rest * delta / root", "delta / root"),
    Mutant("crossings", "moved(average, -alpha * average.high)", "average"),
    Mutant("crossings", "average.high / weight.high", "average.high"),
    Mutant("crossings", "1.0f + EAGERNESS", "1.0f - EAGERNESS"),
    Mutant("crossings", "gain < 0.5f ? gain : 0.5f", "gain"),
    Mutant("crossings", "if (first.high == 0.0f) {", "if (false) {"),
    Mutant("crossings", "-gain * first.high", "gain * first.high"),
    Mutant("crossings", "NORMAL * first.high", "first.high"),
    Mutant("crossings", "compared * sign > peak * sign", "compared * sign >= peak * sign"),
    Mutant("crossings", "offset = age;\n", ""),
    Mutant("crossings", "age >= float(window)", "age > float(window)"),
    Mutant("crossings", "is_over || age >= shortest", "true"),
    Mutant("crossings", "(is_over ? 1 : 0)", "0"),
    Mutant("crossings", "(at_peak ? int(offset) : 0)", "0"),
    Mutant("crossings", "age = 0.0f;\n", "", 1),
    Mutant("crossings", "value = sample;\n", "", 0),
    Mutant("crossings", "value = sample;\n", "", 1),
    Mutant("crossings", "if (i >= n) {", "if (i > n) {"),
    Mutant("crossings", "at >= int(n)", "at > int(n)"),
    Mutant("crossings", "++found;\n", "", 0),
    Mutant("crossings", "++found;\n", "", 2),
    Mutant("crossings", "for (; found < slots; ++found)", "for (; found < slots; found += 2)"),
    Mutant("crossings", "zf[n_channels + channel] = left", "zf[n_channels + channel] = 0.0f"),
    Mutant("crossings", "zf[channel] = status", "zf[channel] = UNDER"),
    Mutant("crossings", "start + i < n ? x[", "true ? x["),
    # Steps of cells.
    *(
        Mutant("recurrentcell", before, after, which, file=f"recurrentcell_{cell}.metal")
        for cell, before, after, which in [
            ("gru", _BARRIER, "", 0),
            ("gru", _BARRIER, "", 1),
            ("gru", "part > 0; part /= 2", "part > 1; part /= 2", 0),
            ("lstm", "k < 4; ++k", "k < 3; ++k", 0),
            ("gru", "if (index < part)", "if (index <= part)", 0),
            ("lstm", "if (index == 0)", "if (index <= 1)", 0),
            ("lstm", "word += THREADS", "word += THREADS + 1", 0),
            ("gru", "word << 16", "word", 0),
            ("gru", "0xffff0000u", "0xff000000u", 0),
            ("lstm", "word >> 8 & 255u", "word >> 8", 0),
            ("gru", "offset * (x[0] + x[1]", "offset * (x[0]", 0),
            ("lstm", "word * VALUES / GROUP", "word / GROUP", 0),
            ("gru", "gate * HIDDEN + row", "row", 0),
            ("lstm", "x[b * COLUMNS +", "x[", 0),
            ("gru", "total[gate * BATCH + b] +=", "total[gate * BATCH] +=", 0),
            ("gru", "bias[HIDDEN + unit]", "bias[unit]", 0),
            ("gru", "reset * inside", "inside", 0),
            ("gru", "+ bhn[unit]", "", 0),
            ("lstm", "kept * c[", "c[", 0),
            ("lstm", "hyperbolic_tangent(cell)", "cell", 0),
            ("gru", "of_hidden[2 * BATCH + b];", "of_hidden[2 * BATCH];", 0),
        ]
    ),
]
