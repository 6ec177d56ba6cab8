"""`pipecomp demo`: a small model fine-tuned over two processes with each way of sending, and what each cost."""
