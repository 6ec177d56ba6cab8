"""The engine over real processes against stock DeepSpeed, against Algorithm 1 in one process, and against one stage."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import torch

from pipecomp.buffers.base import GRADIENT
from pipecomp.distributed.local_launcher import run_ranks
from tests.limits import HANG_S
from tests.models import ds_config, gpt2, samples

pytestmark = pytest.mark.ranks

STEPS = 10
ERROR = [{"error": 0.02}, {"error": 0.1}]
UNCLIPPED = {"gradient_clipping": 1e9}  # stock DeepSpeed counts only the first stage's norm


def train(stages, section=None, *, model=None, steps=STEPS, data=None, config=None, **more):
    """Losses of `steps` steps, the engine still open."""
    from pipecomp import initialize

    engine = initialize(
        gpt2() if model is None else model,
        num_stages=stages,
        config=config or ds_config(section, **more),
        training_data=data or samples(),
    )
    return engine, [float(engine.train_batch()) for _ in range(steps)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def messages(engine) -> dict[str, dict[int, tuple[int, str]]]:
    """For each link of this rank: sample -> (version, digest of m)."""
    out = {}
    for end in engine.links:
        ids = [h.sample for h in end.store.inventory()]
        held = end.store.get(ids)
        out[f"{end.index}"] = {i: (m.version, digest(m.m_nH)) for i, m in zip(ids, held, strict=True)}
    return out


# -- bit for bit


def stock_and_ours(rank, world, note):
    from pipecomp.bench.training import stock_engine
    from pipecomp.data import ShardedSampler

    engine, ours = train(2, {"tie": False}, model=gpt2(tied=False), **UNCLIPPED)
    engine.close()
    config = ds_config(**UNCLIPPED)
    config["optimizer"]["params"]["torch_adam"] = True
    config.pop("pipecomp")
    stock = stock_engine(gpt2(tied=False), 2, config)
    data, sampler = samples(), ShardedSampler(24, 2)

    def batches():
        number = 0
        while True:
            x = torch.stack([data[i]["input_ids"] for i in sampler.batch(number)])
            number += 1
            yield x, x

    iterator = batches()
    theirs = [float(stock.train_batch(iterator)) for _ in range(STEPS)]
    weights = {n.split(".", 2)[2]: digest(p) for n, p in stock.module.named_parameters()}
    return ours, theirs, weights == {n: digest(p) for n, p in engine.stage.named_parameters()}


def test_without_compression_every_loss_and_weight_is_stock_deepspeeds():
    for ours, theirs, same_weights in run_ranks(2, stock_and_ours, timeout_s=HANG_S).values():
        assert ours == theirs
        assert same_weights
        assert len(set(ours)) == STEPS


def on_one_gpu(rank, world, note):
    """Imitate DeepSpeed where both ranks have one GPU, from whose memory gloo cannot send."""
    import os
    from types import SimpleNamespace

    from deepspeed.runtime.pipe import p2p

    from pipecomp.engine import deepspeed_patches

    def refuse(*args, **options):
        raise RuntimeError("from the memory of a GPU")

    p2p.send = p2p.recv = refuse
    deepspeed_patches.get_accelerator = lambda: SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 1)
    engine, losses = train(2, steps=1)
    engine.close()
    return engine.module.local_rank, engine.local_rank, os.environ["LOCAL_RANK"], losses


def test_stages_start_on_one_gpu():
    ranks = run_ranks(2, on_one_gpu, timeout_s=HANG_S)
    assert [found[:3] for found in ranks.values()] == [(0, rank, str(rank)) for rank in ranks]
    assert ranks[0][3] == ranks[1][3]


def quantize(x: torch.Tensor, bits: int) -> torch.Tensor:
    """deq(Q_b(x)), docs/algorithms.md 1.2: nearest, one group a row."""
    scale = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(scale < 2.0**-100, torch.zeros(()), 1 / scale)
    code = ((x * inverse + 1) * 2 ** (bits - 1)).floor().clamp(0, 2**bits - 1)
    return torch.where(scale < 2.0**-100, torch.zeros(()), scale * ((code + 0.5) / 2 ** (bits - 1) - 1))


def gradient_base(u: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Return the base of a gradient's change [S, H], docs/algorithms.md 1.7: zero, where the change is no smaller."""
    return torch.where((u - m).abs().amax(-1, keepdim=True) < u.abs().amax(-1, keepdim=True), m, torch.zeros(()))


