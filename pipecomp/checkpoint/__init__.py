"""Checkpoints on disk: validity, run ids, collective writing, and loading into other cuts or replicas."""
