"""Folders that one process writes at a time, and that are on the disk when they are said to be."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

_SECONDS_BETWEEN_TRIES = 0.2

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


class FolderLock:
    """The lock of a folder, held by this process from its making to :meth:`release`.

    The folder is made if need be, and the file ``lock`` in it is locked. Whoever has the lock may remove the folder.
    The system unlocks it when the process ends, in whatever way. A child that is forked meanwhile does not have it.

    Args:
        folder: Of what one process at a time may write.
        wait: Seconds to wait for another process.
        what: What is being written, for the error.

    Raises:
        BlockingIOError: Another process has the lock, and still has it after *wait* seconds.
        OSError: The file system has no locks.
    """

    def __init__(self, folder: Path, wait: float, what: Path) -> None:
        self._descriptor: int | None = _locked(folder, wait, what)
        self._process = os.getpid()
        _held.add(self._descriptor)

    def release(self) -> None:
        """Let others have it. In a forked child this does nothing, since the lock is its parent's."""
        if self._descriptor is None or self._process != os.getpid():
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(descriptor)
        # Closing alone would leave it locked as long as a copy of the descriptor is open elsewhere.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _forget_inherited() -> None:
    # The lock belongs to the open file, which a child shares: it would stay locked until both have ended.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_inherited)


def _locked(folder: Path, wait: float, what: Path) -> int:
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


def is_there(path: Path) -> bool:
    """Whether *path* exists; unlike ``Path.exists``, an error of the system is not taken for a no.

    Raises:
        OSError: It cannot be found out.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_of_the_system(error: Exception) -> bool:
    """Whether *error* says that something could not be read, and not that it is missing or damaged."""
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, missing)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there with all of *content*, or not at all."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_folder(path.parent)


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
