"""CompressionCallback under real Trainers on two processes: hook, logs, resuming, refusals."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError
from tests.limits import HANG_S
from tests.models import gpt2, samples

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
KEYS = {"grad_bytes_raw", "grad_bytes_sent", "grad_compression", "grad_error"}
SQUEEZE = {"method": "double_squeeze", "bits": 2, "group_size": 64}


def small_trainer(folder: str, *callbacks: Any, seed: int = 0, **more: Any) -> Any:
    """A Trainer of a GPT-2 without dropout for six steps on random tokens."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 2,
        "save_strategy": "no",
        "seed": 3,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }
    args = TrainingArguments(output_dir=folder, **settings)
    held_out = samples(4, seed=8)
    return Trainer(
        gpt2(2, 32, seed=seed), args, train_dataset=samples(), eval_dataset=held_out, callbacks=list(callbacks)
    )


def digest(model: Any) -> str:
    """Return a digest of all weights, bit for bit."""
    out = hashlib.sha256()
    for parameter in model.parameters():
        out.update(parameter.detach().float().numpy().tobytes())
    return out.hexdigest()


def content(value: Any) -> Any:
    """Tensors as plain lists, so that `==` compares everything bit for bit."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [content(item) for item in value]
    return value


def memories(callback: Any) -> Any:
    """Return the contents of a callback's state."""
    state = callback._state
    hook = state._hook
    torchs = {key: (m.error_dict, m.q_memory_dict) for key, m in getattr(hook, "_states", {}).items()}
    return content((state.state_dict(), torchs))


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


# -- what the ranks do


