"""The orchestrator of a run: the loop, its packages, and the `quartet` command.

May import the clients and configs of services, and services.common; never a replica or an engine.
"""
