"""The order of a stage's work in a step, and how far it runs ahead, as plain data: nothing here knows DeepSpeed."""
