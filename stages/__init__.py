"""Splitting a model into stages, and the links between them."""
