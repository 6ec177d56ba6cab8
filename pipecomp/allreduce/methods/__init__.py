"""One file for each idea of how gradients are averaged: its options, its mean, and what it sends."""
