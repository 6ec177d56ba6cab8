"""Packing: which samples share a micro-batch and a row, and what a packed batch looks like."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecomp.data import ShardedSampler, TrainLoader, as_micro_batch
from pipecomp.data.packing import PackedSampler, PackingCollator, divide, document_lengths, fit_rows
from pipecomp.errors import ConfigError, DataError

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def documents(*sizes: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(len(sizes))
    return [{"input_ids": (x := torch.randint(3, 60, (n,), generator=draw)), "labels": x} for n in sizes]


class TestRows:
    @given(lengths, st.integers(40, 100))
    def test_every_document_is_in_one_row_that_it_fits(self, sizes: list[int], most: int) -> None:
        rows = fit_rows(sizes, most)
        assert sorted(chain.from_iterable(rows)) == list(range(len(sizes)))
        assert all(0 < sum(sizes[i] for i in row) <= most for row in rows)

    @given(lengths, st.integers(40, 100))
    def test_rows_are_more_than_half_full_on_the_average(self, sizes: list[int], most: int) -> None:
        """Best fit opens a row only for what fits no other one."""
        rows = fit_rows(sizes, most)
        assert len(rows) == 1 or 2 * sum(sizes) > most * len(rows)

    def test_rows_have_nearly_equal_lengths(self) -> None:
        sizes = [300, 280, 260, 250, 240, 230, 220, 210]
        filled = [sum(sizes[i] for i in row) for row in fit_rows(sizes, 1100)]
        assert len(filled) == 2
        assert max(filled) - min(filled) <= 30

    def test_best_fit_where_even_rows_would_be_too_long(self) -> None:
        sizes = [9, 9, 8, 8, 6, 6, 2]
        assert max(sum(sizes[i] for i in part) for part in divide(sizes, 2)) == 25
        assert [sum(sizes[i] for i in row) for row in fit_rows(sizes, 24)] == [24, 24]


@given(lengths, st.data())
def test_parts_share_all_documents_and_no_part_has_more_than_an_unpacked_one_may(sizes: list[int], data: Any) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    divided = divide(sizes, parts)
    assert sorted(chain.from_iterable(divided)) == list(range(len(sizes)))
    assert all(divided)
    each = -(-len(sizes) // parts)
    assert max(sum(sizes[i] for i in part) for part in divided) <= each * max(sizes)


class TestSampler:
    def order(self, **options: Any) -> ShardedSampler:
        return ShardedSampler(50, 3, seed=5, **options)

    def sizes(self) -> list[int]:
        return torch.randint(1, 100, (50,), generator=torch.Generator().manual_seed(1)).tolist()

    @pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"replicas": 2, "replica": 1}])
    def test_each_step_has_the_samples_that_it_has_without_packing(self, options: dict[str, Any]) -> None:
        plain, packed = self.order(**options), PackedSampler(self.order(**options), self.sizes(), 4)
        assert packed.per_epoch == plain.per_epoch
        for epoch in range(3):
            for first in range(0, plain.per_epoch, 4):
                step = range(epoch * plain.per_epoch + first, epoch * plain.per_epoch + min(first + 4, plain.per_epoch))
                batches = [packed.batch(n) for n in step]
                assert sorted(chain(*batches)) == sorted(chain(*(plain.batch(n) for n in step)))
                assert all(batches)
                assert sum(map(packed.size, step)) == sum(map(len, batches))

    def test_steps_that_extend_into_the_next_epoch(self) -> None:
        plain, packed = self.order(), PackedSampler(self.order(), self.sizes(), 3, spanning=True)
        assert plain.per_epoch % 3, "a step has the last of an epoch and the first of the next"
        for first in range(0, 2 * plain.per_epoch, 3):
            found, expected = (list(chain(*(s.batch(n) for n in range(first, first + 3)))) for s in (packed, plain))
            assert sorted(found) == sorted(expected)

    def test_micro_batches_of_a_step_have_nearly_equal_lengths(self) -> None:
        sizes, packed, plain = self.sizes(), PackedSampler(self.order(), self.sizes(), 4), self.order()

        def spread(sampler: Any, first: int) -> int:
            tokens = [sum(sizes[i] for i in sampler.batch(n)) for n in range(first, first + 4)]
            return max(tokens) - min(tokens)

        assert all(spread(packed, first) < spread(plain, first) / 2 for first in range(0, 16, 4))

    def test_packs_change_from_epoch_to_epoch_and_come_again_after_a_restart(self) -> None:
        one, other = (PackedSampler(self.order(), self.sizes(), 4) for _ in range(2))
        epochs = [[tuple(one.batch(e * one.per_epoch + n)) for n in range(16)] for e in range(2)]
        assert set(epochs[0]) != set(epochs[1])
        assert other.batch(one.per_epoch + 7) == list(epochs[1][7])

    @pytest.mark.parametrize("spanning", [True, False])
    def test_each_step_has_the_samples_that_are_left_of_another_layout(self, spanning: bool) -> None:
        position = PackedSampler(self.order(), self.sizes(), 4).position(16 + 4)
        order = self.order(replicas=2, replica=1)
        packed = PackedSampler(self.order(replicas=2, replica=1), self.sizes(), 3, spanning=spanning)
        number = packed.seek(position)
        assert order.seek(position) == number == 8 + 2
        for first in range(number, 22, 3):
            found, expected = (list(chain(*(s.batch(n) for n in range(first, first + 3)))) for s in (packed, order))
            assert sorted(found) == sorted(expected)


class TestCollator:
    def test_a_batch(self) -> None:
        samples = documents(3, 4, 2, 1)
        batch = PackingCollator(max_length=5)(samples)
        assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (2, 5)
        found = as_micro_batch(batch, [70, 71, 72, 73])
        assert found.lengths is not None
        places = dict(zip(found.ids, chain(*found.lengths), strict=True))
        assert places == {70: 3, 71: 4, 72: 2, 73: 1}
        rows = [chain.from_iterable(range(n) for n in row) for row in found.lengths]
        assert [list(row) for row in rows] == found.inputs["position_ids"].tolist()
        for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
            starts = batch["position_ids"][row] == 0
            assert torch.equal(labels[~starts], ids[~starts])
            assert (labels[starts] == -100).all()

    def test_padding_of_rows_of_unequal_length(self) -> None:
        batch = PackingCollator()(documents(7, 4))
        assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 0, 0, 0]
        assert batch["labels"][1, 4:].tolist() == [-100] * 3
        assert as_micro_batch(batch, [5, 6]).lengths == ((7,), (4,))

    def test_samples_without_tokens_are_left_out_with_their_ids(self) -> None:
        batch = PackingCollator(max_length=9)([*documents(3, 2), {"input_ids": []}, *documents(4)])
        assert sorted(as_micro_batch(batch, [5, 6, 7, 8]).ids) == [5, 6, 8]
        with pytest.raises(DataError, match="none of the 1 samples"):
            PackingCollator()([{"input_ids": []}])

    def test_labels_of_another_collator(self) -> None:
        def collate(samples: list[Any]) -> dict[str, Tensor]:
            (sample,) = samples
            ids = torch.tensor([*sample["input_ids"].tolist(), 0, 0])[None]
            labels = ids.masked_fill(ids < 30, -100)
            return {
                "input_ids": ids,
                "labels": labels,
                "attention_mask": torch.arange(ids.shape[1])[None] < ids.shape[1] - 2,
            }

        samples = documents(5, 3)
        batch = PackingCollator(collate, max_length=8, causal=False)(samples)
        ids = torch.cat([sample["input_ids"] for sample in samples])
        assert batch["input_ids"].tolist() == [ids.tolist()]
        assert batch["labels"].tolist() == [ids.masked_fill(ids < 30, -100).tolist()]

    def test_what_does_not_fit(self) -> None:
        with pytest.raises(DataError, match="a sample of 6 tokens does not fit a row of 5"):
            PackingCollator(max_length=5)(documents(3, 6))
        with pytest.raises(DataError, match=r"needs input_ids; got \['text'\]"):
            PackingCollator()([{"text": "a"}])
        with pytest.raises(DataError, match="a label for each token"):
            PackingCollator()([{"input_ids": [1, 2], "labels": [1]}])
        with pytest.raises(ConfigError, match="max_length"):
            PackingCollator(max_length=0)


class TestOtherCollators:
    """Batches of transformers and TRL, as they are."""

    def flattened(self, **options: Any) -> Any:
        from transformers import DataCollatorWithFlattening

        return DataCollatorWithFlattening(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"return_flash_attn_kwargs": True, "return_seq_idx": True},
            {"return_flash_attn_kwargs": True, "return_position_ids": False},
        ],
    )
    def test_transformers(self, options: dict[str, Any]) -> None:
        samples = documents(3, 1, 4)
        found = as_micro_batch(self.flattened(**options)(samples), [5, 6, 7], samples=samples)
        assert (found.ids, found.lengths) == ((5, 6, 7), ((3, 1, 4),))
        assert set(found.inputs) == {"input_ids", "position_ids"}
        assert found.inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]

    def test_samples_without_tokens(self) -> None:
        samples = [*documents(3), {"input_ids": [], "labels": []}, *documents(2)]
        assert as_micro_batch(self.flattened()(samples), [5, 6, 7], samples=samples).ids == (5, 7)

    def test_trl(self) -> None:
        sft = pytest.importorskip("trl.trainer.sft_trainer")
        collate = sft.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)
        samples = [{"input_ids": s["input_ids"].tolist()} for s in documents(3, 1, 6)]
        found = as_micro_batch(collate(samples), [5, 6, 7], samples=samples)
        assert (found.ids, found.lengths) == ((5, 6, 7), ((3, 1, 6),)), "six places of padding are no documents"
        assert found.inputs["input_ids"].shape == (1, 16)

    def test_documents_of_trls_packed_data_have_ids_of_their_own(self) -> None:
        trl = pytest.importorskip("trl")
        from datasets import Dataset
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        data = trl.pack_dataset(Dataset.from_dict({"input_ids": [[1, 2, 3], [4], [5, 6], [7, 8, 9]]}), seq_length=4)
        samples = [data[i] for i in range(len(data))]
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        found = as_micro_batch(collate(samples), range(len(data)), samples=samples)
        assert found.lengths is not None
        assert sorted(chain(*found.lengths)) == [1, 2, 3, 3]
        assert len(set(found.ids)) == 4
        again = as_micro_batch(collate(samples[1:]), range(1, len(data)), samples=samples[1:])
        assert set(again.ids) < set(found.ids)

    def test_ids_of_a_batch_of_ones_own(self) -> None:
        batch = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
        assert as_micro_batch({**batch, "sample_ids": [8, 3]}).lengths == ((2, 3),)
        assert as_micro_batch(batch, number_from=6).ids == (6, 7)
        with pytest.raises(DataError, match="2 documents by its position_ids, which restart at each, and 3 ids"):
            as_micro_batch({**batch, "sample_ids": [8, 3, 1]})
        with pytest.raises(DataError, match="2 documents by its position_ids"):
            as_micro_batch({**batch, "sample_ids": [8]})

    def test_positions_that_say_nothing_are_dropped(self) -> None:
        ids, places = torch.ones(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3)
        batch = {"input_ids": ids, "position_ids": places}
        assert set(as_micro_batch(batch, [1, 2]).inputs) == {"input_ids"}
        padded = {
            **batch,
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "position_ids": torch.tensor([[0, 1, 2], [0, 1, 1]]),
        }
        assert set(as_micro_batch(padded, [1, 2]).inputs) == {"input_ids", "attention_mask"}

    def test_a_mask_does_not_tell_documents_apart(self) -> None:
        positions = torch.tensor([[0, 1, 0, 1]])
        batch = {"input_ids": torch.ones_like(positions), "position_ids": positions}
        whole = as_micro_batch({**batch, "attention_mask": torch.ones_like(positions)}, [1, 2])
        assert set(whole.inputs) == {"input_ids", "position_ids"}
        with pytest.raises(DataError, match="attention_mask with padding and position_ids"):
            as_micro_batch({**batch, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, [1, 2])
        with pytest.raises(DataError, match=r"position_ids has shape \(1, 4\), expected \(1, 3\)"):
            as_micro_batch({"input_ids": torch.ones(1, 3), "position_ids": positions}, [1])


def test_lengths_by_positions() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2], [2, 3, 4, 2, 3]])
    assert document_lengths(positions) == ((2, 3), (3, 2))
    with pytest.raises(DataError, match="4 documents"):
        document_lengths(positions, 3)


def test_a_loader_keeps_each_documents_id() -> None:
    samples = documents(*(3, 9, 4, 4, 7, 1, 2, 8))
    loader = iter(TrainLoader(samples, ShardedSampler(8, 4, seed=1), PackingCollator(max_length=12)))
    for _ in range(4):
        batch = next(loader)
        assert batch.lengths is not None
        rows = zip(batch.inputs["input_ids"], batch.lengths, strict=True)
        found = [part for row, lengths in rows for part in row[: sum(lengths)].split(list(lengths))]
        assert all(torch.equal(part, samples[i]["input_ids"]) for part, i in zip(found, batch.ids, strict=True))
