"""Pipeline-parallel fine-tuning of Hugging Face models over slow links."""
