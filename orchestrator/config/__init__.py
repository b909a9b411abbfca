"""The `orchestrator:` section of the YAML file, one file per part, each key documented where it is defined.

May import quartet and services. All but algorithm, api, cli, evaluation, incomplete, report and tracing import it.
"""
