"""Reference: log-probs of given responses under a frozen model.

Others may import client and config.
"""
