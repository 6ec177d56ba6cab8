"""Connections among all ranks of a run, and what runs over them: a key-value store, links, torch's collectives."""
