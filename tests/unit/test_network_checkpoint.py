"""Weights from files: those of PyTorch without PyTorch and without running their code, and what is damaged."""

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

from ezmsg.mlx.network import RecurrentStack
from ezmsg.mlx.network.checkpoint import flattened, from_pytorch, read_pytorch, read_weights, template_of
from ezmsg.mlx.network.model import Model

DATA = Path(__file__).parents[1] / "data"
CHECKPOINT = DATA / "torch_checkpoint.pt"


class Decoder(nn.Module):
    """That of make_torch_checkpoint.py."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 5, 3, padding=1)
        self.norm = nn.BatchNorm(5)
        self.rnn = RecurrentStack("GRU", 5, 8, 2)
        self.lstm = nn.LSTM(8, 8)
        self.attention = nn.MultiHeadAttention(8, 2, bias=True)
        self.heads = {"velocity": nn.Linear(8, 2)}

    def __call__(self, x):
        x, _ = self.rnn(self.norm(self.conv(x)))
        x, _ = self.lstm(x)
        return self.heads["velocity"](self.attention(x, x, x))


def model_of(path):
    return Model(Decoder, None, 6, str(path), "float32", None, True)


def test_a_checkpoint_of_pytorch_gives_the_results_of_pytorch():
    expected = np.load(DATA / "torch_results.npz")
    model = model_of(CHECKPOINT)
    y, state = model(model.weights, mx.array(expected["x"]))
    assert state is None
    np.testing.assert_allclose(np.array(y), expected["y"], atol=1e-6)


def test_pytorch_itself_gives_the_same_arrays():
    torch = pytest.importorskip("torch", reason="needs PyTorch, which is no dependency of the tests")
    expected = torch.load(CHECKPOINT, weights_only=True)["model_state_dict"]
    found = read_weights(CHECKPOINT)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name].numpy())


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_other_files_hold_the_same(tmp_path, suffix):
    arrays = {name: value for name, value in read_weights(CHECKPOINT).items() if value.ndim}
    path = tmp_path / f"w{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    else:
        mx.save_safetensors(str(path), {name: mx.array(value) for name, value in arrays.items()})
    one, other = model_of(path).weights, model_of(CHECKPOINT).weights
    assert one.keys() == other.keys() and all(mx.array_equal(one[name], other[name]) for name in one)


def rewritten(change, path):
    """The checkpoint with other bytes in its pickle."""
    with zipfile.ZipFile(CHECKPOINT) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            target.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return path


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("was_run"),))


def test_no_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = rewritten(lambda content: pickle.dumps({"a": Evil()}), tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="holds no weights that can be read: it asks for pathlib"):
        read_weights(evil)
    for module, name in (("os", "system"), ("torch.serialization", "load"), ("builtins", "eval")):
        call = f"c{module}\n{name}\n(X\x01\x00\x00\x00atR.".encode()
        with pytest.raises(ValueError, match=f"it asks for {module}.{name}"):
            read_weights(rewritten(lambda content, call=call: b"\x80\x02" + call, tmp_path / "evil.pt"))
    assert not Path("was_run").exists()


def test_a_tensor_that_reaches_beyond_its_storage_is_refused(tmp_path):
    # The bias of the last layer, two values, as twenty.
    with zipfile.ZipFile(CHECKPOINT) as file:
        content = file.read("torch_checkpoint/data.pkl")
    at = content.index(b"heads.velocity.bias")
    wrong = content[:at] + content[at:].replace(b"K\x02\x85", b"K\x14\x85", 1)
    assert wrong != content
    with pytest.raises(ValueError, match="a tensor reaches beyond its storage"):
        read_weights(rewritten(lambda _: wrong, tmp_path / "wrong.pt"))


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_damaged_files_are_refused(tmp_path, suffix):
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(100))
    mx.save_safetensors(str(tmp_path / "whole.safetensors"), {"a": mx.ones(100)})
    whole = {
        ".pt": CHECKPOINT.read_bytes(),
        ".npz": buffer.getvalue(),
        ".safetensors": (tmp_path / "whole.safetensors").read_bytes(),
    }[suffix]
    path = tmp_path / f"damaged{suffix}"
    for content in (b"", b"nothing", whole[: len(whole) // 2], pickle.dumps({"a": 1})):
        path.write_bytes(content)
        with pytest.raises((ValueError, OSError)):
            read_weights(path)


def test_trees_are_flattened():
    tree = {"layers": [{"w": np.ones(1)}, {"w": mx.ones(2)}], "bias": np.zeros(3)}
    assert [name for name, _ in flattened(tree)] == ["layers.0.w", "layers.1.w", "bias"]
    with pytest.raises(TypeError, match="layers.1 is a str"):
        dict(flattened({"layers": [np.ones(1), "b"]}))


def test_a_layer_with_half_of_its_weights_is_refused():
    arrays = read_weights(CHECKPOINT)
    del arrays["rnn.weight_hh_l1"]
    with pytest.raises(ValueError, match="rnn.weight_hh_l1 is missing beside rnn.weight_ih_l1"):
        from_pytorch(arrays, Decoder())


def test_a_state_dict_may_be_the_whole_file():
    content = read_pytorch(CHECKPOINT)
    assert content["config"] == {"hidden_size": 8} and "model_state_dict" in content
    assert "conv.weight" in template_of(Decoder(), None, mx.float32)
