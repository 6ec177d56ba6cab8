"""`pipecomp demo`: a small model fine-tuned over slow links with each way of sending, and what each cost."""
