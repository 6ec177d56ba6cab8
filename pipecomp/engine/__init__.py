"""DeepSpeed's pipeline engine over compressed links, and `initialize`, which makes it."""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported, which is in this room alone
