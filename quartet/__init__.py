"""Code that the services, their clients and the orchestrator share.

May import nothing. orchestrator, recipes and services import it.
"""
