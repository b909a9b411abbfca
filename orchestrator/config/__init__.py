"""The `orchestrator:` section of the YAML file, one file per part, each key documented where it is defined.

May import algorithms, quartet and services. All but algorithms, api, cli, evaluation, incomplete, report
and tracing import it.
"""
