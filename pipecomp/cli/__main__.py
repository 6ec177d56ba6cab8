"""`python -m pipecomp.cli`, for launchers that start Python programs."""

from pipecomp.cli import app

app()
