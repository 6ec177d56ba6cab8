"""A model cut into stages: which models, where to cut, how a stage is built, loaded and saved."""
