"""Activation checkpointing by DeepSpeed's own settings: blocks compute again in the backward what they did not keep.

DeepSpeed would checkpoint whole layers of its PipelineModule, and a stage is one of these. So the setting is taken out
of its hands, and Hugging Face's blocks are checkpointed, each on its own.
"""

from __future__ import annotations

from typing import Any

from pipecomp.errors import require

_INTERVAL = "activation_checkpoint_interval"


def take_setting(ds_config: dict[str, Any]) -> bool:
    """Whether blocks are to be recomputed; DeepSpeed's configuration is changed so that it does nothing itself.

    The setting is `"pipeline": {"activation_checkpoint_interval": 1}`. Raises ConfigError for what cannot take effect:
    other intervals, reentrant checkpointing, and the section "activation_checkpointing", which is about DeepSpeed's own
    function for it.
    """
    for key, value in ds_config.get("activation_checkpointing", {}).items():
        require(not value, f"activation_checkpointing.{key}", value, f"nothing; use pipeline.{_INTERVAL}: 1")
    section = ds_config.get("pipeline", {})
    if not isinstance(section, dict):  # DeepSpeed's "auto"
        return False
    interval = section.get(_INTERVAL, 0)
    require(
        interval in (0, 1) and not isinstance(interval, bool),
        f"pipeline.{_INTERVAL}",
        interval,
        "0, or 1: each block of the model on its own",
    )
    require(
        not interval or not section.get("use_reentrant"),
        "pipeline.use_reentrant",
        True,
        f"false with {_INTERVAL} 1: frozen inputs need no gradient",
    )
    if interval:
        section[_INTERVAL] = 0
    return bool(interval)
