"""The operations in plain torch: they run on every device, and define the bytes that every other backend produces."""
