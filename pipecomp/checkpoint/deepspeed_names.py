"""What DeepSpeed calls the parts of a ZeRO optimizer's state in its checkpoints.

Reading a checkpoint does not need DeepSpeed; tests/checkpoint compares these with its own constants.
"""

BASE_OPTIMIZER_STATE = "base_optimizer_state"
GROUP_PADDINGS = "group_paddings"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