def packet_bits(how: Any, visits: list[tuple[torch.Tensor, torch.Tensor | None]]) -> int:
    """Bits of a packet's changes: a number, or the fewest that keep an error, docs/algorithms.md 1.2.

    visits: x of each sample, and what it is a change of.
    """
    if isinstance(how, int):
        return how
    known = [(x, base) for x, base in visits if base is not None]
    norm = sum(float(x.double().square().sum()) for x, _ in known)
    for bits in range(2, 8):
        left = sum(float((x - base - quantize(x - base, bits)).double().square().sum()) for x, base in known)
        if left <= how["error"] ** 2 * norm:
            return bits
    return 8


def algorithm_1(
    forward_bits: list[Any], backward_bits: list[Any], steps: int, micro_batches: int = 3, *, changes: bool = False
):
    """AQ-SGD in one process: plain torch, one message per sample and link. Returns losses and messages.

    changes: gradients are sent as changes too.
    """
    from pipecomp.data import ShardedSampler
    from pipecomp.stages import default_loss, split

    stages = len(forward_bits) + 1
    parts = split(gpt2(), num_stages=stages)
    loss_fn = default_loss(parts[0].config)
    optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-3, weight_decay=0.01) for p in parts]
    data, sampler = samples(), ShardedSampler(24, 2)
    held: list[dict[int, torch.Tensor]] = [{} for _ in range(stages - 1)]
    tied = [p.tied_parameters() for p in parts]
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for micro_batch in range(micro_batches):
            ids = sampler.batch(step * micro_batches + micro_batch)
            x = torch.stack([data[i]["input_ids"] for i in ids])
            inputs: list[Any] = [{"input_ids": x, "attention_mask": None}]
            outputs: list[Any] = []
            for k, part in enumerate(parts):
                outputs.append(part(inputs[k]))
                if k == stages - 1:
                    break
                a = outputs[k]["hidden_states"].detach()
                bits = packet_bits(forward_bits[k], [(a[i], held[k].get(sample)) for i, sample in enumerate(ids)])
                for i, sample in enumerate(ids):
                    m = held[k].get(sample)
                    held[k][sample] = a[i].clone() if m is None else m + quantize(a[i] - m, bits)
                received = torch.stack([held[k][sample] for sample in ids]).requires_grad_()
                inputs.append({"hidden_states": received, "attention_mask": None})
            loss = loss_fn(outputs[-1], x)
            total += loss.detach()
            (loss / micro_batches).backward()
            for k in reversed(range(stages - 1)):
                g = inputs[k + 1]["hidden_states"].grad
                if changes:
                    unit = 4096.0 * len(ids) * micro_batches
                    before = [held[k].get(sample | GRADIENT) for sample in ids]
                    u = g * unit
                    bases = [None if m is None else gradient_base(u[i], m) for i, m in enumerate(before)]
                    bits = packet_bits(backward_bits[k], list(zip(u, bases, strict=True)))
                    for i, (sample, base) in enumerate(zip(ids, bases, strict=True)):
                        moved = quantize(u[i], 8) if base is None else base + quantize(u[i] - base, bits)
                        held[k][sample | GRADIENT] = moved
                    g = torch.stack([held[k][sample | GRADIENT] for sample in ids]) / unit
                else:
                    g = quantize(g, backward_bits[k])
                outputs[k]["hidden_states"].backward(g)
        for name in tied[0]:
            grad = tied[0][name].grad + tied[-1][name].grad
            tied[0][name].grad = grad
            tied[-1][name].grad = grad.clone()
        counted = [
            p.grad
            for k, part in enumerate(parts)
            for p in part.parameters()
            if not (k == stages - 1 and any(p is t for t in tied[-1].values()))
        ]
        norm = torch.stack([g.norm() for g in counted]).double().square().sum().sqrt()
        scale = 0.5 / (norm + 1e-6)
        for part, optimizer in zip(parts, optimizers, strict=True):
            for p in part.parameters():
                if float(scale) < 1:
                    p.grad.mul_(float(scale))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(total / micro_batches))
    return losses, [{i: digest(m) for i, m in link.items()} for link in held]