def using(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    from pipecomp import CompressionCallback

    class Seen(TrainerCallback):
        """The logs that a callback gets which was added earlier, as those of TensorBoard are."""

        def __init__(self) -> None:
            self.logs: list[dict] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    out: dict[str, Any] = {}
    plain = small_trainer(folder)
    plain.train()
    out["plain"] = digest(plain.model)

    callback, seen = CompressionCallback(method="global_qsgd", levels="linear", bits=8), Seen()
    trainer = small_trainer(folder, seen, callback, report_to="tensorboard", eval_strategy="steps", eval_steps=3)
    out["before"] = callback.stats()["bytes_sent"]
    trainer.train()
    out |= {"weights": digest(trainer.model), "stats": callback.stats(), "history": trainer.state.log_history}
    out |= {"seen": seen.logs, "parameters": parameters(trainer.model)}
    trainer.train()
    out |= {"again": callback.stats(), "weights again": digest(trainer.model)}

    accumulating = CompressionCallback(method="global_qsgd", seed=4)
    trainer = small_trainer(folder, accumulating, gradient_accumulation_steps=2, bf16=True, max_steps=5)
    trainer.train()
    out |= {"bf16": accumulating.stats(), "bf16 weights": digest(trainer.model)}

    with pytest.raises(ConfigError) as caught:
        small_trainer(folder, CompressionCallback("terngrad"), CompressionCallback("qsgd_mn")).train()
    out["two hooks"] = str(caught.value)

    half = CompressionCallback(method="fp16")
    trainer = small_trainer(folder, half)
    trainer.train()
    out |= {"fp16": half.stats(), "fp16 weights": digest(trainer.model), "fp16 history": trainer.state.log_history}
    return out


def resuming(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    from transformers import TrainerCallback

    from pipecomp import CompressionCallback

    class Spy(TrainerCallback):
        """A callback's memories when a checkpoint was written, and before the first step."""

        def __init__(self, of: Any) -> None:
            self.of, self.saved, self.first = of, {}, None

        def on_save(self, args, state, control, **kwargs):
            self.saved[state.global_step] = memories(self.of)

        def on_step_begin(self, args, state, control, **kwargs):
            self.first = self.first or memories(self.of)

    out: dict[str, Any] = {}
    saving = {"save_strategy": "steps", "save_steps": 3}
    for name, options in (
        ("squeeze", SQUEEZE),
        ("casq", {"method": "casq", "bits": 4, "interval": 4}),
        ("random", {"method": "global_qsgd", "seed": 5}),
        ("powersgd", {"method": "powersgd", "rank": 2}),
        ("adaptive", {**SQUEEZE, "adaptive": {"every": 2}}),
        ("adaptive rank", {"method": "powersgd", "rank": 2, "adaptive": {"every": 2, "error": 0.5}}),
    ):
        where = f"{folder}/{name}"
        callback = CompressionCallback(**options)
        spy = Spy(callback)
        whole = small_trainer(where, callback, spy, **saving)
        whole.train()
        callback = CompressionCallback(**options)
        again = Spy(callback)
        rest = small_trainer(where, callback, again, seed=1, **saving)
        rest.train(resume_from_checkpoint=f"{where}/checkpoint-3")
        out[name] = {"weights": (digest(whole.model), digest(rest.model)), "same": again.first == spy.saved[3]}
        out[name] |= {"first": again.first[1], "tensors": str(again.first).count("torch.float32")}
        out[name]["at"] = rest.state.global_step

    # The model has trained before: DDP's buckets are those of its second step from the first step on.
    options = {**SQUEEZE, "bits": 4}
    callback = CompressionCallback(**options)
    spy = Spy(callback)
    rebuilt = small_trainer(f"{folder}/rebuilt", callback, spy, ddp_find_unused_parameters=False, **saving)
    rebuilt.train()
    spy.first = None
    shutil.rmtree(f"{folder}/rebuilt/checkpoint-6", ignore_errors=True)
    torch.distributed.barrier()
    rebuilt.train(resume_from_checkpoint=True)
    out["rebuilt"] = spy.first[0]["memory"]["worker"] == spy.saved[3][0]["memory"]["worker"]

    messages: list[str] = []

    class Catch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("pipecomp.trainer.ddp_callback").addHandler(Catch())
    small_trainer(f"{folder}/plain", **saving).train()
    callback = CompressionCallback(**SQUEEZE)
    small_trainer(f"{folder}/plain", callback, **saving).train(resume_from_checkpoint=f"{folder}/plain/checkpoint-3")
    out["warned"], out["went on"] = messages, callback.stats()["bytes_sent"] > 0

    for name, options in (("missing", SQUEEZE), ("other", {**SQUEEZE, "bits": 3})):
        if rank == 0 and name == "missing":
            (Path(folder) / "squeeze/checkpoint-6/pipecomp_gradients_1.safetensors").unlink()
        torch.distributed.barrier()
        step = 6 if name == "missing" else 3
        with pytest.raises(ConfigError) as caught:
            small_trainer(f"{folder}/squeeze", CompressionCallback(**options), max_steps=9).train(
                resume_from_checkpoint=f"{folder}/squeeze/checkpoint-{step}"
            )
        out[name] = str(caught.value)

    small_trainer(f"{folder}/light", CompressionCallback(**SQUEEZE), save_only_model=True, **saving).train()
    out["light"] = sorted(path.name for path in Path(f"{folder}/light").rglob("pipecomp*"))
    return out


def example(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """examples/bert_cola.py on a few sentences, with and without compression."""
    spec = importlib.util.spec_from_file_location("bert_cola", ROOT / "examples" / "bert_cola.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    words = ["cats", "dogs", "sleep", "bark", "loudly", "often"]
    lines = [f"made\t{i % 2}\t\t{' '.join(words[(i * k) % 6] for k in range(1, 5))}." for i in range(40)]
    files = Path(folder) / f"{rank}-train.tsv", Path(folder) / f"{rank}-dev.tsv"
    for file, count in zip(files, (40, 11), strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
    arguments = ["--train-file", str(files[0]), "--eval-file", str(files[1]), "--out", f"{folder}/out"]
    arguments += ["--width", "64", "--layers", "1", "--batch", "5", "--epochs", "1"]
    arguments += ["--result", f"{folder}/{rank}.jsonl"]
    plain = script.main(arguments)
    squeezed = script.main([*arguments, "--compress", "double_squeeze", "--options", '{"bits": 4}', "--seed", "0", "1"])
    return {"plain": plain, "squeezed": squeezed}


def scaling(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """DDP alone under float16 autocast: the first loss scale is too large for float16, the second is not."""
    from pipecomp.allreduce import State, ddp_hook

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = State(**SQUEEZE)
    ddp.register_comm_hook(state, ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-20)
    draw = torch.Generator().manual_seed(rank)
    out: dict[str, Any] = {"weights": [digest(model)], "scales": [], "norms": []}
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = ddp(torch.randn(6, 8, generator=draw)).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        out["weights"].append(digest(model))
        out["scales"].append(scaler.get_scale())
        out["norms"].append(state.memory.norm())
    state.close()
    return out


Ran = tuple[Path, dict[int, dict[str, Any]]]


def both(rank: int, world: int, note: Any, folder: str) -> tuple[dict[str, Any], ...]:
    """All trainings in one start of the processes: to import transformers takes longer than to train."""
    works = (using, resuming, example, scaling)
    return tuple(work(rank, world, note, f"{folder}/{work.__name__}") for work in works)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    folder = tmp_path_factory.mktemp("trainers")
    return folder, run_ranks(2, both, str(folder), timeout_s=HANG_S)


@pytest.fixture(scope="module")
def used(ran: Any) -> Ran:
    folder, ranks = ran
    return folder / "using", {rank: out[0] for rank, out in ranks.items()}


@pytest.fixture(scope="module")
def resumed(ran: Any) -> Ran:
    folder, ranks = ran
    return folder / "resuming", {rank: out[1] for rank, out in ranks.items()}


@pytest.fixture(scope="module")
def examples(ran: Any) -> Ran:
    folder, ranks = ran
    return folder / "example", {rank: out[2] for rank, out in ranks.items()}


@pytest.fixture(scope="module")
def scaled(ran: Any) -> Ran:
    folder, ranks = ran
    return folder, {rank: out[3] for rank, out in ranks.items()}


# -- logs, weights, bytes


@pytest.mark.parametrize("which", ["weights", "weights again", "bf16 weights", "fp16 weights"])
def test_ranks_train_alike_on_compressed_gradients(used: Ran, which: str) -> None:
    _, ranks = used
    assert ranks[0][which] == ranks[1][which]
    assert ranks[0]["plain"] == ranks[1]["plain"]
    assert ranks[0][which] != ranks[0]["plain"]


def test_bytes_are_those_of_float32_gradients(used: Ran) -> None:
    _, ranks = used
    for out in ranks.values():
        whole = 4 * out["parameters"]  # two ranks: each sends half of its gradient, and half of the mean
        stats = out["stats"]
        assert stats["calls"] % 6 == 0
        assert out["before"] == 0
        assert stats["bytes_raw"] == pytest.approx(6 * whole, abs=stats["calls"])
        assert 0.24 * stats["bytes_raw"] < stats["bytes_sent"] < 0.3 * stats["bytes_raw"]  # 8 bits, and 9 for sums
        assert out["fp16"]["bytes_sent"] == pytest.approx(stats["bytes_raw"] / 2, abs=stats["calls"])


def test_each_train_counts_from_zero(used: Ran) -> None:
    _, ranks = used
    for out in ranks.values():
        assert out["again"]["bytes_raw"] == out["stats"]["bytes_raw"]


def test_micro_batches_are_averaged_once_and_in_float32_under_autocast(used: Ran) -> None:
    _, ranks = used
    for out in ranks.values():
        stats = out["bf16"]
        assert stats["bytes_raw"] == pytest.approx(5 * 4 * out["parameters"], abs=stats["calls"])
        assert 0 < stats["relative_error"] < 1


def test_first_rank_logs_what_was_sent(used: Ran) -> None:
    _, ranks = used
    history = ranks[0]["history"]
    training = [line for line in history if "loss" in line or "train_loss" in line]
    assert [line["step"] for line in training] == [2, 4, 6, 6]
    assert all(set(line) >= KEYS for line in training)
    sent = [line["grad_bytes_sent"] for line in training]
    assert sent[0] * 3 == sent[1] * 3 // 2 == sent[2] == sent[3] == ranks[0]["stats"]["bytes_sent"]
    assert training[-1]["grad_compression"] == training[-1]["grad_bytes_raw"] / training[-1]["grad_bytes_sent"]
    assert training[-1]["grad_error"] == ranks[0]["stats"]["relative_error"]
    evaluation = [line for line in history if "eval_loss" in line]
    assert len(evaluation) == 2
    assert not any(set(line) & KEYS for line in evaluation)
    assert not any(set(line) & KEYS for line in ranks[1]["history"])
    json.dumps(history)


def test_torchs_own_hooks_log_no_error(used: Ran) -> None:
    _, ranks = used
    line = ranks[0]["fp16 history"][-1]
    assert set(line) & KEYS == KEYS - {"grad_error"}
    assert line["grad_compression"] == pytest.approx(2, abs=1e-3)


def test_callbacks_that_were_added_earlier_get_it_too(used: Ran) -> None:
    folder, ranks = used
    assert all(set(logs) >= KEYS for logs in ranks[0]["seen"] if "loss" in logs)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tags: set[str] = set()
    for events in folder.rglob("events.out.tfevents.*"):
        found = accumulator.EventAccumulator(str(events.parent)).Reload()
        tags |= set(found.Tags()["scalars"]) | {t.removesuffix("/scalar_summary") for t in found.Tags()["tensors"]}
    assert {f"train/{key}" for key in KEYS} <= tags


def test_a_model_with_a_hook_is_refused(used: Ran) -> None:
    _, ranks = used
    assert all("hook" in out["two hooks"] for out in ranks.values())


def test_all_ranks_skip_a_step_that_overflows_in_float16(scaled: Ran) -> None:
    _, ranks = scaled
    for out in ranks.values():
        assert out["scales"] == [2.0**10] * 3
        assert out["weights"][0] == out["weights"][1]
        assert len(set(out["weights"])) == 3
        assert out["norms"][0] == 0
        assert 0 < out["norms"][2] < float("inf")
    assert ranks[0]["weights"] == ranks[1]["weights"]


# -- resuming


@pytest.mark.parametrize("method", ["squeeze", "casq", "random", "adaptive", "adaptive rank"])
def test_a_resumed_training_is_the_same_training(resumed: Ran, method: str) -> None:
    _, ranks = resumed
    for out in ranks.values():
        assert out[method]["same"]
        assert out[method]["at"] == 6
        whole, rest = out[method]["weights"]
        assert whole == rest
    assert (ranks[0][method]["tensors"] > 0) == (method != "random")
    assert ranks[0][method]["weights"] == ranks[1][method]["weights"]


def test_powersgds_memories_come_back(resumed: Ran) -> None:
    _, ranks = resumed
    for out in ranks.values():
        assert out["powersgd"]["same"]
        errors, matrices = out["powersgd"]["first"]["ddp"]
        assert errors
        assert matrices
    assert ranks[0]["powersgd"]["weights"] == ranks[1]["powersgd"]["weights"]
    assert ranks[0]["powersgd"]["first"] != ranks[1]["powersgd"]["first"]


def test_one_file_per_rank_in_each_checkpoint(resumed: Ran) -> None:
    folder, _ = resumed
    files = sorted(p.name for p in (folder / "squeeze" / "checkpoint-3").glob("pipecomp_*"))
    assert files == ["pipecomp_gradients_0.safetensors", "pipecomp_gradients_1.safetensors"]


def test_memories_find_their_parameters_in_other_buckets(resumed: Ran) -> None:
    _, ranks = resumed
    assert all(out["rebuilt"] for out in ranks.values())


def test_a_checkpoint_without_compression_starts_empty_with_a_warning(resumed: Ran) -> None:
    _, ranks = resumed
    for out in ranks.values():
        assert out["went on"]
        assert any("checkpoint-3" in message and "residuals start empty" in message for message in out["warned"])


def test_a_checkpoint_of_other_ranks_or_options_is_refused(resumed: Ran) -> None:
    _, ranks = resumed
    for out in ranks.values():
        assert "pipecomp_gradients_1.safetensors" in out["missing"]
        assert "options" in out["other"]


def test_nothing_is_kept_where_only_the_model_is_saved(resumed: Ran) -> None:
    _, ranks = resumed
    assert ranks[0]["light"] == []


# -- the example


def test_the_example_trains_with_and_without_compression(examples: Ran) -> None:
    folder, ranks = examples
    (plain,), squeezed = ranks[0]["plain"], ranks[0]["squeezed"]
    assert [run["seed"] for run in squeezed] == [0, 1]
    for run in (plain, *squeezed):
        assert run["steps"] == 4
        assert run["processes"] == 2
        assert run["bytes_raw"] == pytest.approx(4 * 4 * run["parameters"], abs=20)
        assert 0 <= run["accuracy"] <= 1
    assert plain["bytes_sent"] == plain["bytes_raw"]
    assert 7 < squeezed[0]["bytes_raw"] / squeezed[0]["bytes_sent"] < 8
    assert squeezed[0]["train_loss"] == pytest.approx(plain["train_loss"], rel=0.05)
    assert squeezed[0]["train_loss"] != plain["train_loss"]
    assert ranks[1]["squeezed"][1]["eval_loss"] == squeezed[1]["eval_loss"]
    lines = [json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()]
    assert lines == [plain, *squeezed]
    assert not (folder / "1.jsonl").exists()
