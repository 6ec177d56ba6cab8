"""The processes of a run: how they meet, what they agree on, who is alive, and who failed."""