def compressed(rank, world, note, folder, bits):
    out = {}
    activations = {"method": "aqsgd", **bits}
    for name, section in {
        "lmdb": {"activations": activations, "store": {"path": f"{folder}/lmdb"}},
        "memory": {"activations": activations, "store": {"backend": "memory"}},
    }.items():
        engine, losses = train(world, section)
        before = messages(engine)
        evaluated = [float(engine.eval_batch(iter(eval_data()), num_micro_batches=3)) for _ in range(2)]
        out[name] = (losses, before, messages(engine) == before, evaluated, engine.comm_stats())
        engine.close()
    return out


def eval_data():
    from pipecomp.data import eval_batches

    return eval_batches(samples(6, seed=5), 2)


@pytest.mark.parametrize(
    ("bits", "forward_bits", "backward_bits"),
    [
        ({"forward_bits": 3, "backward_bits": 6}, [3], [6]),
        ({"forward_bits": [2, 5], "backward_bits": 6}, [2, 5], [6, 6]),
        ({"forward_bits": 3, "backward_bits": 2, "backward_method": "delta"}, [3], [2]),
        ({"forward_bits": 2, "backward_bits": [2, 3], "backward_method": "delta"}, [2, 2], [2, 3]),
        ({"forward_bits": ERROR[0], "backward_bits": ERROR[1], "backward_method": "delta"}, ERROR[:1], ERROR[1:]),
    ],
)
def test_aqsgd_is_algorithm_1_bit_for_bit(bits, forward_bits, backward_bits, tmp_path):
    torch.set_num_threads(1)
    stages = len(forward_bits) + 1
    changes = "backward_method" in bits
    losses, held = algorithm_1(forward_bits, backward_bits, STEPS, changes=changes)
    ranks = run_ranks(stages, compressed, str(tmp_path), bits, timeout_s=HANG_S)
    for name in ("lmdb", "memory"):
        for rank, result in ranks.items():
            got, kept, untouched, evaluated, stats = result[name]
            assert got == losses
            assert untouched, "evaluation changed a message"
            assert evaluated[0] == evaluated[1]
            for link, by_sample in kept.items():
                assert {i: d for i, (_, d) in by_sample.items()} == held[int(link)], f"rank {rank}, link {link}"
            for link in stats["links"].values():
                if forward_bits == ERROR[:1]:
                    assert not link["backward"]["mean_bits"].is_integer(), "the test's packets have different bits"
                assert link["full_samples"] == 24
                assert link["delta_samples"] == STEPS * 6 - 24
                assert link["full_gradients"] == 24 * changes
                assert link["delta_gradients"] == (STEPS * 6 - 24) * changes
        for upstream in range(stages - 1):  # versions too
            ours, theirs = (ranks[upstream + k][name][1][str(upstream)] for k in (0, 1))
            assert ours == theirs


# -- the same training however it is spread


def spread(rank, world, note, stages, more):
    engine, losses = train(stages, steps=4, **more)
    norm = float(engine.get_global_grad_norm())
    groups = engine.comm_stats()["groups"]
    weights = {n: digest(p) for n, p in engine.stage.named_parameters()}
    engine.close()
    return losses, norm, weights, groups


MODES = {
    "fp32": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-zero1": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
}


def padded(samples_of_it):
    """Batches whose samples have different lengths: padded right, labels of padding ignored."""
    length = max(len(s["input_ids"]) for s in samples_of_it)
    fill = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([fill(s["input_ids"], (0, length - len(s["input_ids"]))) for s in samples_of_it]),
        "attention_mask": torch.stack(
            [fill(torch.ones_like(s["input_ids"]), (0, length - len(s["input_ids"]))) for s in samples_of_it]
        ),
        "labels": torch.stack([fill(s["labels"], (0, length - len(s["labels"])), value=-100) for s in samples_of_it]),
    }


