"""Checkpoints on disk: whole or not there, of which run, and read by other stages and replicas than wrote them."""
