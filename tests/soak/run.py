r"""Hours in minutes: the example's graph in three processes, with everything that goes wrong in a laboratory.

    source | AsArray(mlx) -> refuses every 100th -> the example's chain -> AsArray(numpy) | sink
                            and a spectrum and a band-pass beside it

Messages have 0 to 60 000 samples, now and then nothing comes for a while, settings change at run time, a monitor comes
and goes, and the sink is slow at times. It compares every value with SciPy in float64. The run is good if

- no sample is lost or comes twice but in messages that the unit refused, each of which is logged once,
- MLX's cache never holds more than its limit and one buffer,
- resident set and shared memory of no process grow from minute 2 to the end,
- the graph ends by itself, and leaves neither a process nor a segment of shared memory.

Ends with status 1 otherwise, and says what was not so.

    python tests/soak/run.py --minutes 15

With ``--json FILE`` the figures are written as a file of results. Start and end take up to a minute beside the minutes
that are asked for. Beside the package and what it depends on, it needs psutil and rich, on a GPU too; neither pytest
nor, on a GPU, numba.
"""

import argparse
import json
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

TESTS = pathlib.Path(__file__).parents[1]
# First: this folder has modules of its own.
sys.path[0:1] = [str(TESTS), str(TESTS.parent / "examples")]

from soak.figures import figures
from soak.observe import Observer, Visitor
from soak.verdict import print_table, problems

SETTLED_AFTER = 120.0
"""Seconds after which memory must not grow any more; a third of the run, if that is less."""

GRACE = 300.0
"""Seconds that the graph may take to start, to deliver what is under way, and to end, on a busy machine, too."""


def run_graph(options: argparse.Namespace) -> None:
    """The graph itself, in a process that nothing else runs in."""
    import ezmsg.core as ez

    from soak.chain import Chain
    from soak.settings import SoakSettings
    from soak.sink import Sink, SinkSettings
    from soak.source import Acquisition

    multiprocessing.set_start_method("spawn", force=True)
    settings = SoakSettings(
        folder=options.folder,
        seconds=60.0 * options.minutes,
        n_messages=options.messages,
        seed=options.seed,
        change_every=options.change_every,
        refuse_every=options.refuse_every,
        fault=options.fault,
    )
    acquisition, chain = Acquisition(settings), Chain(settings)
    sink = Sink(SinkSettings(options.folder, "sink", settings))
    ez.run(
        SOURCE=acquisition,
        CHAIN=chain,
        SINK=sink,
        # Without a unit of its own this process would run one of the three.
        IDLE=ez.Unit(),
        connections=(
            (acquisition.OUTPUT_SIGNAL, chain.INPUT_SIGNAL),
            (chain.OUTPUT_POWER, sink.INPUT_POWER),
            (chain.OUTPUT_FEATURES, sink.INPUT_FEATURES),
            (sink.OUTPUT_LIMIT, chain.INPUT_LIMIT),
            (sink.OUTPUT_POWER, chain.INPUT_POWER),
        ),
        process_components=(acquisition, chain, sink),
        graph_address=("127.0.0.1", options.port),
        auto_start=True,
    )


def soak(options: argparse.Namespace) -> int:
    """Run the graph in another process, watch it, and judge."""
    from helpers.ports import free_port

    seconds = 0.0 if options.messages else 60.0 * options.minutes
    # What a machine does in a short time depends on what else it does.
    settled_after = math.inf if options.messages else min(SETTLED_AFTER, seconds / 3)
    port = free_port()
    names = ("minutes", "messages", "seed", "change_every", "refuse_every", "fault")
    arguments = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *arguments, "--folder", folder, "--port", str(port)]
        log = open(pathlib.Path(folder) / "log", "w+")
        # That the source has to wait for the sink is what this is about.
        environment = os.environ | {"EZMSG_DISABLE_BACKPRESSURE_WARNING": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        observer = Observer(process.pid, pathlib.Path(folder), settled_after)
        visitor = Visitor(("127.0.0.1", port), pathlib.Path(folder), observer)
        threads = [threading.Thread(target=target, daemon=True) for target in (observer.run, visitor.run)]
        for thread in threads:
            thread.start()
        try:
            status = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            status = None
            observer.show_stacks()
        finally:
            observer.stop()
            for thread in threads:
                thread.join(10.0)
            left = observer.left()
            observer.clean_up()
        reports = {path.stem: json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")}
        log.seek(0)
        text = log.read()
    print_table(reports, observer, visitor, left)
    if options.json:
        made = figures(
            f"python tests/soak/run.py --minutes {options.minutes:g}", options.minutes, reports, observer, left
        )
        pathlib.Path(options.json).write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n")
    found = problems(status, reports, observer, visitor, left)
    for problem in found:
        print(f"NOT SO: {problem}", flush=True)
    if found:
        print(f"What the graph printed last:\n{text[-6000:]}")
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", metavar="M", type=float, default=15.0, help="wall time of the source [15]")
    text = "go by the number of messages instead, and leave out how memory grows [0: by time]"
    parser.add_argument("--messages", metavar="N", type=int, default=0, help=text)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another seed makes another stream [0]")
    text = "messages from one change of settings to the next [300]"
    parser.add_argument("--change-every", metavar="N", type=int, default=300, help=text)
    text = "messages from one that is refused to the next [100]"
    parser.add_argument("--refuse-every", metavar="N", type=int, default=100, help=text)
    text = "do one thing wrong, to see it found: lose, skip, repeat, hush, deaf, leak, cache, segment, process, hang"
    parser.add_argument("--fault", metavar="NAME", default="", help=text)
    text = "write the figures into this file, in the form of docs/results/data"
    parser.add_argument("--json", metavar="FILE", help=text)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        run_graph(options)
        return 0
    # Ended from outside, it takes the graph along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return soak(options)


if __name__ == "__main__":
    sys.exit(main())
