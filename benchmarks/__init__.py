"""Benchmarks; `python -m benchmarks` lists them, README.md has their results."""
