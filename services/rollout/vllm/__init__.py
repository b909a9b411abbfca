"""Code that runs inside vLLM or drives it.

May import common, config, interface and sample. offline and replica import it.
"""
