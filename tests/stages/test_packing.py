"""Packed samples: over any number of stages the loss and gradients of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecomp.codecs.wire import Form, PacketHeader, PacketKind, PayloadMethod, Sample, decode, encode
from pipecomp.data import MicroBatch, as_micro_batch
from pipecomp.data.packing import PackingCollator
from pipecomp.errors import DataError, SplitError, WireError
from pipecomp.stages import default_loss, split
from pipecomp.stages.link.layout import Layout, gather, scatter
from pipecomp.stages.partition.stage import assume_masks, sample_numbers
from tests.models import MODELS, TOKENS, disturbed, make_model
from tests.stages.test_assumed_masks import GPU, Looks
from tests.stages.test_splitting import added_up

transformers = pytest.importorskip("transformers")

SIZES = (9, 5, 7, 1, 12, 3)
LANGUAGE = [name for name in MODELS if "classes" not in name and "deberta" not in name]
CUTS = [[0, 4], [0, 1, 4], [0, 1, 3, 4]]


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": (x := torch.randint(3, TOKENS, (n,), generator=draw)), "labels": x} for n in SIZES]


def packed(name: str, collate: Any = None) -> MicroBatch:
    collate = collate or PackingCollator(max_length=14, causal="masked" not in name)
    return as_micro_batch(collate(samples()), range(len(SIZES)), samples=samples())


def over_links(stages: Sequence[Any], batch: MicroBatch) -> tuple[Tensor, Layout]:
    """Run the stages with what links carry: the real tokens and the layout."""
    layout = stages[0].layout(batch.ids, batch.inputs, batch.lengths)
    message = stages[0](batch.inputs)
    for stage in stages[1:]:
        header = PacketHeader(
            kind=PacketKind.ACTIVATION, method=PayloadMethod.CAST, link=0, step=0, micro_batch=0,
            tokens=layout.tokens, samples=tuple(layout.samples(Form.PLAIN)), packed=layout.packed,
        )  # fmt: skip
        received, _ = decode(encode(header, torch.zeros(0, dtype=torch.uint8).numpy()))
        assert Layout.of_header(received) == layout
        device = torch.device("cpu")
        x_BSH = scatter(gather(message["hidden_states"], layout), layout)
        message = stage(
            {
                "hidden_states": x_BSH,
                "attention_mask": layout.mask_BS(device),
                "position_ids": layout.position_ids(device),
                "cu_seq_lens": layout.cu_seq_lens(),
            }
        )
    return message, layout


def loss_and_gradients(model: nn.Module, cuts: list[int], batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    stages = split(model, cuts=cuts)
    logits, layout = over_links(stages, batch)
    assert batch.labels is not None
    labels = stages[-1].mask_labels(layout, batch.labels)
    stages[-1].check_labels(layout, labels)
    loss = default_loss(stages[-1].config)(logits, labels)
    loss.backward()
    return loss.detach(), added_up(stages)


def apart(model: Any, *, causal: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model that sees one sample at a time."""
    model.zero_grad(set_to_none=True)
    counts = [n - causal for n in SIZES]
    total = torch.zeros(())
    for sample, count in zip(samples(), counts, strict=True):
        if count:
            total = total + model(**{k: x[None] for k, x in sample.items()}, use_cache=False).loss * count / sum(counts)
    total.backward()
    return total.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def check_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    for key, gradient in found[1].items():
        assert (gradient - expected[1][key]).abs().max() <= 2e-6 * max(expected[1][key].abs().max(), 0.01), key


