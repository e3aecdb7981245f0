"""Libraries of the extra ``offline``, imported when they are needed."""

import importlib
from types import ModuleType


def import_extra(name: str) -> ModuleType:
    """Import a module that the extra brings.

    Raises:
        ImportError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'This needs {name.partition(".")[0]}: pip install "ezmsg-mlx[offline]".') from error
