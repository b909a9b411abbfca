"""Reference: log-probs of given responses under a frozen model.

May import quartet. orchestrator imports it: client and config.
"""
