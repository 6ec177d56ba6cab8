"""Benchmarks of `pipecomp bench`."""
