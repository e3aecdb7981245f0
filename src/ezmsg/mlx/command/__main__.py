"""``python -m ezmsg.mlx.command`` is ``ezmsg-mlx``."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
