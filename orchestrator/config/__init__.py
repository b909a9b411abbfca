"""The `orchestrator:` section of the YAML file, one file per part, each key documented where it is defined.

May import services.common.config. Every other package here may import it.
"""
