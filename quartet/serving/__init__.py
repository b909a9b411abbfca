"""Code that replicas share: batching, health, statuses for errors, and additions to Serve's proxy.

May import columns, config, folders, seams, security, threads and wire. services import it.
"""
