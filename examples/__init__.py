"""Parts that others add to Quartet, each as one file; docs/extend.md says how. The tests run them.

May import orchestrator, quartet and services. Nothing imports it.
"""
