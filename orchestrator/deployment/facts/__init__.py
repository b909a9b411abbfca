"""A file that states each fact of a run once, and what is derived from it: the whole file that Serve deploys.

May import algorithms, applications, config, environments and quartet. cli, commands and file import it.
"""
