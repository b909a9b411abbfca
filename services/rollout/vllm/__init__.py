"""Code that runs inside vLLM or drives it.

May import config, interface, quartet and sample. offline and replica import it.
"""
