"""The deployment file, the applications in it, and the local Ray cluster that they run on.

May import algorithms, config, environments, quartet and services. api, cli and commands import it.
"""
