"""``python -m ezmsg.mlx`` is the command ``ezmsg-mlx``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
