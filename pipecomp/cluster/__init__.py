"""The processes of a run: how they meet, what they agree on, how each knows that the others are alive, and who failed."""
