"""Reference: log-probs of given responses under a frozen model.

May import common. orchestrator imports it: client and config.
"""