def unequal():
    return [{key: value[: 5 + i % 13] for key, value in sample.items()} for i, sample in enumerate(samples())]


def all_modes(rank, world, note, stages):
    import pipecomp

    out = {name: spread(rank, world, note, stages, more) for name, more in MODES.items()}
    engine = pipecomp.initialize(
        gpt2(), num_stages=stages, config=ds_config(), training_data=unequal(), collate_fn=padded
    )
    out["padded"] = [float(engine.train_batch()) for _ in range(4)], engine.comm_stats()["links"]
    engine.close()
    if stages > 1:
        section = {"activations": {"method": "aqsgd", "first_visit": 8}, "store": {"backend": "memory"}}
        engine, losses = train(stages, section, steps=6)
        out["messages"] = losses, messages(engine)
        engine.close()
    return out


@pytest.mark.soak
def test_stages_and_replicas_train_alike_in_every_precision():
    """Same losses and the same true global norm for one stage and two, one replica and two; tied weights stay equal."""
    whole = run_ranks(1, all_modes, 1, timeout_s=HANG_S)[0]
    halves = run_ranks(2, all_modes, 2, timeout_s=HANG_S)
    replicas = run_ranks(2, all_modes, 1, timeout_s=HANG_S)
    both = run_ranks(4, all_modes, 2, timeout_s=HANG_S)
    for mode in MODES:
        tolerance = 2e-3 if "bf16" in mode else 1e-6
        for one, several in ((whole, halves), (replicas[0], both)):
            for result in several.values():
                assert result[mode][0] == pytest.approx(one[mode][0], rel=tolerance)
                assert result[mode][1] == pytest.approx(one[mode][1], rel=10 * tolerance)
        assert halves[0][mode][2]["transformer.wte.weight"] == halves[1][mode][2]["lm_head.weight"]
        for a, b in ((0, 1), (2, 3)):  # replicas of a stage
            assert both[a][mode][2] == both[b][mode][2]
        group = both[0][mode][3]["data parallel"]
        assert group["bytes_raw"] == group["bytes_sent"] * (2 if mode == "bf16-zero1" else 1) > 0
        assert "tied transformer.wte.weight" in both[0][mode][3]
    for one, several in ((whole, halves), (replicas[0], both)):
        for result in several.values():
            assert result["padded"][0] == pytest.approx(one["padded"][0], rel=1e-6)
    real = sum(5 + i % 13 for i in range(24)) * 32 * 4
    assert halves[0]["padded"][1]["0->1"]["forward"]["bytes_raw"] == real  # 4 steps of 6 are one epoch of 24
    kept = [both[rank]["messages"][1]["0"] for rank in range(4)]
    assert kept[0] == kept[2]
    assert kept[1] == kept[3]
    assert set(kept[0]) == set(range(0, 24, 2)), "the first replica keeps its own samples"
    assert set(kept[1]) == set(range(1, 24, 2))


# -- refusals


def refused(rank, world, note):
    import pipecomp
    from pipecomp.errors import DataError, PipecompError

    out = {}
    for name, call in {
        "stages": lambda: pipecomp.initialize(gpt2(), num_stages=3, config=ds_config()),
        "one stage": lambda: pipecomp.initialize(
            gpt2(), num_stages=1, config=ds_config({"activations": {"method": "direct"}})
        ),
        "ahead": lambda: pipecomp.initialize(gpt2(), num_stages=1, config=ds_config({"in_flight": 4})),
        "eval": lambda: pipecomp.initialize(gpt2(), num_stages=1, config=ds_config({"activations": {"eval": "fp16"}})),
        "key": lambda: pipecomp.initialize(gpt2(), num_stages=2, config=ds_config({"activations": {"bits": 4}})),
        "bits": lambda: pipecomp.initialize(
            gpt2(), num_stages=2, config=ds_config({"activations": {"method": "direct", "forward_bits": [4, 4]}})
        ),
        "file": lambda: pipecomp.initialize(gpt2(), num_stages=2, config="no/such.json"),
        "section": lambda: pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(bf16=True)),
        "timers": lambda: pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(wall_clock_breakdown=True)),
        "optimizer": lambda: pipecomp.initialize(
            (model := gpt2()),
            num_stages=2,
            config=ds_config(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ),
        "samples": lambda: pipecomp.initialize(
            gpt2(), num_stages=2, config=ds_config(), training_data=samples() if rank else samples(1)
        ),
    }.items():
        try:
            call()
        except PipecompError as error:
            out[name] = str(error)
    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config())
    try:
        engine.train_batch()
    except DataError as error:
        out["no data"] = str(error)
    except Exception as error:
        out["no data"] = f"{type(error).__name__}: {error}"
    return out


