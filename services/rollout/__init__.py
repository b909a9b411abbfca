"""Rollout: samples responses and takes new weights while it serves.

May import quartet. orchestrator imports it: client, config, engines, sample and offline.
"""
