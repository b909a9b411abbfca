"""The deployment file, the applications in it, and the local Ray cluster that they run on.

May import config, quartet and services. cli and commands import it.
"""