def test_what_is_refused():
    ranks = run_ranks(2, refused, timeout_s=HANG_S)
    for out in ranks.values():
        assert "num_stages: got 3, allowed: a divisor of the 2 processes" in out["stages"]
        assert "activations.method: got 'direct', allowed: 'none' with one stage" in out["one stage"]
        assert "in_flight: got 4, allowed: 'auto' with one stage" in out["ahead"]
        assert "activations.eval: got 'fp16', allowed: 'full' with one stage" in out["eval"]
        assert "activations.bits" in out["key"]
        assert "activations.forward_bits: got [4, 4], allowed: one number, or 1: one for each link" in out["bits"]
        assert "no/such.json" in out["file"]
        assert "bf16: got True, allowed: an object with keys and values" in out["section"]
        assert "wall_clock_breakdown: got True, allowed: false with several stages" in out["timers"]
        assert "optimizer: got 'SGD', allowed: a callable" in out["optimizer"]
    assert "1 samples are too few for 1 replica(s)" in ranks[0]["samples"]
    assert "rank 0 could not start: DataError: 1 samples are too few" in ranks[1]["samples"]
    assert "training_data" in ranks[0]["no data"]
    assert "rank 0 stopped: DataError: no data" in ranks[1]["no data"]


def with_other_batches(rank, world, note):
    engine, _ = train(1, steps=1)
    engine.train_batch(iter(eval_data()))
    engine.train_batch()
    return engine.loader.taken, engine.progress.batches_taken


def test_training_data_go_on_after_a_step_with_other_batches():
    assert run_ranks(1, with_other_batches, timeout_s=HANG_S) == {0: (6, 6)}


def copied(its):
    """As `padded`, with labels that are the input_ids, padding too."""
    batch = padded(its)
    return batch | {"labels": batch["input_ids"]}


def mislabeled(rank, world, note):
    import pipecomp

    data, found = unequal(), []
    for loss_fn in (lambda logits, labels: logits.square().mean(), None):
        more = {"training_data": data, "collate_fn": copied, "loss_fn": loss_fn}
        engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(), **more)
        try:
            found.append(f"{float(engine.train_batch()) > 0}")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_labels_that_only_padding_predicts_are_an_error_on_all_ranks():
    ranks = run_ranks(2, mislabeled, timeout_s=HANG_S)
    assert ranks[0][0] == ranks[1][0] == "True", "a loss of one's own may ignore them"
    assert re.match(r"DataError: labels: sample \d+ has 0 at place \d+, to be predicted from padding", ranks[1][1])
    assert "PeerLostError: rank 1 stopped: DataError: labels" in ranks[0][1]


def misaligned(rank, world, note):
    import pipecomp

    engine = pipecomp.initialize(gpt2(), num_stages=2, config=ds_config(), training_data=samples(), shuffle=rank == 0)
    try:
        engine.train_batch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_labels_of_other_samples_are_an_error_everywhere():
    ranks = run_ranks(2, misaligned, timeout_s=HANG_S)
    assert "DataError: step 0, micro-batch 0: the first stage sent samples" in ranks[1]
    assert "PeerLostError: rank 1 stopped: DataError" in ranks[0]
