"""The `orchestrator:` section of the YAML file, one file per part, each key documented where it is defined.

May import algorithms, environments, quartet and services. All but algorithms, api, cli, entry, environments,
evaluation, incomplete, report and tracing import it.
"""
