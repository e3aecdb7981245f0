"""The recipes of CONTRIBUTING.md, each walked with something made up: they name as many files as they have steps."""

import logging
import re
import sys
import types
from pathlib import Path

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.baseproc import BaseTransformer, BaseTransformerUnit
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace
from helpers.source_contract import SourceContract

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from helpers import chains

from ezmsg.mlx import ChainTransformer, kernels
from ezmsg.mlx.kernels import proof
from ezmsg.mlx.kernels.contract import Proof
from ezmsg.mlx.stream import device
from ezmsg.mlx.stream.fusible import FusedStage
from ezmsg.mlx.stream.unit import TransformerTakesSettings, UnitTakesSettings

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (Add .*?)\n\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
NUMBERS = {"One": 1, "Two": 2, "Three": 3, "Four": 4, "Five": 5, "Six": 6}


@pytest.mark.parametrize("name", RECIPES)
def test_there_are_as_many_steps_as_files(name):
    stated = RECIPES[name].split()[0]
    steps = re.findall(r"^(\d+)\. `", RECIPES[name], re.MULTILINE)
    assert [int(step) for step in steps] == list(range(1, NUMBERS[stated] + 1))


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_that_a_recipe_names_are_there(name):
    root = Path(__file__).parents[2]
    package = root / "src" / "ezmsg" / "mlx"
    paths = re.findall(r"`([a-z_/]+\.(?:py|pyi|toml))`", RECIPES[name])
    assert paths
    folders = [folder for base in (root, package) for folder in (base, base / "offline", base / "kernels")]
    for path in paths:
        assert any((folder / path).is_file() for folder in folders), path


# A recurrence: the sum of all samples so far, forgotten by a tenth with each.


def leaky_sum(x: np.ndarray, keep: float) -> np.ndarray:
    y, total = x.copy(), np.zeros(x.shape[1])
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        total[taken] = keep * total[taken] + sample[taken]
        result[taken] = total[taken]
    return y


def kernel_that_keeps(factor: float) -> types.ModuleType:
    """A module of kernels in plain operations, right with a *factor* of 1."""
    module = types.ModuleType("leakysum")

    def run(x, keep, zi, axis, chunk_sizes):
        total, rows = zi[0], []
        for sample in x:
            taken = mx.isfinite(sample)
            total = mx.where(taken, factor * keep * total + sample, total)
            rows.append(mx.where(taken, total, sample))
        return mx.stack(rows), mx.stack([total, mx.zeros_like(total)])

    module.run, module.compile_ahead = run, lambda coefficients, n_channels: None
    module.proofs = lambda: [Proof(0.9, (2,), leaky_sum)]
    return module


@pytest.fixture
def recurrence(monkeypatch):
    """The plain form of a new recurrence, on a machine that says it has Metal."""
    plain = kernel_that_keeps(1.0)
    monkeypatch.setitem(sys.modules, "ezmsg.mlx.kernels.plain.leakysum", plain)
    monkeypatch.setattr(device, "backend_in_use", lambda: "metal")
    kernels.kernel.cache_clear()
    yield plain
    kernels.kernel.cache_clear()


def test_a_new_recurrence_needs_no_kernel_of_each_backend(recurrence):
    assert kernels.kernel("leakysum", "metal") is recurrence


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.001, False)])
def test_a_kernel_of_a_new_recurrence_is_compared_with_its_own_reference(
    recurrence, monkeypatch, caplog, factor, is_right
):
    metal = kernel_that_keeps(factor)
    monkeypatch.setitem(sys.modules, "ezmsg.mlx.kernels.metal.leakysum", metal)
    with caplog.at_level(logging.WARNING):
        assert kernels.kernel("leakysum", "metal") is (metal if is_right else recurrence)
    assert ["'leakysum' for metal differs" in record.message for record in caplog.records] == [True] * (not is_right)
    assert (proof.difference_of("leakysum", metal, "metal") < 1e-5) == is_right


# A unit, and how a chain fuses it.


class HalveSettings(ez.Settings):
    factor: float = 0.5


class HalveTransformer(TransformerTakesSettings, BaseTransformer[HalveSettings, AxisArray, AxisArray]):
    def _process(self, message: AxisArray) -> AxisArray:
        return replace(message, data=message.data * self.settings.factor)

    def fuse(self, message: AxisArray) -> FusedStage:
        return FusedHalve(self, message)


class FusedHalve(FusedStage[HalveTransformer]):
    def apply(self, x, arrays, variant):
        return x * np.float32(self.transformer.settings.factor) if isinstance(x, np.ndarray) else x * 0.5, arrays


class Halve(UnitTakesSettings, BaseTransformerUnit[HalveSettings, AxisArray, AxisArray, HalveTransformer]):
    SETTINGS = HalveSettings


def test_a_new_unit_takes_settings_of_its_own_kind_and_the_same_fields():
    assert HalveTransformer(factor=0.25).settings == HalveSettings(0.25) == Halve(HalveSettings(0.25)).SETTINGS
    with pytest.raises(TypeError, match="'settings' must be .*HalveSettings"):
        HalveTransformer(settings=AxisArray)


def test_a_new_stage_is_fused_by_its_method():
    def stages() -> list[BaseTransformer]:
        return [chains.to_mlx(), HalveTransformer(), chains.to_numpy()]

    chain, reference = ChainTransformer(make_chain=stages), stages()
    for message in chains.stream([60] * 4):
        (expected,) = chains.one_by_one(reference, message)
        chains.assert_same(chain(message), expected)
    assert chain.describe().count("fused with stages 1 to 3") == 3


# A source of recordings.


class MadeUpSource:
    n_samples, sampling_rate, identity = 1000, 1000.0, "made up"

    def read(self, start: int):
        for begin in (start, *range(start // 300 * 300 + 300, self.n_samples, 300)):
            end = min(begin // 300 * 300 + 300, self.n_samples)
            data = np.arange(2 * begin, 2 * end, dtype=np.float32).reshape(-1, 2)
            yield AxisArray(data, ["time", "ch"], {"time": AxisArray.TimeAxis(fs=1000.0, offset=begin / 1000.0)})


class TestMadeUpSource(SourceContract):
    @pytest.fixture
    def source(self):
        return MadeUpSource()
