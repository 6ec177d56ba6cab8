"""Packed samples over two processes: the losses, messages and outputs that they have without packing."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import gpt2, llama

pytestmark = pytest.mark.ranks

COUNT, EPOCHS = 11, 3
EVALUATED: dict[str, Any] = {"eval_strategy": "epoch", "include_num_input_tokens_seen": "non_padding"}


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    return {
        "trained": {name: trained(f"{folder}/{name}", name) for name in ("padded", *COLLATORS)},
        "checkpointed": {name: trained(f"{folder}/{name}-c", name, **HALF) for name in ("padded", "packing")},
        "replicas": {name: trained(f"{folder}/{name}-r", name, num_stages=1) for name in ("padded", "packing")},
        "cached": {name: cached(f"{folder}/{name}-a", name) for name in ("padded", "packing", "gradients")},
        "resumed": resumed(f"{folder}/resumed"),
        "packed before": packed_before(f"{folder}/before"),
        "bare": bare(),
        "refused": refused(f"{folder}/refused"),
    }


def flattening() -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)


def trl() -> Any:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)


COLLATORS = {"packing": None, "flattening": flattening, "trl": trl}
HALF: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True}


def documents(count: int = COUNT, seed: int = 1) -> list[dict[str, Any]]:
    """As lists, as a tokenizer makes them."""
    return [{key: x.tolist() for key, x in s.items()} for s in work.unequal(count, seed=seed)]


def tensors(chosen: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return work.padded([{key: torch.tensor(x) for key, x in s.items()} for s in chosen])


def trainer_of(folder: str, name: str, *, model: Any = None, **more: Any) -> Any:
    from pipecomp import PipelineTrainer

    keys = ("num_stages", "pipecomp", "train_dataset")
    own = {key: more.pop(key) for key in keys if key in more}
    make = COLLATORS.get(name)
    collate = tensors if name == "padded" else None if make is None else make()
    if name not in ("padded", "flattening", "trl"):
        own |= {"packing": True, "max_length": 18}
    args = work.arguments(folder, train_sampling_strategy="random", num_train_epochs=EPOCHS, **more)
    data = own.pop("train_dataset", None) or documents()
    return PipelineTrainer(model or llama(), args, collate, data, documents(5, seed=6), **own)


def trained(folder: str, name: str, **more: Any) -> dict[str, Any]:
    trainer = trainer_of(folder, name, **EVALUATED, **more)
    trainer.train()
    predicted = trainer.predict(documents(5, seed=6))
    history = trainer.state.log_history
    out = {
        "losses": work.losses(trainer),
        "evaluated": [line["eval_loss"] for line in history if "eval_loss" in line],
        "norms": [line["grad_norm"] for line in history if "grad_norm" in line],
        "tokens": trainer.state.num_input_tokens_seen,
        "logits": predicted.predictions,
        "labels": predicted.label_ids,
    }
    trainer.end()
    return out


def cached(folder: str, name: str) -> dict[str, Any]:
    backward = {"backward_method": "delta", "backward_bits": 4} if name == "gradients" else {}
    section = {
        "activations": {"method": "aqsgd", "forward_bits": 4, **backward},
        "store": {"backend": "memory", "drift_check": 2},
    }
    trainer = trainer_of(folder, name, model=gpt2(2, 96), pipecomp=section)
    packs: list[tuple[int, ...]] = []
    link = trainer.engine.links.to_previous
    if link is not None:
        receive = link.recv_activation

        def noting(at: Any, *, training: bool = True) -> Any:
            x_BSH, layout = receive(at, training=training)
            assert layout.packed == (name != "padded")
            packs.append(layout.ids)
            return x_BSH, layout

        link.recv_activation = noting
    trainer.train()
    ends = list(trainer.engine.links)
    out = {
        "losses": work.losses(trainer),
        "rates": [line["store_hit_rate"] for line in trainer.state.log_history if "store_hit_rate" in line],
        "packs": packs,
        "stores": [sorted((h.sample, h.version, h.digest) for h in end.store.inventory()) for end in ends],
        "bytes": [end.stats.forward.bytes_sent + end.stats.backward.bytes_sent for end in ends],
    }
    trainer.end()
    return out


def resumed(folder: str) -> list[list[float]]:
    """A run, and again from the middle of its second epoch."""
    more = {"pipecomp": work.AQSGD, "save_strategy": "steps", "save_steps": 4}
    whole = trainer_of(folder, "packing", **more)
    whole.train()
    expected = work.losses(whole)
    whole.end()
    again = trainer_of(folder, "packing", **more)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    found = work.losses(again)
    again.end()
    return [expected, found]


def packed_before(folder: str) -> dict[str, Any]:
    """TRL's packed data, of which each document is a sample on the link."""
    from datasets import Dataset
    from trl import pack_dataset

    data = pack_dataset(Dataset.from_list([{"input_ids": s["input_ids"]} for s in documents()]), seq_length=20)
    section = {"activations": {"method": "aqsgd", "forward_bits": 4}, "store": {"backend": "memory"}}
    trainer = trainer_of(folder, "trl", train_dataset=data, pipecomp=section)
    trainer.train()
    out = {
        "rates": [line["store_hit_rate"] for line in trainer.state.log_history if "store_hit_rate" in line],
        "samples": [len(end.store.inventory()) for end in trainer.engine.links],
    }
    trainer.end()
    return out


