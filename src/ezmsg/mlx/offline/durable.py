"""Folders that one process writes at a time, and that are on the disk when they are said to be."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

_SECONDS_BETWEEN_TRIES = 0.2


def lock_folder(folder: Path, wait: float, what: Path) -> int:
    """Make *folder* if need be, and lock the file ``lock`` in it.

    Whoever has the lock may remove the folder. The system unlocks it when the process ends, in whatever way.

    Args:
        folder: Of what one process at a time may write.
        wait: Seconds to wait for another process.
        what: What is being written, for the error.

    Returns:
        The file descriptor that holds the lock until it is closed.

    Raises:
        BlockingIOError: Another process has the lock, and still has it after *wait* seconds.
        OSError: The file system has no locks.
    """
    deadline = time.monotonic() + wait
    path = folder / "lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed it together with the folder.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(path)):
                    return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise BlockingIOError(f"{what} is being written by another process.") from None
            time.sleep(_SECONDS_BETWEEN_TRIES)
        except OSError as error:
            os.close(lock)
            raise OSError(error.errno, f"{path} cannot be locked: {error.strerror}") from error
        os.close(lock)


def sync_tree(folder: Path) -> None:
    """Wait until everything in *folder* is on the disk, so that a new name never stands for less than all of it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Wait until the names in *folder* are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
