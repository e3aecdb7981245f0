"""What several examples share. An example imports it first, so that a missing extra is named in one line."""

import importlib.util
import sys

if importlib.util.find_spec("rich") is None:
    sys.exit('This example needs rich: pip install "ezmsg-mlx[examples]"')
