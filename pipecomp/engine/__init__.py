"""DeepSpeed's pipeline engine over compressed links, and `initialize`, which makes it."""
