"""What `pipecomp bench` measures on this machine."""
