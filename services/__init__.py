"""The four models of PPO as services, and the code they share.

Services import neither each other nor the orchestrator.
"""
