"""Calls about samples: their encoding, and beginnings that services compute in advance.

May import beside, requests, clients, config, data and services. collector and experience import it.
"""
