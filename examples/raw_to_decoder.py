"""From raw samples to a decoded cursor, with bare transformers.

    source -> AsArray(mlx) -> band-pass 300 to 5000 Hz -> common reference
           -> counts: crossings -> bins of 20 ms
              power:  square -> bins of 20 ms -> log
           -> z-score -> linear decoder -> AsArray(numpy) -> cursor

256 simulated neurons fire as a cursor moves. The decoder is fitted offline, to
features of the first --train seconds in messages of a second. Then the rest
runs as it does in front of an amplifier, in messages of 1 ms. Counts and power
are branches of one stage; all stages are one function. --plot draws the cursor,
true and decoded, spikes, and the time that messages take. The same as an ezmsg
graph in real time is in raw_to_decoder_graph.py.

    pip install "ezmsg-mlx[cpu,examples]"
    python raw_to_decoder.py --plot cursor.png
"""

import argparse
import functools
import sys
import time

from support.cursor_recording import RATE, CursorRecording
from support.decoder_view import save_plot

import numpy as np
import numpy.typing as npt
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import CommonRereferenceTransformer
from ezmsg.sigproc.binned_aggregate import BinnedAggregateTransformer
from ezmsg.sigproc.math.log import LogTransformer
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import (
    AdaptiveStandardScalerTransformer,
    AsArrayTransformer,
    BinnedEventAggregator,
    ButterworthFilterTransformer,
    ChainTransformer,
    LinearRegressorSettings,
    LinearRegressorTransformer,
    Parallel,
    PowTransformer,
    ThresholdCrossingTransformer,
    run_chain,
)

BIN = 0.02
"""Seconds of a decoded position."""

SETTLING = 2.0
"""Seconds at the beginning that are not learned from: until then thresholds and z-scores move."""

WARM_UP = 5.0
"""Seconds before those that are decoded, for thresholds and z-scores to be where they belong."""


def to_band() -> list[BaseTransformer]:
    """From int16 counts (time, ch) to the band of the spikes, without what all channels have alike."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        ButterworthFilterTransformer(order=2, cuton=300.0, cutoff=5000.0, coef_type="sos"),
        CommonRereferenceTransformer(),
    ]


def crossings(output_format: str) -> ThresholdCrossingTransformer:
    """Spikes: each channel against 4.5 deviations of its own noise, which spikes hardly move."""
    return ThresholdCrossingTransformer(
        threshold=-4.5, auto_scale_tau=2.0, auto_scale="mad", output_format=output_format
    )


def make_chain(decoder: LinearRegressorSettings | None = None) -> dict[str, BaseTransformer]:
    """The stages, to float32 positions (bin, 2); without a *decoder* to z-scores (bin, 2 * ch)."""
    counts = [crossings("dense"), BinnedEventAggregator(bin_duration=BIN, scale_output=False)]
    power = [PowTransformer(exponent=2.0), BinnedAggregateTransformer(bin_duration=BIN), LogTransformer(clip_zero=True)]
    to_mlx, band, reference = to_band()
    stages = {
        "to_mlx": to_mlx,
        "band": band,
        "reference": reference,
        "features": Parallel({"counts": counts, "power": power}, axis="ch"),
        "score": AdaptiveStandardScalerTransformer(time_constant=10.0),
    }
    if decoder is not None:
        stages["decoder"] = LinearRegressorTransformer(decoder)
    return {**stages, "to_numpy": AsArrayTransformer(backend="numpy")}


def fitted(recording: CursorRecording, seconds: float) -> LinearRegressorSettings:
    """A decoder for *recording*: ridge regression of the cursor on the features of its first *seconds*."""
    chain = ChainTransformer(make_chain=make_chain)
    messages = run_chain(chain, recording.messages(0.0, seconds, n_samples=round(RATE)))
    results = [message for message in messages if len(message.data)]
    features = np.concatenate([result.data for result in results]).astype(float)
    # A bin is named after its beginning.
    times = results[0].axes["time"].offset + BIN * (np.arange(len(features)) + 0.5)
    learned = times > SETTLING
    x = np.column_stack([features[learned], np.ones(learned.sum())])
    penalty = 0.1 * len(x) * np.diag([1.0] * features.shape[1] + [0.0])
    weights = np.linalg.solve(x.T @ x + penalty, x.T @ recording.cursor(times[learned]))
    return LinearRegressorSettings(weights[:-1], weights[-1], labels=("x", "y"), key="cursor")


def spikes_of(recording: CursorRecording, start: float, stop: float) -> tuple[npt.NDArray, npt.NDArray]:
    """Times and channels of the crossings, as sparse events."""
    chain = [*to_band(), crossings("sparse"), AsArrayTransformer(backend="numpy")]
    times, channels = [], []
    for message in run_chain(chain, recording.messages(start, stop, n_samples=3000)):
        samples, found = message.data.coords
        times.append(message.axes["time"].offset + samples / RATE)
        channels.append(found)
    return np.concatenate(times), np.concatenate(channels)


def report(recording: CursorRecording, decoded: list[AxisArray], latencies: list[float], what: str) -> tuple:
    """Print how well the cursor was decoded and how long it took; what :func:`save_plot` draws of it."""
    positions = np.concatenate([message.data for message in decoded])
    times = decoded[0].axes["time"].offset + BIN * (np.arange(len(positions)) + 0.5)
    true = recording.cursor(times)
    for number, name in enumerate("xy"):
        correlation = np.corrcoef(true[:, number], positions[:, number])[0, 1]
        print(f"cursor {name}: correlation {correlation:.3f}")
    middle, late, longest = 1e3 * np.percentile(latencies, [50, 99, 100])
    print(f"{what}: median {middle:.2f} ms, 99 % {late:.2f} ms, longest {longest:.2f} ms")
    return times, true, positions


def parse_options(doc: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=float, default=30.0, metavar="S", help="seconds to fit the decoder to [30]")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="seconds to decode after that [10]")
    parser.add_argument("--channels", type=int, default=256, metavar="N", help="[256]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the recording [0]")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the cursor, spikes and latencies")
    options = parser.parse_args()
    if options.channels < 1 or options.train <= SETTLING + 1.0 or options.seconds < 1.0:
        parser.error(f"--channels must be 1 or more, --train above {SETTLING + 1:g} and --seconds 1 or more")
    return options


def main() -> int:
    options = parse_options(__doc__)
    recording = CursorRecording(options.channels, options.seed)
    decoder = fitted(recording, options.train)
    chain = ChainTransformer(make_chain=functools.partial(make_chain, decoder))
    start, stop = options.train, options.train + options.seconds
    for message in recording.messages(max(start - WARM_UP, 0.0), start, n_samples=30):
        chain(message)
    decoded, took = [], []
    for message in recording.messages(start, stop, n_samples=30):
        began = time.perf_counter()
        result = chain(message)
        took.append(time.perf_counter() - began)
        if len(result.data):
            decoded.append(result)
    print(chain.describe())
    drawn = report(recording, decoded, took, "time of a message of 1 ms")
    if options.plot:
        spikes = spikes_of(recording, start, stop)
        save_plot(options.plot, *drawn, spikes, 1e3 * np.array(took), "time of a message of 1 ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
