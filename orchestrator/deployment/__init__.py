"""The deployment file, the applications in it, and the local Ray cluster that they run on.

May import config and the services' configs. commands and cli import it.
"""
