"""Make torch_checkpoint.pt and torch_results.npz, which test_network_checkpoint.py reads; with PyTorch 2.13.

python tests/data/make_torch_checkpoint.py
"""

from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


class Decoder(torch.nn.Module):
    """The layers whose weights have other names or another order in MLX."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(6, 5, 3, padding=1)
        self.norm = torch.nn.BatchNorm1d(5)
        self.rnn = torch.nn.GRU(5, 8, 2, batch_first=True)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.heads = torch.nn.ModuleDict({"velocity": torch.nn.Linear(8, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x.swapaxes(1, 2))).swapaxes(1, 2)
        x, _ = self.lstm(self.rnn(x)[0])
        return self.heads["velocity"](self.attention(x, x, x)[0])


def main() -> None:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 9, 6)
    model(x).square().mean().backward()
    optimizer.step()
    model.eval()
    checkpoint = {
        "model_state_dict": model.state_dict(),
        "config": {"hidden_size": 8},
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(checkpoint, HERE / "torch_checkpoint.pt")
    with torch.no_grad():
        np.savez(HERE / "torch_results.npz", x=x.numpy(), y=model(x).numpy())


if __name__ == "__main__":
    main()
