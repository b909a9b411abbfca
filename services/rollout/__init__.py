"""Rollout: samples responses with vLLM and takes new weights while it serves.

May import quartet. orchestrator imports it: client, config, sample and offline.
"""
