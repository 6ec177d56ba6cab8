"""A link between two stages: its two ends, the transport below them, and what they agree on."""
