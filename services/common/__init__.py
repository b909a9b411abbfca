"""Code that the services, their clients and the orchestrator share.

May import nothing. services, orchestrator and recipes import it.
"""