class TestEqualToSamplesApart:
    @pytest.mark.parametrize("cuts", CUTS, ids=str)
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", LANGUAGE)
    def test_loss_and_gradients(self, name: str, attention: str, cuts: list[int]) -> None:
        model = make_model(name, attention=attention)
        expected = apart(model, causal="masked" not in name)
        check_equal(loss_and_gradients(model, cuts, packed(name)), expected)

    @pytest.mark.parametrize("name", ["gpt2", "mistral"])
    def test_one_row_of_transformers_collator(self, name: str) -> None:
        model = make_model(name)
        batch = packed(name, transformers.DataCollatorWithFlattening())
        assert batch.inputs["input_ids"].shape == (1, sum(SIZES))
        check_equal(loss_and_gradients(model, [0, 1, 4], batch), apart(model, causal=True))

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_a_decoder_whose_mask_does_not_follow_from_positions(self, attention: str) -> None:
        sizes = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32}
        config = transformers.OPTConfig(
            vocab_size=TOKENS, num_hidden_layers=4, max_position_embeddings=40, dropout=0.0, **sizes
        )
        config._attn_implementation = attention
        torch.manual_seed(7)
        model = disturbed(transformers.OPTForCausalLM(config)).train()
        check_equal(loss_and_gradients(model, [0, 1, 4], packed("opt")), apart(model, causal=True))

    @pytest.mark.parametrize("start", [0, 2])
    def test_positions_of_roberta(self, start: int) -> None:
        model = make_model("roberta-masked")

        def collate(batch: list[Any]) -> Any:
            made = PackingCollator(max_length=14, causal=False)(batch)
            return {**made, "position_ids": made["position_ids"] + start}

        check_equal(loss_and_gradients(model, [0, 1, 4], packed("roberta-masked", collate)), apart(model, causal=False))

    @pytest.mark.parametrize("name", ["gpt2", "llama"])
    def test_gradient_checkpointing(self, name: str) -> None:
        model = make_model(name)
        expected = loss_and_gradients(model, [0, 1, 4], packed(name))
        for stage in split(model, cuts=[0, 1, 4]):
            stage.gradient_checkpointing_enable()
        check_equal(loss_and_gradients(model, [0, 1, 4], packed(name)), expected)

    def test_lora(self) -> None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            make_model("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        whole = model.get_base_model()
        expected = apart(whole, causal=True)
        found = loss_and_gradients(whole, [0, 1, 4], packed("llama"))
        assert all("lora" in key for key in found[1])
        check_equal(found, expected)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        model = make_model("llama").to(dtype)
        expected, found = apart(model, causal=True), loss_and_gradients(model, [0, 1, 4], packed("llama"))
        torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=1e-2, atol=0)

    @pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "bert-masked"])
    def test_nobody_waits_for_a_gpu(self, name: str) -> None:
        stages, batch = split(make_model(name).eval(), cuts=[0, 1, 4]), packed(name)
        expected, layout = over_links(stages, batch)
        with Looks() as looks, assume_masks(full=layout.full, device=GPU, packed=True):
            found = stages[1](stages[0](batch.inputs))
        assert looks.count == 0
        assert torch.equal(gather(found, layout), gather(expected, layout))

    @pytest.mark.parametrize("bounds", [True, False])
    def test_flash_attention_gets_one_row_and_the_samples_lengths(
        self, bounds: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A stand-in with its arguments: no CPU has the real one."""
        from transformers import AttentionInterface, AttentionMaskInterface

        calls: list[Any] = []

        def varlen(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any) -> Any:
            assert attention_mask is None
            assert query.shape[0] == 1
            if "cu_seq_lens_q" not in more:  # a sample by itself
                return nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                ).transpose(1, 2), None
            assert torch.equal(more["cu_seq_lens_q"], more["cu_seq_lens_k"])
            sizes = more["cu_seq_lens_q"].diff().tolist()
            assert more["max_length_q"] == more["max_length_k"] == max(sizes)
            calls.append(sizes)
            parts = [x.split(sizes, dim=2) for x in (query, key, value)]
            outs = [
                nn.functional.scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True)
                for p in zip(*parts, strict=True)
            ]
            return torch.cat(outs, 2).transpose(1, 2), None

        AttentionInterface.register("flash_stand_in", varlen)
        AttentionMaskInterface.register("flash_stand_in", lambda *_, **__: None)
        batch = packed("llama")
        if not bounds:
            monkeypatch.setattr(Layout, "cu_seq_lens", lambda self: None)
        expected = apart(make_model("llama"), causal=True)
        model = make_model("llama")
        model.config._attn_implementation = "flash_stand_in"
        check_equal(loss_and_gradients(model, [0, 1, 4], batch), expected)
        assert batch.lengths is not None
        real = [n for row in batch.lengths for n in (*row, *[1] * (batch.inputs["input_ids"].shape[1] - sum(row)))]
        assert calls[-1] == real


class TestLabels:
    def test_no_label_is_predicted_from_another_sample(self) -> None:
        batch, stage = packed("gpt2"), split(make_model("gpt2"), num_stages=1)[0]
        layout = stage.layout(batch.ids, batch.inputs, batch.lengths)
        position_BS = batch.inputs["position_ids"]
        masked = stage.mask_labels(layout, batch.inputs["input_ids"])
        real_BS = layout.real_BS(torch.device("cpu")) > 0
        assert (masked[(position_BS == 0) & real_BS] == -100).all()
        assert torch.equal(masked[position_BS > 0], batch.inputs["input_ids"][position_BS > 0])

    def test_wrong_ones_are_named_by_sample(self) -> None:
        batch, stages = packed("gpt2"), split(make_model("gpt2"), num_stages=2)
        layout = stages[0].layout(batch.ids, batch.inputs, batch.lengths)
        assert batch.labels is not None
        row, place = (batch.inputs["position_ids"] == 4).nonzero()[0].tolist()
        labels = batch.labels.clone()
        labels[row, place] = TOKENS
        before = sum(len(lengths) for lengths in (batch.lengths or ())[:row])
        sample = batch.ids[before + int((batch.inputs["position_ids"][row, :place] == 0).sum()) - 1]
        with pytest.raises(DataError, match=f"sample {sample} has {TOKENS} at place 4"):
            stages[1].check_labels(layout, labels)
        with pytest.raises(DataError, match="labels have shape"):
            stages[1].check_labels(layout, labels[:, :-1])
        padding = ~(layout.real_BS(torch.device("cpu")) > 0)
        with pytest.raises(DataError, match="labels at padding"):
            stages[1].check_labels(layout, batch.labels.masked_fill(padding, 4))


class TestRefused:
    @pytest.mark.parametrize("name", ["gpt2-classes", "llama-classes", "bert-classes", "deberta-v3"])
    def test_one_result_for_a_row(self, name: str) -> None:
        with pytest.raises(SplitError, match="one result for each row"):
            split(make_model(name), num_stages=2)[0].check_packing()

    @pytest.mark.parametrize("name", ["deberta-masked", "deberta-masked-new"])
    def test_attention_that_takes_no_such_mask(self, name: str) -> None:
        with pytest.raises(SplitError, match="packing: DebertaV2ForMaskedLM fails"):
            split(make_model(name), num_stages=2)[0].check_packing()

    @pytest.mark.parametrize("stage", [0, 1])
    def test_state_that_passes_from_sample_to_sample(self, stage: int) -> None:
        class Recurrent(nn.Module):
            def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                return hidden_states + 0.01 * hidden_states.cumsum(1)

        model = make_model("llama")
        model.model.layers[3 * stage] = Recurrent()
        stages = split(model, cuts=[0, 1, 4])
        stages[1 - stage].check_packing()
        with pytest.raises(SplitError, match="pass state from one sample of a row to the next"):
            stages[stage].check_packing()

    def test_windows_that_a_mask_of_ones_own_would_lose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.mistral import modeling_mistral

        made = modeling_mistral.create_sliding_window_causal_mask
        without = lambda **given: made(**{**given, "position_ids": None})  # noqa: E731
        monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", without)
        with pytest.raises(SplitError, match="pass state from one sample"):
            split(make_model("mistral"), num_stages=2)[0].check_packing()

    def test_a_model_without_positions(self) -> None:
        model = make_model("llama")
        kind = type(model.model)
        model.model.__class__ = type("NoPositionsModel", (kind,), {"forward": lambda self, inputs_embeds: None})
        with pytest.raises(SplitError, match="takes no position_ids"):
            split(model, num_stages=1)[0].check_packing()

    def test_training_is_as_before_after_the_check(self) -> None:
        stage = split(make_model("gpt2", resid_pdrop=0.5), num_stages=2)[1]
        state = torch.get_rng_state()
        stage.check_packing()
        assert torch.equal(torch.get_rng_state(), state)
        assert stage.training
        assert all(module.training for module in stage.modules())
        assert all(p.grad is None for p in stage.parameters())

    def test_a_sample_that_is_longer_than_the_positions(self) -> None:
        batch = as_micro_batch(PackingCollator()([{"input_ids": [5] * 41}, {"input_ids": [6, 7]}]), [8, 9])
        stage = split(make_model("gpt2"), num_stages=2)[0]
        with pytest.raises(DataError, match="sample 8 has 41 tokens: GPT2LMHeadModel has 40 positions"):
            stage.layout(batch.ids, batch.inputs, batch.lengths)
        several = as_micro_batch(
            PackingCollator(max_length=60)([{"input_ids": [5] * 30}, {"input_ids": [6] * 29}]), [8, 9]
        )
        assert stage.layout(several.ids, several.inputs, several.lengths).tokens == 59
        assert stage(several.inputs)["hidden_states"].shape == (1, 59, 32)

    def test_positions_with_a_mask(self) -> None:
        ids = torch.ones(1, 4, dtype=torch.int64)
        with pytest.raises(DataError, match="position_ids with an attention_mask"):
            split(make_model("gpt2"), num_stages=2)[0]({"input_ids": ids, "position_ids": ids, "attention_mask": ids})


class TestLayout:
    def layout(self) -> Layout:
        return Layout.of_lengths((7, 8, 9, 5), [(2, 1), (3,), (1,)], 4)

    def test_rows(self) -> None:
        layout = self.layout()
        assert (layout.batch_size, layout.total, layout.full) == (3, 7, False)
        assert layout.position_ids(torch.device("cpu")).tolist() == [[0, 1, 0, 0], [0, 1, 2, 0], [0, 0, 0, 0]]
        assert layout.cu_seq_lens().tolist() == [0, 2, 3, 4, 7, 8, 9, 10, 11, 12]
        assert layout.mask_BS(torch.device("cpu")) is None
        assert layout.real_BS(torch.device("cpu")).sum(1).tolist() == [3, 3, 1]

    def test_gather_scatter_and_unpack(self) -> None:
        layout, x = self.layout(), torch.randn(3, 4, 2)
        rows = gather(x, layout)
        assert torch.equal(rows, torch.cat([x[0, :3], x[1, :3], x[2, :1]]))
        assert torch.equal(gather(scatter(rows, layout), layout), rows)
        assert scatter(rows, layout)[2, 1:].abs().sum() == 0
        apart = layout.unpack(x, -1.0)
        assert apart.shape == (4, 3, 2)
        assert torch.equal(apart[2], x[1, :3])
        assert (apart[1, 1:] == -1).all()
        assert layout.unpack(torch.arange(12).view(3, 4), -100).tolist() == [
            [0, 1, -100], [2, -100, -100], [4, 5, 6], [8, -100, -100],
        ]  # fmt: skip

    def test_full_rows_are_a_view(self) -> None:
        layout, x = Layout.of_lengths((7, 8, 9), [(2, 1), (3,)], 3), torch.randn(2, 3, 2)
        assert layout.full
        assert gather(x, layout).data_ptr() == x.data_ptr()
        assert scatter(gather(x, layout), layout).shape == x.shape

    def test_positions_are_made_on_their_device(self) -> None:
        positions = self.layout().position_ids(torch.device("meta"))
        assert (positions.shape, positions.dtype, positions.device.type) == ((3, 4), torch.int64, "meta")

    @pytest.mark.parametrize("lengths", [[(2, 3)], [()], [(2, 0)]])
    def test_samples_that_do_not_fit(self, lengths: Any) -> None:
        with pytest.raises(DataError, match="a packed row of 4 tokens"):
            Layout.of_lengths(tuple(range(len(list(chain(*lengths))))), lengths, 4)

    @pytest.mark.parametrize("samples", [[(0, 2), (3, 1)], [(1, 2)], [(0, 2), (1, 1)], [(0, 0)], [(0, 2), (2, 0)]])
    def test_headers_that_leave_gaps_or_overlap(self, samples: list[tuple[int, int]]) -> None:
        header = PacketHeader(
            kind=PacketKind.ACTIVATION, method=PayloadMethod.CAST, link=0, step=0, micro_batch=0, tokens=4,
            samples=tuple(Sample(i, Form.PLAIN, start, count) for i, (start, count) in enumerate(samples)), packed=True,
        )  # fmt: skip
        with pytest.raises(WireError, match="packed sample"):
            Layout.of_header(header)


def test_numbers_of_samples() -> None:
    positions = torch.tensor([[0, 1, 0, 0], [2, 3, 4, 2]])
    assert sample_numbers(positions).tolist() == [[0, 0, 1, 2], [0, 0, 0, 1]]