def bare() -> dict[str, Any]:
    """`initialize` with the packing collator, and with batches of one's own."""
    import pipecomp
    from pipecomp.data import PackingCollator

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "steps_per_print": 10**9,
        "pipecomp": {"activations": {"method": "aqsgd"}, "store": {"backend": "memory"}},
    }
    data = work.unequal(8)
    engine = pipecomp.initialize(
        gpt2(2, 16), num_stages=2, config=config, training_data=data, collate_fn=PackingCollator(max_length=24)
    )
    out: dict[str, Any] = {"epoch": [float(engine.train_batch()) for _ in range(2)]}
    out["held"] = [sorted(h.sample for h in end.store.inventory()) for end in engine.links]

    def batch(*ids: int) -> dict[str, Any]:
        tokens = torch.cat([data[i]["input_ids"] for i in ids])[None]
        positions = torch.cat([torch.arange(len(data[i]["input_ids"])) for i in ids])[None]
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "sample_ids": list(ids)}

    def deltas() -> int:
        return sum(end.stats.delta_samples for end in engine.links)

    before = deltas()
    out["own"] = float(engine.train_batch(iter([batch(0, 5, 3), batch(7)])))
    out["deltas"] = deltas() - before
    engine.close()
    return out


def refused(folder: str) -> dict[str, str]:
    import pipecomp
    from pipecomp.errors import PipecompError

    def error(**more: Any) -> str:
        try:
            work_args = work.arguments(folder)
            trainer = pipecomp.PipelineTrainer(args=work_args, train_dataset=documents(), **more)
            trainer.train()
        except PipecompError as found:
            return str(found)
        return ""

    classes = work.bert()
    return {
        "length": error(model=gpt2(2, 16), max_length=5),
        "twice": error(model=gpt2(2, 16), data_collator=flattening(), packing=True),
        "classes": error(model=classes, packing=True),
        "long": error(model=gpt2(2, 16), packing=True, max_length=8),
    }


# -- what came of it


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("packing")), timeout_s=2 * HANG_S)


def test_losses_are_those_of_padded_batches(ranks: dict[int, Any]) -> None:
    runs = ranks[0]["trained"]
    for name in COLLATORS:
        for key in ("losses", "evaluated", "norms"):
            assert len(runs[name][key]) == len(runs["padded"][key]) > 2
            assert runs[name][key] == pytest.approx(runs["padded"][key], rel=2e-6), (name, key)
        assert runs[name]["tokens"] == runs["padded"]["tokens"] > 0, name


