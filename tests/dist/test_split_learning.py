"""A model of plain modules over processes: crops and flips, clients in turn, against the same run in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.inprocess import InProcessPipeline
from pipecomp.data import TrainLoader, eval_batches
from pipecomp.distributed.local_launcher import run_ranks
from pipecomp.errors import ConfigError, SplitError
from pipecomp.recipes.images import ClientTurns, Images, Views
from pipecomp.recipes.resnet import client_cuts, resnet
from pipecomp.stages import modules
from tests.limits import HANG_S

pytestmark = pytest.mark.ranks

STEPS, MARGIN = 7, 2
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {"activations": {"method": "none"}},
    "aqsgd": {
        "activations": {"method": "aqsgd", "forward_bits": 2, "backward_bits": 8, "backward_top_k": 0.2},
        "store": {"backend": "memory"},
    },
}


def task() -> tuple[Any, Views, ClientTurns, Images]:
    draw = torch.Generator().manual_seed(3)
    images = Images(torch.randint(0, 256, (12, 8, 8, 3), generator=draw).byte(), torch.arange(12) % 3)
    torch.manual_seed(1)
    net = resnet("tiny", 3, norm="group")
    views = Views(images, MARGIN)
    parts = [torch.arange(7), torch.arange(7, 12)]
    return net, views, ClientTurns(views, parts, batch=4, micro_batch=2, epochs=2, seed=5), images


def configuration(name: str) -> dict[str, Any]:
    return {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "pipecomp": SECTIONS[name],
    }


def rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 ** (step // 4))


def over_processes(rank: int, world: int, note: Any) -> dict[str, Any]:
    import pipecomp

    found: dict[str, Any] = {}
    for name in SECTIONS:
        net, views, turns, images = task()
        source = modules(net, images.shape, margin=MARGIN)
        with pytest.raises(ConfigError, match="loss_fn"):
            pipecomp.initialize(source, config=configuration(name), cuts=client_cuts(net))
        engine = pipecomp.initialize(
            source,
            config=configuration(name),
            cuts=client_cuts(net),
            lr_scheduler=rate,
            loss_fn=torch.nn.functional.cross_entropy,
        )
        engine.set_loader(TrainLoader(views, turns))
        losses = [float(engine.train_batch()) for _ in range(STEPS)]
        losses.append(float(engine.eval_batch(iter(eval_batches(images, 4)), num_micro_batches=3)))
        links = {k: (v["forward"], v["backward"]) for k, v in engine.comm_stats()["links"].items()}
        found[name] = (losses, links)
        with pytest.raises(SplitError, match="no Hugging Face folder"):
            engine.save_pretrained("nowhere")
        engine.close()
    return found


def test_losses_and_bytes_are_those_of_one_process_bit_for_bit() -> None:
    expected = run_ranks(3, over_processes, timeout_s=HANG_S)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in SECTIONS:
            net, views, turns, images = task()
            pipeline = InProcessPipeline(
                modules(net, images.shape, margin=MARGIN),
                3,
                configuration(name),
                views,
                sampler=turns,
                cuts=client_cuts(net),
                lr_scheduler=rate,
                loss_fn=torch.nn.functional.cross_entropy,
            )
            losses = [float(pipeline.train_batch()) for _ in range(STEPS)]
            losses.append(float(pipeline.eval_batch(eval_batches(images, 4))))
            assert pipeline.same_messages()
            assert all(losses == expected[rank][name][0] for rank in range(3)), name
            for key, link in pipeline.comm_stats().items():
                assert (link["forward"], link["backward"]) == expected[1][name][1][key]
            if name == "aqsgd":
                sender = pipeline.links[0].sender
                assert sender.stats.delta_samples > 0
                ids = {h.sample for h in sender.store.inventory()}
                assert any(i % 2 for i in ids), "flipped images have messages of their own"
                assert any(not i % 2 for i in ids)
    finally:
        torch.set_num_threads(threads)
    assert expected[0]["none"][0] != expected[0]["aqsgd"][0]


def test_stages_do_not_change_what_is_computed() -> None:
    """Against the whole model, trained plainly on what the views show."""
    net, views, turns, images = task()
    pipeline = InProcessPipeline(
        modules(net, images.shape, margin=MARGIN),
        3,
        configuration("none"),
        views,
        sampler=turns,
        cuts=client_cuts(net),
        loss_fn=torch.nn.functional.cross_entropy,
    )
    losses = [float(pipeline.train_batch()) for _ in range(STEPS)]
    plain, views, turns, _ = task()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    for step, found in enumerate(losses):
        total = 0.0
        for part in range(2):
            shown = [views[i] for i in turns.batch(2 * step + part)]
            x, y = (torch.stack([s[key] for s in shown]) for key in ("pixel_values", "labels"))
            loss = torch.nn.functional.cross_entropy(plain(x), y) / 2
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(found, rel=1e-4)
