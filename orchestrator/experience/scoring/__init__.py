"""Calls about samples: their encoding, and beginnings that services compute in advance.

May import beside, clients, config, data, quartet, requests and services. collector and experience import it.
"""
