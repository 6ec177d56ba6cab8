"""Ranks whose scripts come to different arguments, data or weights: an error on all of them, or the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tests.dist.trainer_work as work
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import PipecompError
from tests.limits import HANG_S
from tests.models import gpt2, samples

pytestmark = pytest.mark.ranks


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    found = {"unlike": unlike(rank, folder), "unseeded": unseeded(rank, f"{folder}/unseeded")}
    return {
        **found,
        "without messages": without_messages(f"{folder}/without"),
        "model_init": model_init(f"{folder}/init"),
    }


def unlike(rank: int, folder: str) -> dict[str, str]:
    """The error of each case, on this rank."""
    import pipecomp.trainer.setup as setup
    from pipecomp import PipelineTrainer

    def trainer(data: Any = None, **changed: Any) -> Any:
        return PipelineTrainer(gpt2(2, 16), work.arguments(folder, **changed), work.padded, data or work.unequal())

    def pretending() -> None:
        real = setup.versions
        setup.versions = lambda: {**real(), "torch version": f"9.{rank}"}  # type: ignore[assignment]
        try:
            trainer()
        finally:
            setup.versions = real

    def one_refuses() -> None:
        trainer(**({"neftune_noise_alpha": 5.0} if rank == 1 else {}))

    cases: dict[str, Any] = {
        "rate": lambda: trainer(learning_rate=1e-3 * (1 + rank)),
        "epochs": lambda: trainer(num_train_epochs=1 + rank),
        "version": pretending,
        "refused": one_refuses,
        "order": lambda: trainer(work.unequal(seed=1 + rank)).train(),
        "length": lambda: trainer().evaluate(work.unequal(4 + rank)),
        "no dataset": lambda: trainer().predict(work.unequal() if rank == 0 else iter([])),
        "resume": lambda: trainer().train(resume_from_checkpoint=rank == 1),
    }
    out = {}
    for name, call in cases.items():
        try:
            call()
        except PipecompError as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def unseeded(rank: int, folder: str) -> dict[str, Any]:
    """Each process draws weights of its own, as a script does that seeds nothing before it makes its model."""
    import pipecomp
    from pipecomp import PipelineTrainer

    def tied(engine: Any) -> list[float]:
        (weight,) = engine.stage.tied_parameters().values()
        return [float(x) for x in weight.detach().flatten()[:40]]

    trainer = PipelineTrainer(gpt2(2, 16, seed=rank), work.arguments(folder), work.padded, work.unequal())
    before = tied(trainer.engine)
    trainer.train()
    trainer.save_model(f"{folder}/model")
    out = {"before": before, "after": tied(trainer.engine), "loss": trainer.evaluate(samples(4))["eval_loss"]}
    trainer.end()

    model = gpt2(2, 16, seed=rank)  # frozen, with ties that no gradient keeps equal
    model.transformer.wte.weight.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = pipecomp.initialize(model, 2, config, samples(4))
    out["frozen"] = tied(engine)
    engine.close()
    return out


def without_messages(folder: str) -> dict[str, Any]:
    """Resumed from a checkpoint that has no messages, while the store still has those of the end.

    The checkpoint of an earlier training was in its folder, and had messages.
    """
    from pipecomp import PipelineTrainer

    def trainer(where: str, *, saved: bool = False) -> Any:
        args = work.arguments(f"{folder}/{where}", save_strategy="steps", save_steps=4, num_train_epochs=3)
        return PipelineTrainer(gpt2(2, 16), args, work.padded, work.unequal(), pipecomp=work.AQSGD, save_messages=saved)

    def resumed(where: str) -> tuple[list[float], int]:
        again = trainer(where)
        again.train(f"{folder}/first/checkpoint-4")
        links = again.engine.comm_stats()["links"].values()
        full = sum(link["full_samples"] for link in links)
        again.end()
        return work.losses(again), full

    for saved in (True, False):
        first = trainer("first", saved=saved)
        first.train()
        first.end()
    return {"same folder": resumed("first"), "new folder": resumed("new")}


def model_init(folder: str) -> list[list[float]]:
    """Every training begins anew; optimizer and loss are the user's."""
    from pipecomp import PipelineTrainer

    trainer = PipelineTrainer(
        None,
        work.arguments(folder),
        work.padded,
        work.unequal(),
        model_init=lambda: gpt2(2, 16, seed=5),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        compute_loss_func=work.summed,
    )
    out = []
    for _ in range(2):
        trainer.train()
        out.append(work.losses(trainer))
    trainer.end()
    return out


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alike")
    return folder, run_ranks(2, everything, str(folder), timeout_s=HANG_S)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("rate", "learning_rate is 0.002 on rank 1, 0.001 on rank 0"),
        ("epochs", "num_train_epochs is 2 on rank 1, 1 on rank 0"),
        ("version", 'torch version is "9.1" on rank 1, "9.0" on rank 0'),
        ("refused", "neftune_noise_alpha"),
        ("order", "order or content of train_dataset"),
        ("length", "length of eval_dataset is 5 on rank 1, 4 on rank 0"),
        ("no dataset", "test_dataset"),
        ("resume", "resumes is true on rank 1, false on rank 0"),
    ],
)
def test_what_differs_is_an_error_on_all_ranks_that_names_it(ran: Any, case: str, told: str) -> None:
    for rank in (0, 1):
        assert told in ran[1][rank]["unlike"][case]


def test_copies_of_a_tied_weight_begin_equal_whatever_each_process_drew(ran: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder, ranks = ran
    first, last = ranks[0]["unseeded"], ranks[1]["unseeded"]
    expected = gpt2(2, 16, seed=0).transformer.wte.weight.flatten()[:40].tolist()
    for key in ("before", "frozen"):
        assert first[key] == last[key] == expected, "the first holder's"
    assert first["after"] == last["after"] != first["before"]
    model = AutoModelForCausalLM.from_pretrained(folder / "unseeded" / "model").eval()
    batch = {key: torch.stack([s[key] for s in samples(4)]) for key in ("input_ids", "labels")}
    assert first["loss"] == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_messages_that_are_newer_than_the_checkpoint_are_not_taken(ran: Any) -> None:
    for rank in (0, 1):
        found = ran[1][rank]["without messages"]
        assert found["same folder"] == found["new folder"]
        assert found["same folder"][1] > 0


def test_model_init_optimizer_class_and_own_loss(ran: Any, tmp_path: Path) -> None:
    from transformers import Trainer

    torch.set_num_threads(1)

    def made() -> Any:
        model = gpt2(2, 16, seed=5)
        model.loss_type = "ForCausalLM"
        return model

    trainer = Trainer(
        None,
        work.arguments(str(tmp_path)),
        work.padded,
        work.unequal(),
        model_init=made,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}),
        compute_loss_func=work.summed,
    )
    trainer.train()
    for rank in (0, 1):
        one, two = ran[1][rank]["model_init"]
        assert one == two
        assert one == pytest.approx(work.losses(trainer), rel=1e-4)
        assert one[0] > one[-1]