def test_predictions_are_by_sample_in_their_order(ranks: dict[int, Any]) -> None:
    padded = ranks[0]["trained"]["padded"]
    for name in COLLATORS:
        found = ranks[1]["trained"][name]
        for row, (labels, expected) in enumerate(zip(found["labels"], padded["labels"], strict=True)):
            real = int((expected != -100).sum())
            assert labels[:real].tolist() == [-100, *expected[1:real].tolist()]
            assert found["logits"][row, :real] == pytest.approx(padded["logits"][row, :real], rel=1e-4, abs=1e-5)


def test_half_precision_checkpointing_and_replicas(ranks: dict[int, Any]) -> None:
    half = ranks[0]["checkpointed"]
    assert half["packing"]["losses"] == pytest.approx(half["padded"]["losses"], rel=1e-2)
    pair = ranks[1]["replicas"]
    assert pair["packing"]["losses"] == pytest.approx(pair["padded"]["losses"], rel=2e-6)
    assert pair["packing"]["tokens"] == pair["padded"]["tokens"]


@pytest.mark.parametrize("name", ["packing", "gradients"])
def test_cached_activations_belong_to_documents(name: str, ranks: dict[int, Any]) -> None:
    sender, receiver = (ranks[rank]["cached"][name] for rank in (0, 1))
    each = len(sender["rates"]) // EPOCHS
    assert sender["rates"] == [0.0] * each + [1.0] * (len(sender["rates"]) - each)
    assert sender["stores"] == receiver["stores"]
    assert len(sender["stores"][0]) == COUNT * (2 if name == "gradients" else 1)
    packs = [tuple(sorted(ids)) for ids in receiver["packs"]]
    epochs = [packs[i : i + len(packs) // EPOCHS] for i in range(0, len(packs), len(packs) // EPOCHS)]
    assert all(sorted(chain(*epoch)) == list(range(COUNT)) for epoch in epochs)
    assert set(epochs[0]) != set(epochs[1])


def test_messages_are_as_long_as_without_packing(ranks: dict[int, Any]) -> None:
    for rank in (0, 1):
        padded, packed = (sum(ranks[rank]["cached"][name]["bytes"]) for name in ("padded", "packing"))
        assert abs(packed / padded - 1) < 0.02
    assert ranks[0]["cached"]["packing"]["losses"] == pytest.approx(ranks[0]["cached"]["padded"]["losses"], rel=0.02)


def test_a_resumed_run_has_the_same_losses(ranks: dict[int, Any]) -> None:
    expected, found = ranks[0]["resumed"]
    assert found == expected


def test_each_document_of_trls_packed_data_is_cached(ranks: dict[int, Any]) -> None:
    found = ranks[0]["packed before"]
    assert found["samples"] == [COUNT]
    each = len(found["rates"]) // EPOCHS
    assert found["rates"][each:] == [1.0] * (len(found["rates"]) - each)


def test_a_bare_engine(ranks: dict[int, Any]) -> None:
    for rank in (0, 1):
        found = ranks[rank]["bare"]
        assert found["held"] == [list(range(8))]
        assert found["deltas"] == 4
    model, data = gpt2(2, 16), work.unequal(8)
    with torch.no_grad():
        alone = {
            i: model(input_ids=data[i]["input_ids"][None], labels=data[i]["input_ids"][None], use_cache=False).loss
            for i in (0, 5, 3, 7)
        }
    counts = {i: len(data[i]["input_ids"]) - 1 for i in (0, 5, 3)}
    first = sum(float(alone[i]) * n for i, n in counts.items()) / sum(counts.values())
    assert ranks[0]["bare"]["own"] == pytest.approx((first + float(alone[7])) / 2, rel=0.02)


def test_what_cannot_be_packed(ranks: dict[int, Any]) -> None:
    for rank in (0, 1):
        found = ranks[rank]["refused"]
        assert "max_length: got 5, allowed: None without packing" in found["length"]
        assert "packing: got True, allowed: False with a data_collator that packs" in found["twice"]
        assert "one result for each row" in found["classes"]
        assert "does not fit a row of 8" in found["long"]
