"""The four models of PPO as services, which do not import each other.

May import quartet. orchestrator imports it.
"""
