"""What all units share."""

from .workarounds import apply_workarounds

# Here, since every unit imports this package: a graph with one of them has the workarounds in all of its processes.
apply_workarounds()
