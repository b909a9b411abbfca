"""A file that states each fact of a run, or of scorers alone, once; and the whole file for Serve that is derived
from it.

May import algorithms, applications, config, environments, quartet and services. cli, commands and file import it.
"""
