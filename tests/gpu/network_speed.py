"""A network on a GPU, beside what it is held to: ``python tests/gpu/network_speed.py --out FOLDER``.

The decoder of the nejm brain-to-text study: 5 GRU layers of 768, 512 features in patches of 14 with a hop of 4, 32
million parameters, random weights. A step goes from NumPy on the host to NumPy on the host. In turns: :obj:`Network`
with weights of 32, 16 and 8 bits; ``mlx.nn`` as it is and compiled; PyTorch as it is and as one CUDA graph, where it is
installed, with the same weights. Then whether results agree, what a message waits while weights are exchanged, and a
step of ring attention early and late. Under two minutes. On the CPU beside one NumPy product with as many weights;
``--quick`` to see that it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

N_FEATURES, PATCH, HOP, RATE = 512, 14, 4, 50.0
Step = Callable[[np.ndarray], np.ndarray]


def sizes(quick: bool) -> dict[str, int]:
    return {"hidden_size": 64 if quick else 768, "num_layers": 2 if quick else 5, "output_size": 41}


def network(kwargs: dict[str, int], **settings: object) -> tuple[object, Step]:
    import mlx.core as mx

    import ezmsg.mlx as mlx

    mx.random.seed(0)
    transformer = mlx.NetworkTransformer(
        model_class="ezmsg.mlx.network.RecurrentDecoder",
        model_kwargs={**kwargs, "patch": PATCH},
        window=PATCH,
        hop=HOP,
        **settings,
    )
    transformer.prepare(N_FEATURES)
    position = 0

    def step(samples: np.ndarray) -> np.ndarray:
        nonlocal position
        axes = {"time": AxisArray.TimeAxis(fs=RATE, offset=position / RATE)}
        position += len(samples)
        outputs = transformer(AxisArray(samples, ["time", "ch"], axes=axes))
        return outputs[0].data[-1] if outputs else np.empty(0)

    return transformer, step


def windowed(run: Step) -> Step:
    """*run* on the last PATCH samples, of shape (1, 1, PATCH * features)."""
    kept = np.zeros((0, N_FEATURES), np.float32)

    def step(samples: np.ndarray) -> np.ndarray:
        nonlocal kept
        kept = np.concatenate([kept, samples])[-PATCH:]
        return run(kept.reshape(1, 1, -1)) if len(kept) == PATCH else np.empty(0)

    return step


def mlx_nn(weights: dict[str, object], kwargs: dict[str, int], compiled: bool) -> Step:
    import mlx.core as mx
    import mlx.nn as nn

    layers = []
    for number in range(kwargs["num_layers"]):
        layer = nn.GRU(1, 1)
        layer.update({name: weights[f"rnn.layers.{number}.{name}"] for name in ("Wx", "Wh", "b", "bhn")})
        layer.hidden_size = kwargs["hidden_size"]
        layers.append(layer)
    head = nn.Linear(1, 1)
    head.update({name: weights[f"heads.output.{name}"] for name in ("weight", "bias")})

    def forward(x: mx.array, states: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        after = []
        for layer, state in zip(layers, states, strict=True):
            x = layer(x, state)
            after.append(x[:, -1])
        return head(x)[0, -1], after

    call = mx.compile(forward) if compiled else forward
    states = [mx.zeros((1, kwargs["hidden_size"])) for _ in layers]

    def run(x: np.ndarray) -> np.ndarray:
        nonlocal states
        y, states = call(mx.array(x), states)
        mx.eval(y, states)
        return np.array(y)

    return windowed(run)


def pytorch(weights: dict[str, object], kwargs: dict[str, int], graph: bool, half: bool = False) -> Step | None:
    try:
        import torch
    except ImportError:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if graph and device.type == "cpu":
        return None
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    hidden = kwargs["hidden_size"]
    rnn = torch.nn.GRU(N_FEATURES * PATCH, hidden, kwargs["num_layers"], batch_first=True)
    head = torch.nn.Linear(hidden, kwargs["output_size"])
    of_torch = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
    with torch.no_grad():
        for number in range(kwargs["num_layers"]):
            of = f"rnn.layers.{number}."
            getattr(rnn, f"weight_ih_l{number}").copy_(of_torch[of + "Wx"])
            getattr(rnn, f"weight_hh_l{number}").copy_(of_torch[of + "Wh"])
            getattr(rnn, f"bias_ih_l{number}").copy_(of_torch[of + "b"])
            getattr(rnn, f"bias_hh_l{number}").zero_()
            getattr(rnn, f"bias_hh_l{number}")[2 * hidden :] = of_torch[of + "bhn"]
        head.weight.copy_(of_torch["heads.output.weight"])
        head.bias.copy_(of_torch["heads.output.bias"])
    dtype = torch.bfloat16 if half else torch.float32
    rnn, head = rnn.to(device, dtype).eval(), head.to(device, dtype).eval()
    pinned = device.type == "cuda"
    host_in = torch.empty((1, 1, N_FEATURES * PATCH), pin_memory=pinned)
    host_out = torch.empty(kwargs["output_size"], pin_memory=pinned)
    x = torch.zeros((1, 1, N_FEATURES * PATCH), device=device, dtype=dtype)
    state = torch.zeros((kwargs["num_layers"], 1, hidden), device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        y, after = rnn(x, state)
        state.copy_(after)
        return head(y)[0, -1].float()

    with torch.no_grad():
        if graph:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    forward()
            torch.cuda.synchronize()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                result = forward()
            state.zero_()

    def run(samples: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            host_in.copy_(torch.from_numpy(samples))
            x.copy_(host_in, non_blocking=True)
            if graph:
                recorded.replay()
                y = result
            else:
                y = forward()
            host_out.copy_(y, non_blocking=True)
            if pinned:
                torch.cuda.synchronize()
            return host_out.numpy().copy()

    return windowed(run)


def numpy_product(weights: dict[str, object]) -> Step:
    """One product with as many weights as there are, which reads each of them once."""
    n_rows = sum(array.size for array in weights.values()) // 768
    matrix = np.random.default_rng(0).standard_normal((n_rows, 768), np.float32)
    x, y = matrix[0].copy(), np.empty(n_rows, np.float32)
    return lambda samples: np.dot(matrix, x, out=y)[:41]


def summary(seconds: list[float]) -> dict[str, float]:
    micros = np.array(seconds) * 1e6
    return {"p50": float(np.median(micros)), "p99": float(np.quantile(micros, 0.99)), "least": float(micros.min())}


ROUNDS = 4


def in_turns(steps: dict[str, Step], n_steps: int) -> tuple[dict[str, dict[str, float]], dict[str, list[np.ndarray]]]:
    """Each in its turn, some steps at a time; the first round counts for the results alone."""
    generator = np.random.default_rng(0)
    # The first window at once, so that all have windows at the same places.
    lengths = [PATCH, *[HOP] * (n_steps - 1)]
    stream = [generator.standard_normal((length, N_FEATURES)).astype(np.float32) for length in lengths]
    times: dict[str, list[float]] = {name: [] for name in steps}
    results: dict[str, list[np.ndarray]] = {name: [] for name in steps}
    for number, part in enumerate(np.array_split(np.arange(n_steps), ROUNDS)):
        for name, step in steps.items():
            # A BLAS goes on looking for work for a while, on a core that the next one needs.
            time.sleep(0.1)
            for index in part:
                begin = time.perf_counter()
                y = step(stream[index])
                if number:
                    times[name].append(time.perf_counter() - begin)
                results[name].append(y)
    return {name: summary(of) for name, of in times.items()}, results


def parts_of_a_step(transformer: object, n_steps: int) -> dict[str, dict[str, float]]:
    """Where the time of a step goes: upload, the call that makes the graph, its start, the wait and the reading."""
    import mlx.core as mx

    from ezmsg.mlx.stream.convert import begin_reading

    model = transformer._model
    window = np.zeros((1, PATCH, N_FEATURES), np.float32)
    state = transformer.state.of_model
    times: dict[str, list[float]] = {name: [] for name in ("upload", "call", "start", "wait and read", "all")}
    for _ in range(n_steps):
        marks = [time.perf_counter()]
        x = mx.array(window)
        marks.append(time.perf_counter())
        y, state = model(model.weights, x, state)
        marks.append(time.perf_counter())
        unread = begin_reading(y, beside=state)
        marks.append(time.perf_counter())
        unread.read()
        marks.append(time.perf_counter())
        for name, (begin, end) in zip(times, itertools.pairwise(marks), strict=False):
            times[name].append(end - begin)
        times["all"].append(marks[-1] - marks[0])
    return {name: summary(of) for name, of in times.items()}


def exchange(transformer: object, step: Step, n_steps: int) -> dict[str, float]:
    """What messages take while weights are exchanged, from a tree in memory and from a file, at 20 ms a message."""
    import tempfile

    import mlx.core as mx

    template = transformer._model.template
    tree = {name: np.full(weight.shape, 0.01, np.float32) for name, weight in template.items()}
    found: dict[str, float] = {}
    samples = np.zeros((HOP, N_FEATURES), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "weights.safetensors"))
        mx.save_safetensors(path, {name: mx.array(value) for name, value in tree.items()})
        for name, weights in (("none", None), ("tree", tree), ("file", path)):
            loading = transformer.exchange_weights(weights) if weights is not None else None
            seconds: list[float] = []
            while len(seconds) < n_steps or (loading is not None and not loading.done()):
                begin = time.perf_counter()
                step(samples)
                seconds.append(time.perf_counter() - begin)
                time.sleep(0.002)
            found |= {f"{name} {key}": value for key, value in summary(seconds).items()}
            found[f"{name} largest"] = max(seconds) * 1e6
            found[f"{name} messages"] = len(seconds)
    return found


def ring_steps(late: int, n_steps: int) -> dict[str, dict[str, float]]:
    """A step of ring attention, after few and after *late* samples."""
    import mlx.core as mx

    from ezmsg.mlx.network import RingAttention

    attention = RingAttention(256, n_heads=8, size=512)
    mx.eval(attention.parameters())
    call = mx.compile(attention) if mx.default_device().type == mx.gpu else attention
    x, found = mx.random.normal((1, 1, 256)), {}
    _, state = attention(x)
    for name, n_before in (("step 1 on", 0), (f"step {late} on", late)):
        for number in range(n_before):
            _, state = call(x, state)
            if number % 16 == 0:
                mx.eval(state)
        seconds = []
        for _ in range(n_steps):
            begin = time.perf_counter()
            y, state = call(x, state)
            mx.eval(y, state)
            seconds.append(time.perf_counter() - begin)
        found[name] = {**summary(seconds), "cache_mb": mx.get_cache_memory() / 2**20}
    return found


def measure(quick: bool, only_ours: bool) -> dict[str, object]:
    import mlx.core as mx

    on_cpu = mx.default_device().type == mx.cpu
    kwargs, n_steps = sizes(quick), 60 if quick else 120 if on_cpu else 600
    transformer, ours = network(kwargs)
    weights = transformer._model.weights
    steps: dict[str, Step | None] = {"Network": ours, "Network, bfloat16": network(kwargs, dtype="bfloat16")[1]}
    try:
        steps["Network, 8 bits"] = network(kwargs, quantize=8)[1]
    except Exception as error:
        print(f"8 bits: {type(error).__name__}: {error}", file=sys.stderr)
    if on_cpu:
        steps["NumPy, one product"] = numpy_product(weights)
    if not only_ours:
        steps |= {"mlx.nn": mlx_nn(weights, kwargs, False), "mlx.nn, compiled": mlx_nn(weights, kwargs, True)}
        steps["PyTorch"] = pytorch(weights, kwargs, graph=False)
        steps["PyTorch, CUDA graph"] = pytorch(weights, kwargs, graph=True)
        steps["PyTorch, CUDA graph, bfloat16"] = pytorch(weights, kwargs, graph=True, half=True)
    present = {name: step for name, step in steps.items() if step is not None}
    times, results = in_turns(present, n_steps)
    found: dict[str, object] = {"on_cpu": on_cpu, "times": times, "parts": parts_of_a_step(transformer, n_steps)}
    expected = np.stack([y for y in results["Network"] if y.size])
    found["differences"] = {
        name: float(np.abs(np.stack([y for y in of if y.size]) - expected).max())
        for name, of in results.items()
        if not name.startswith("NumPy")
    }
    if not only_ours:
        found["exchange"] = exchange(transformer, ours, 50 if quick else 500)
        found["ring"] = ring_steps(200 if quick else 2_000 if on_cpu else 20_000, n_steps)
    return found


def write_page(path: Path, found: dict[str, object], quick: bool) -> None:
    """The figures for docs/results/data."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
    from results_file import LIVE, write_results

    rows = [{"name": name, "p50": of["p50"], "p99": of["p99"]} for name, of in found["times"].items()]
    write_results(
        path,
        title="A step of a recurrent decoder of 32 million parameters",
        command="python tests/gpu/network_speed.py --out FOLDER" + " --quick" * quick,
        spread="Medians and 99th percentiles of the steps of one run, in turns",
        columns=[("", "name", None), ("step, µs", "p50", 0), ("99 of 100 below, µs", "p99", 0)],
        rows=rows,
        notes=["5 GRU layers of 768, 512 features in patches of 14, from NumPy on the host to NumPy on the host."],
        packages=LIVE,
        state="settled",
    )


