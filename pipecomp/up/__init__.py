"""`pipecomp up`: from two machines that know nothing of each other to a training run, over TLS, in one command each."""
