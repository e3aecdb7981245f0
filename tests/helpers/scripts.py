"""A script at work: what it prints, which processes and shared memory it has, and whether it leaves any behind."""

import contextlib
import os
import pathlib
import subprocess

import psutil
import pytest

from .examples import EXAMPLES
from .warm import TIME_LIMIT, end_with_stacks, start

SHARED_MEMORY = pathlib.Path("/dev/shm")


class Script:
    """A script at work, in a session of its own, as a terminal starts it; see :func:`.warm.start`."""

    def __init__(self, *arguments: str, spawns_anew: bool = False) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EZMSG_")}
        self.process = start(arguments, environment=environment, folder=EXAMPLES, spawns_anew=spawns_anew)
        self.pid = self.process.pid
        self.out = ""
        self.segments: set[str] = set()

    def read_until(self, text: str) -> None:
        for line in self.process.stdout:
            self.out += line
            if text in line:
                return
        pytest.fail(f"It ended without {text!r}: {self.process.stderr.read()}")

    def processes(self) -> list[psutil.Process]:
        """All processes of the session, those that have lost their parent too."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def note_segments(self) -> None:
        """Remember the segments of shared memory that the processes hold by now."""
        for process in self.processes() if SHARED_MEMORY.is_dir() else ():
            try:
                paths = [pathlib.Path(region.path) for region in process.memory_maps()]
            except psutil.NoSuchProcess:
                continue
            self.segments |= {path.name for path in paths if path.parent == SHARED_MEMORY}

    def finish(self) -> tuple[int, str, str]:
        """Exit code, all that it printed to stdout, and to stderr."""
        try:
            out, err = self.process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            out, err = end_with_stacks(self.process)
            pytest.fail(f"It did not end within {TIME_LIMIT:g} s.\n{self.out}{out}{err}", pytrace=False)
        self.out += out
        return self.process.returncode, self.out, err

    def assert_nothing_left(self) -> None:
        # Python's resource tracker ends on its own once all pipes to it are closed.
        _, alive = psutil.wait_procs(self.processes(), timeout=TIME_LIMIT)
        assert [process for process in alive if process in self.processes()] == []
        assert [name for name in sorted(self.segments) if (SHARED_MEMORY / name).exists()] == []

    def kill(self) -> None:
        for process in self.processes():
            # Not the resource tracker, which removes the shared memory of the others.
            with contextlib.suppress(psutil.NoSuchProcess):
                if not any("resource_tracker" in argument for argument in process.cmdline()):
                    process.kill()
        self.process.communicate()
