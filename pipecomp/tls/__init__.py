"""Mutual TLS among the ranks of a run: keys, connections, a key-value store, links and torch's collectives."""
