"""What a run will take, before it runs: model, links and methods in, seconds of a step and settings out."""
