"""What all units share."""

from .plancaches import tolerate_misses
from .workarounds import apply_workarounds

# Here, since every unit imports this package: a graph with one of them has the workarounds in all of its processes, and
# the variable is set before MLX reads it, also where other code loads MLX.
apply_workarounds()
tolerate_misses()
