"""What is wrong with an NWB file, as one error that names the file, the series and the reason.

h5py answers a damaged file with errors of half a dozen types, most of which do not say which file they are about.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


class RecordingError(ValueError):
    """The content of a file is not what a recording needs."""


def fault(path: Path, series: str | None, reason: str) -> RecordingError:
    """The error for *reason*, which is the rest of a sentence about the series, or without one about the file."""
    return RecordingError(f"{path}: {series} {reason}" if series else f"{path} {reason}")


@contextlib.contextmanager
def faults_of(path: Path, series: str | None = None) -> Iterator[None]:
    """Give errors that h5py raises inside the ``with`` block the names of the file and of the series.

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
    except Exception as error:  # whatever h5py makes of damage
        raise _unreadable(path, series, error) from error


def _unreadable(path: Path, series: str | None, error: Exception) -> RecordingError:
    lines = str(error).strip("'\" \n").splitlines()
    return fault(path, series, f"cannot be read ({type(error).__name__}: {lines[0] if lines else 'no reason given'}).")
