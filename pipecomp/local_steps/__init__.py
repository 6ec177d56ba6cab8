"""Replicas that take steps of their own and average now and then: when, what, and the outer optimizer."""
