"""`pipecomp demo`: a small model fine-tuned over a slow link with each method, and a comparison of their costs."""