def parts_of_one_launch(transformer: object, n_steps: int) -> dict[str, dict[str, float]]:
    """Where the time of a step in one launch goes: copying the window, the launch, the wait, and the reading."""
    import mlx.core as mx

    from ezmsg.mlx.network.unit import _uploaded
    from ezmsg.mlx.stream.hostmemory import device_memory

    model, state = transformer._model, transformer.state.of_model
    window = np.zeros((1, PATCH, N_FEATURES), np.float32)
    times: dict[str, list[float]] = {name: [] for name in ("upload", "launch", "wait", "read", "all of these")}
    for _ in range(n_steps):
        staged, marks = [], [time.perf_counter()]
        x = _uploaded(window, staged)
        marks.append(time.perf_counter())
        (_, unread), state = model.begin(model.weights, x, state)
        marks.append(time.perf_counter())
        mx.eval(unread._done)
        marks.append(time.perf_counter())
        unread.read()
        marks.append(time.perf_counter())
        [device_memory().give_back(block) for block in staged]
        for name, (begin, end) in zip(times, itertools.pairwise(marks), strict=False):
            times[name].append(end - begin)
        times["all of these"].append(marks[-1] - marks[0])
    return {name: summary(of) for name, of in times.items()}


def kernel_alone(transformer: object, n_steps: int) -> dict[str, float]:
    """Microseconds of a launch among many, of which one waits for the one before: what the device takes."""
    import mlx.core as mx

    model, state = transformer._model, transformer.state.of_model
    step = model.in_one_launch(model.weights)
    x = mx.zeros((1, PATCH, N_FEATURES))
    mx.eval(x)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(n_steps):
            y, state = step(x, state)
            mx.async_eval(y)
        mx.eval(y, state)
        seconds.append((time.perf_counter() - begin) / n_steps)
    return summary(seconds)


