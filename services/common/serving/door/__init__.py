"""The guard at the gRPC port of Serve's proxy: it checks every call before Serve sees it.

May import what serving may. proxy.py, whose functions Serve calls by name, puts it in place.
"""
