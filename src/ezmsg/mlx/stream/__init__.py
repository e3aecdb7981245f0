"""Parts that all units share."""

from .workarounds import apply_workarounds, tolerate_misses

# Here, since every unit imports this package: a graph with one of them has the workarounds in all of its processes, and
# the variable is set before MLX reads it, also where other code loads MLX.
apply_workarounds()
tolerate_misses()
