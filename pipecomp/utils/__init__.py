"""Helpers without knowledge of training: files, serialization, units, tables, processes, sockets, control groups."""
