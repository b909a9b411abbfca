"""A run's report: one HTML page, its charts and the comparison of evaluations.

May import evaluation, monitoring, quartet and tracing. cli imports it.
"""
