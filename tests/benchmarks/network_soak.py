"""A graph with the decoder of the nejm brain-to-text study, with stalls: ``python tests/benchmarks/network_soak.py``.

512 features at 50 Hz in messages of 4 samples, in real time, in a process of their own. Every few seconds a stall,
after which everything unread arrives as one message, of a length not seen before. New weights every minute. Looks at
the memory of the process that decodes each second, and that each window had its result, at its time.

    python tests/benchmarks/network_soak.py --minutes 10 --out FILE.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
import typing
from pathlib import Path

import ezmsg.core as ez
import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import Network, NetworkSettings, memory_snapshot

N_FEATURES, RATE, STEP, PATCH, HOP = 512, 50.0, 4, 14, 4
MODEL = {"input_size": N_FEATURES, "hidden_size": 768, "num_layers": 5, "output_size": 41, "patch": PATCH}


class SourceSettings(ez.Settings):
    n_samples: int
    stall_every: float = 4.0


class Source(ez.Unit):
    SETTINGS = SourceSettings
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def run(self) -> typing.AsyncGenerator:
        generator, sent, start = np.random.default_rng(0), 0, time.monotonic()
        next_stall, n_stalls = self.SETTINGS.stall_every, 0
        channels = AxisArray.CoordinateAxis(data=np.arange(N_FEATURES).astype(str), dims=["ch"])
        while sent < self.SETTINGS.n_samples:
            if time.monotonic() - start > next_stall:
                n_stalls += 1
                # Another length each time, up to two seconds.
                await asyncio.sleep(0.2 + 1.8 * (n_stalls * 0.618 % 1.0))
                next_stall += self.SETTINGS.stall_every
            due = min(int((time.monotonic() - start) * RATE), self.SETTINGS.n_samples) - sent
            if due < STEP and sent + due < self.SETTINGS.n_samples:
                await asyncio.sleep((STEP - due) / RATE)
                continue
            data = generator.standard_normal((due, N_FEATURES)).astype(np.float32)
            axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=sent / RATE), "ch": channels}
            sent += due
            yield self.OUTPUT_SIGNAL, AxisArray(data, ["time", "ch"], axes=axes)


class WeightsSettings(ez.Settings):
    folder: str
    every: float = 60.0


class NewWeights(ez.Unit):
    SETTINGS = WeightsSettings
    OUTPUT_WEIGHTS = ez.OutputStream(typing.Any)

    @ez.publisher(OUTPUT_WEIGHTS)
    async def run(self) -> typing.AsyncGenerator:
        import mlx.core as mx
        from mlx.utils import tree_flatten

        from ezmsg.mlx.network import RecurrentDecoder

        path = str(Path(self.SETTINGS.folder, "weights.safetensors"))
        mx.save_safetensors(path, dict(tree_flatten(RecurrentDecoder(**MODEL).parameters())))
        while True:
            await asyncio.sleep(self.SETTINGS.every)
            yield self.OUTPUT_WEIGHTS, path


class SinkSettings(ez.Settings):
    n_results: int
    out: str


class Sink(ez.Unit):
    """In the process of the decoder, whose memory it looks at."""

    SETTINGS = SinkSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.found: dict[str, typing.Any] = {"n_results": 0, "out_of_time": 0, "not_finite": 0, "memory": []}
        self.next_time = (PATCH - 1) / RATE
        self.last_look = self.began_at = time.monotonic()

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        found = self.found
        found["out_of_time"] += abs(message.axes["time"].offset - self.next_time) > 1e-6
        found["not_finite"] += not np.isfinite(message.data).all()
        found["n_results"] += len(message.data)
        self.next_time += len(message.data) * HOP / RATE
        now = time.monotonic()
        is_last = found["n_results"] >= self.SETTINGS.n_results
        if now - self.last_look >= 1.0 or is_last:
            self.last_look = now
            memory = memory_snapshot()
            found["memory"].append([now - self.began_at, memory.resident_set, memory.mlx_active, memory.mlx_cache])
        if is_last:
            Path(self.SETTINGS.out).write_text(json.dumps(found))
            raise ez.NormalTermination


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", default="network_soak.json")
    options = parser.parse_args()
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    n_samples = int(options.minutes * 60 * RATE)
    n_results = (n_samples - PATCH) // HOP + 1
    model = NetworkSettings(model_class="ezmsg.mlx.network.RecurrentDecoder", model_kwargs=MODEL, window=PATCH, hop=HOP)
    folder = str(Path(options.out).resolve().parent)
    source, network = Source(SourceSettings(n_samples)), Network(model)
    weights, sink = NewWeights(WeightsSettings(folder)), Sink(SinkSettings(n_results, options.out))
    ez.run(
        SOURCE=source,
        WEIGHTS=weights,
        NETWORK=network,
        SINK=sink,
        connections=(
            (source.OUTPUT_SIGNAL, network.INPUT_SIGNAL),
            (weights.OUTPUT_WEIGHTS, network.INPUT_WEIGHTS),
            (network.OUTPUT_SIGNAL, sink.INPUT_SIGNAL),
        ),
        process_components=(source,),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )
    found = json.loads(Path(options.out).read_text())
    memory = np.array(found["memory"])
    settled = memory[memory[:, 0] > memory[-1, 0] / 10]
    print(
        f"{found['n_results']} of {n_results} results, {found['out_of_time']} at another time, "
        f"{found['not_finite']} not finite"
    )
    for name, column in zip(("RSS", "MLX active", "MLX cache"), settled[:, 1:].T, strict=True):
        half = len(column) // 2
        halves = f"median of the halves {np.median(column[:half]):.1f} and {np.median(column[half:]):.1f}"
        print(f"{name}: {halves}, from {column.min():.1f} to {column.max():.1f} MiB")


if __name__ == "__main__":
    main()
