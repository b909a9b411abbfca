"""Code that replicas share: batching, health, statuses for errors, and additions to Serve's proxy.

May import wire, config and security. The services' replicas import it.
"""
