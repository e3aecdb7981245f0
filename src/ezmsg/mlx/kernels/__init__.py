"""Recurrence kernels, one module for a recurrence and a backend: ``cpu`` averages, ``cpu_sosfilt`` filters sections.

Data is float32 with the scanned axis anywhere. A state is float32 too, with an axis of length 2 in the place of
the scanned one: the state as float32, and what that rounding lost. Their sum has some 48 bits, which long time
constants need: at 30 kHz and 300 s a sample moves the average by a ten-millionth of its distance, far below
the resolution of float32.
"""
