"""Generation of text by the stages of an open engine, by transformers' own `generate`."""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from pipecomp.data import MicroBatch
from pipecomp.distributed.collectives import broadcast
from pipecomp.errors import PipecompError, require
from pipecomp.interfaces import TrainingEngine
from pipecomp.stages.partition.stage import Stage
from pipecomp.stages.partition.structure import shallow_copy

# Note: only the last stage of the first replica runs `generate`, with its draws and logits processors. Its model's
# forward sends the tokens so far to all ranks, which evaluate them; so links carry activations and a few tokens, and
# no logits. Stages keep no cache: every token evaluates its whole prefix again.


def generate(engine: TrainingEngine, group: Any, inputs: Any, options: dict[str, Any]) -> Tensor:
    """Generate tokens after prompts. Every rank must call this.

    Args:
        engine: The engine.
        group: A gloo group of all ranks.
        inputs: Prompts, int64 [B, S], padded on the left; None if `options` has input_ids.
        options: Options of transformers' `generate`: attention_mask, max_new_tokens, do_sample, …

    Returns:
        Prompts and new tokens on every rank, int64 [B, S + new].

    Raises:
        ConfigError: If the model does not generate, or its outputs are not tokens.
        PipecompError: On the other ranks, if `generate` raises an error.
    """
    stage = engine.stage
    require(isinstance(stage, Stage), "generate", type(stage).__name__, "a Hugging Face model")
    kind = stage.plan.model_class
    require(
        hasattr(type(stage._model), "generate"), "generate", kind, "a model that generates text, of class …ForCausalLM"
    )
    for name in ("return_dict_in_generate", "assistant_model", "streamer", "inputs_embeds"):
        require(not options.get(name), name, options.get(name), "not set in a pipeline, which returns tokens")
    leader = engine.grid._topo.get_rank(pipe=engine.num_stages - 1, data=0)
    rounds = _Rounds(engine, group, leader)
    tokens = error = None
    if dist.get_rank() == leader:
        try:
            tokens = rounds.view().generate(inputs, **{**options, "use_cache": False})
        except Exception as raised:
            if rounds.evaluating:  # the engine has told the other ranks
                raise
            error = raised
        rounds.exchange({"tokens": None if tokens is None else tokens.tolist(), "error": repr(error)})
        if error is not None:
            raise error
    else:
        while "prefix" in (sent := rounds.exchange({})):
            rounds.evaluate(sent["prefix"])
        if sent["tokens"] is None:
            raise PipecompError(f"generate failed on rank {leader}: {sent['error']}")
        tokens = torch.tensor(sent["tokens"], device=engine.device)
    assert tokens is not None
    return tokens


class _Rounds:
    """Rounds of a generation: the leader sends all rows of tokens so far, and all ranks evaluate them."""

    def __init__(self, engine: TrainingEngine, group: Any, leader: int) -> None:
        self._engine, self._group, self._leader, self._allowed = engine, group, leader, 0
        self.evaluating = False

    def exchange(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return what the leader sends."""
        with self._engine.propagate_failure():
            sent: dict[str, Any] = broadcast(own, self._leader, self._group)
        return sent

    def evaluate(self, rows: list[list[int]]) -> Tensor | None:
        """Run the stages on rows of tokens. Returns the logits after each row on the last stages, [B, 1, V]."""
        engine, lengths = self._engine, torch.tensor([len(row) for row in rows])
        if len(rows) > self._allowed:
            self._allowed = len(rows)
            engine.allow_evaluation(len(rows))
        place = torch.arange(int(lengths.max()))
        ids = torch.zeros(len(rows), len(place), dtype=torch.int64)
        mask = (place < lengths[:, None]).long()  # padded on the right: a causal model does not see it
        ids[mask.bool()] = torch.tensor([token for row in rows for token in row])
        batch = MicroBatch(tuple(range(len(rows))), {"input_ids": ids, "attention_mask": mask}, None)
        out: list[Tensor] = []

        def on_logits(logits_BSV: Tensor, labels: Tensor | None) -> Tensor:
            rows_B = torch.arange(len(rows), device=logits_BSV.device)
            out.append(logits_BSV[rows_B, lengths.to(logits_BSV.device) - 1][:, None])
            return logits_BSV.new_zeros(())

        source = iter([batch]) if engine.is_first_stage() or engine.is_last_stage() else None
        engine.eval_batch(source, num_micro_batches=1, on_logits=on_logits)
        return out[0] if out else None

    def view(self) -> Any:
        """Return a copy of the last stage's model whose forward runs all stages."""
        made: Any = shallow_copy(cast(Any, self._engine.stage)._model)

        def forward(_: Any, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> CausalLMOutput:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            rows = [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]
            self.evaluating = True
            self.exchange({"prefix": rows})
            logits = self.evaluate(rows)
            self.evaluating = False
            return CausalLMOutput(logits=logits)

        made.__dict__["forward"] = MethodType(forward, made)
        return made
