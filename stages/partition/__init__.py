"""A model partitioned into stages: which models, where to cut, how a stage is built, loaded and saved."""
