"""Shared code of the programs in recipes/: command lines, data, models, and the run."""