def take_best_sizes(say: Callable[..., None]) -> None:
    import stack_sizes

    from ezmsg.mlx.kernels.cuda import recurrentcell

    times = stack_sizes.measured()
    for choice, microseconds in times.items():
        say(f"units {choice[0]}, first {choice[1]}, rounds {choice[2]}, near {choice[3]}: {microseconds:.1f}")
    units, first, *_ = next(choice for choice in times if choice[2:] == (2, 6144))
    recurrentcell.UNITS, recurrentcell.LONG_UNITS = units, first


def brief(quick: bool, tuned: bool) -> None:
    """The figures that matter most, printed as they come, with kernels taken as proved."""
    begin = time.perf_counter()

    def say(*words: object) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s", *words, flush=True)

    def rows(found: dict[str, dict[str, float]]) -> None:
        for name, of in found.items():
            say(f"{name:32} {of['p50']:9.1f} {of['p99']:9.1f} {of['least']:9.1f}")

    import mlx.core as mx

    from ezmsg.mlx.kernels import proof
    from ezmsg.mlx.kernels.cuda import recurrentcell

    # They have been in the tests, and take half a minute.
    proof.holds = lambda *_: True  # type: ignore[assignment]
    if tuned:
        take_best_sizes(say)
    kwargs, n_steps = sizes(quick), 60 if quick else 400
    on_gpu = mx.default_device().type == mx.gpu
    transformer, ours = network(kwargs)
    say("Network is made")
    if on_gpu and transformer._model._step is None:
        say("A STEP IS NOT ONE LAUNCH")
    weights = transformer._model.weights
    stack, recurrentcell.stack = recurrentcell.stack, lambda *_: None
    a_layer = network(kwargs)[1]
    recurrentcell.stack = stack
    steps: dict[str, Step | None] = {
        "Network": ours,
        "Network, a launch a layer": a_layer,
        "PyTorch, CUDA graph": pytorch(weights, kwargs, graph=True),
        "mlx.nn, compiled": mlx_nn(weights, kwargs, True),
    }
    steps = {name: step for name, step in steps.items() if step is not None}
    times, results = in_turns(steps, n_steps)
    say("microseconds, p50, p99, least")
    rows(times)
    if on_gpu and transformer._model._step is not None:
        rows({f"  {k}": v for k, v in parts_of_one_launch(transformer, n_steps).items()})
        rows({"  launches in a row": kernel_alone(transformer, n_steps)})
    outputs = [np.stack([y for y in of if y.size]) for of in results.values()]
    say("largest difference:", [f"{np.abs(row - outputs[0]).max():.1e}" for row in outputs])
    say("while weights are exchanged:", {k: round(v, 1) for k, v in exchange(transformer, ours, 200).items()})
    others = {"8 bits": {"quantize": 8}, "bfloat16": {"dtype": "bfloat16"}}
    made = {f"Network, {name}": network(kwargs, **settings) for name, settings in others.items()}
    rows(in_turns({name: step for name, (_, step) in made.items()}, n_steps)[0])
    if on_gpu:
        rows({f"  {name}, launches in a row": kernel_alone(of, n_steps) for name, (of, _) in made.items()})


