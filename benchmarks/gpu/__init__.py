"""Measurements on one GPU; docs/gpu.md says in which order, and what to expect.

Each is a command that prints a line as soon as it knows a figure, keeps it in a file of JSON lines, and ends with a
table: one that is cut off has lost nothing. `--device cpu --size tiny` tries the script itself on any machine.
"""
