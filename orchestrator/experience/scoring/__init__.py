"""Calls about samples: their encoding, the critic's values, and beginnings that services compute in advance.

May import beside, checks, requests, clients, config, data and services. collector and experience import it.
"""
