"""Message stores: where both ends of a link keep the last message of every sample."""
