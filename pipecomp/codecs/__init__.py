"""What crosses a link, as bytes: codecs of tensors, the format of packets, and the rotation that spreads outliers."""
