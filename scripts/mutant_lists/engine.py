"""Defects in pipecomp/engine/: the pipeline engine."""

from __future__ import annotations

from scripts.mutant_lists.mutant import Mutant

TRUST_2 = ("tests/trust/test_trust.py::test_pipelines_train_as_the_unsplit_model[2]",)

MUTANTS = (
    # -- gradients, losses and rates
    Mutant(
        "tied gradients as a mean over stages",
        "pipecomp/engine/gradient_exchange.py",
        "g.mul_(stages)",
        "pass",
        ("tests/engine/test_gradient_exchange.py",),
        "with two stages a tied embedding learns at half its rate",
    ),
    Mutant(
        "tied gradients are not summed",
        "pipecomp/engine/reduction.py",
        "dist.all_reduce(grad, group=self._tied_groups[name])",
        "pass",
        TRUST_2,
        "copies of a tied weight drift apart",
    ),
    Mutant(
        "micro-batches are averaged twice",
        "pipecomp/engine/stage_work.py",
        'engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id])',
        'engine.loss = engine.module.loss_fn(outputs, engine.pipe_buffers["labels"][buffer_id]) / engine.micro_batches',
        TRUST_2,
        "gradients become smaller with more micro-batches",
    ),
    Mutant(
        "the first micro-batch's loss as the step's",
        "pipecomp/engine/stage_work.py",
        "loss.clone() if engine.total_loss is None else engine.total_loss + loss",
        "loss.clone() if engine.total_loss is None else engine.total_loss",
        TRUST_2,
        "the reported loss is not the mean over micro-batches and replicas",
    ),
    Mutant(
        "the norm counts tied weights twice",
        "pipecomp/engine/reduction.py",
        'if not getattr(p, "ds_pipe_replicated", False)]',
        "]",
        TRUST_2,
        "clipped gradients are too small",
    ),
    Mutant(
        "the norm of each stage by itself",
        "pipecomp/engine/reduction.py",
        "        dist.all_reduce(square, group=self._engine.grid.get_pipe_parallel_group())\n",
        "",
        TRUST_2,
        "stages clip by different factors, so that the gradient's direction changes",
    ),
    Mutant(
        "the learning rate's schedule is dropped",
        "pipecomp/engine/initialize.py",
        "        lr_scheduler=lr_scheduler,\n",
        "        lr_scheduler=None,\n",
        TRUST_2,
        "the rate stays constant although a schedule was given",
    ),
    Mutant(
        "activation checkpointing is ignored",
        "pipecomp/engine/initialize.py",
        "if agreed.recomputes:",
        "if False:",
        ("tests/dist/test_recomputing.py::test_the_same_training_bit_for_bit",),
        "memory runs out where the setting should have saved it",
    ),
    # -- resuming
    Mutant(
        "bits at the start: a checkpoint's are not taken",
        "pipecomp/engine/checkpointing.py",
        "if saved is None or saved[0] !=",
        "if saved is not None or saved[0] !=",
        ("tests/dist/test_auto_bits.py::test_a_run_that_goes_on_takes_the_bits_of_its_checkpoint",),
        "a run that goes on trains with other bits, and ends with another loss",
    ),
    Mutant(
        "links do not compare their stores after a resume",
        "pipecomp/engine/checkpointing.py",
        "dropped = engine.links.agree()",
        "dropped = 0",
        ("tests/dist/test_resume_agreement.py",),
        "the first step after a resume ends with an error, or trains on wrong numbers",
    ),
    Mutant(
        "another pipeline goes on from the first replica's weights",
        "pipecomp/engine/local_steps.py",
        "return total / len(values)",
        "return values[0]",
        ("tests/engine/test_local_steps.py",),
        "what the other replicas have learned since they last met is lost",
    ),
    # -- running ahead
    Mutant(
        "a stage's memory limits that stage alone",
        "pipecomp/engine/run_ahead.py",
        "self.in_flight.limit = -int(limit)",
        "pass",
        ("tests/engine/test_run_ahead.py",),
        "stages run ahead by numbers that do not fit, and wait for each other",
    ),
)
