"""The four models of PPO as services, which do not import each other, and the code that they share.

May import nothing. orchestrator and recipes import it.
"""
