"""Rollout: samples responses with vLLM and takes new weights while it serves.

Others may import client, config, sample and offline.
"""
