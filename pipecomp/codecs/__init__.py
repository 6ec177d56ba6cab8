"""Codecs of tensors, the choice of a codec, and the wire format of packets."""
