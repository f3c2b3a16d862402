"""Retrieval: exact nearest neighbours, and the metrics that read their order."""