def in_child(arguments: list[str], graphs: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env={**os.environ, "MLX_USE_CUDA_GRAPHS": graphs},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stderr)
    sys.stderr.write(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for network.json")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--brief", action="store_true", help="Network beside PyTorch's graph alone, in half a minute")
    parser.add_argument(
        "--tuned", action="store_true", help="first look for the best sizes of the kernel, and take these"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.brief:
        # Read when MLX first computes on the GPU.
        os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
        brief(options.quick, options.tuned)
        return
    if options.child:
        print(json.dumps(measure(options.quick, options.ours)))
        return
    quick = ["--quick"] if options.quick else []
    one_by_one = in_child(quick, "0")
    with_graphs = in_child([*quick, "--ours"], "1") if not one_by_one["on_cpu"] else one_by_one
    print(f"{platform.node()}: a step from host to host, microseconds", "(p50, p99, least)")
    for title, found in (("kernels one by one", one_by_one), ("MLX's CUDA graphs", with_graphs)):
        print(title)
        for name, of in {**found["times"], **{f"  {k}": v for k, v in found["parts"].items()}}.items():
            print(f"  {name:32} {of['p50']:9.1f} {of['p99']:9.1f} {of['least']:9.1f}")
    print("largest difference from Network:", {k: f"{v:.1e}" for k, v in one_by_one["differences"].items()})
    print("while weights are exchanged:", {k: round(v, 1) for k, v in one_by_one["exchange"].items()})
    print("ring attention:", one_by_one["ring"])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"one_by_one": one_by_one, "with_graphs": with_graphs}
        (options.out / "network.json").write_text(json.dumps(found, indent=1))
        write_page(options.out / "network_page.json", one_by_one, options.quick)


if __name__ == "__main__":
    main()
