"""What is wrong with a recording, as one error that names the file, the series or stream, and the reason.

h5py and neo answer a damaged file with errors of many types, most of which do not say which file they are about.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class RecordingError(ValueError):
    """The content of a file is not what a recording needs."""


def fault(path: Path, series: str | None, reason: str) -> RecordingError:
    """The error for *reason*, which is the rest of a sentence about the series or stream; None: about the file."""
    return RecordingError(f"{path}: {series} {reason}" if series else f"{path} {reason}")


@contextlib.contextmanager
def faults_of(path: Path, series: str | None = None) -> Iterator[None]:
    """Give errors that are raised inside the ``with`` block the names of the file and of the series or stream.

    Raises:
        OSError: The system cannot open or read the file; of the subclass that belongs to the error number.
        MemoryError: There is not enough memory for what the file announces.
        ValueError: Everything else, which is the content of the file.
    """
    try:
        yield
    except (RecordingError, ImportError):
        raise
    except OSError as error:
        if error.errno is None:
            raise _unreadable(path, series, error) from error
        text = os.strerror(error.errno)
        if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
            text = "locked, another process has it open for writing"
        raise OSError(error.errno, f"{series}: {text}" if series else text, str(path)) from error
    except MemoryError as error:
        raise MemoryError(f"{path}: {f'{series}: ' if series else ''}{error or 'out of memory'}") from error
    except Exception as error:  # whatever h5py or neo makes of damage
        raise _unreadable(path, series, error) from error


def _unreadable(path: Path, series: str | None, error: Exception) -> RecordingError:
    lines = str(error).strip("'\" \n").splitlines()
    return fault(path, series, f"cannot be read ({type(error).__name__}: {lines[0] if lines else 'no reason given'}).")
