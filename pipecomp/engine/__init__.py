"""DeepSpeed's pipeline engine over compressed links. `pipecomp.initialize` builds it.

Only this room imports DeepSpeed.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
