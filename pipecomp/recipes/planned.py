"""Rank program of `pipecomp train`: measure, plan, write the configuration, and train on a text.

A recipe for causal language models that makes its own DeepSpeed configuration: batch sizes, cuts and compression, from
measurements of ranks and links. Its only argument is a `TrainOptions` as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipecomp.distributed import preemption

if __name__ == "__main__":
    preemption.end_quietly()  # during the imports below, which take many seconds

import psutil
import torch
import torch.distributed as dist
from rich.console import Console

from pipecomp.buffers.admin import forget_other_cuts
from pipecomp.data import DataOptions, Segment
from pipecomp.data.formats import parse_columns
from pipecomp.data.loading import FILES, read_texts
from pipecomp.distributed import peer_agent, rendezvous
from pipecomp.distributed.collectives import broadcast, gathered, while_others_wait
from pipecomp.distributed.launch_env import machine_names, restarts
from pipecomp.distributed.placement import machine, usable_cores
from pipecomp.distributed.rendezvous import check_processes
from pipecomp.elastic import RECORDS
from pipecomp.errors import ConfigError, DataError, require, writable
from pipecomp.netlab.software import throttle_to
from pipecomp.plan.command import run_plan
from pipecomp.plan.new_cut import CutPlanner, describe_machines, fit_links
from pipecomp.plan.options import AUTO, PlanOptions, TrainOptions
from pipecomp.plan.report import precision_sections
from pipecomp.rank_layout import STAGES_ACROSS, RankLayout
from pipecomp.recipes import language, lora, run, text
from pipecomp.recipes.chat import JOINED, ChatData
from pipecomp.recipes.machine_watch import MachineWatch, read_candidates, visiting_machines
from pipecomp.recipes.plan_file import (
    RECUT,
    check_plan,
    find_plan,
    plan_batch,
    read_given_plan,
    suits,
    with_layout,
    write_here,
)
from pipecomp.recipes.restart import go_on_without_lost
from pipecomp.recipes.resume import OVERWRITE, check_no_results
from pipecomp.recipes.run_folder import begin_run, lock_machines
from pipecomp.recipes.steps import warmup_decay
from pipecomp.report.recorder import CHECKPOINTS, PLAN, SAMPLE
from pipecomp.stages.partition.merging import merge_adapter
from pipecomp.trainer.checkpoints import STATE_FILE, list_checkpoints
from pipecomp.utils.activity import local_activity
from pipecomp.utils.files import atomic_write_text
from pipecomp.utils.units import format_count

_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CONFIG_FILE = "ds_config.json"
OPTIONS_FILE = "run.yaml"  # of --config
DEFAULT_BATCH = 32  # samples per step; fewer for a short text
FEWEST_STEPS = 50  # of a run whose batch is chosen here
MODEL = "model"  # folder of the trained model
MERGED = "merged"  # folder of the merged model, beside that of the adapter


def main(options: TrainOptions, *, dry_run: bool = False) -> None:
    """Run one rank. dry_run: Plan, predict the duration, and write nothing."""
    if restarts():
        options = replace(options, stages=None, layout=AUTO)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not rendezvous.computes_on_cpu():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    parse_columns(data_options(options).columns)
    rendezvous.start_processes(options.seed)
    for used in (Path(sys.prefix), Path(peer_agent.__file__).parents[2]):  # of a machine that was set up
        peer_agent.note_use(used)
    with rendezvous.all_ranks().collective_errors():
        if options.model != "tiny":
            config = text.model_config(options.model)  # before the tokenizer, which is in the same folder by default
            hint = "Merge the adapter into the model that was quantized, with peft"
            plain = not options.merge or getattr(config, "quantization_config", None) is None
            require(plain, "--merge", True, f"only with plain weights, and {options.model} is quantized", hint)

    def configure(args: argparse.Namespace, model: Any, size: int, samples: int) -> tuple[dict[str, Any], list[int]]:
        if dry_run:
            predict_run(options, args, model, size, samples)
            sys.exit(0)
        made = plan_run(options, args, model, size, samples, watch)
        with rendezvous.all_ranks().collective_errors(), writable("--out", args.out):
            if first_sample:
                atomic_write_text(Path(args.out) / SAMPLE, json.dumps(first_sample) + "\n")
        return made

    watch: list[MachineWatch] = []  # on rank 0 of a run that goes on without lost machines
    first_sample: list[Segment] = []  # on rank 0

    def load(args: argparse.Namespace, tokenizer: Any, size: int, vocabulary: int) -> language.Samples:
        loaded = ChatData.load(
            options.data,
            data_options(options),
            tokenizer,
            size,
            vocabulary,
            evaluate=options.evaluate,
            packing=options.packing,
            joined=options.documents == JOINED,
        )
        if dist.get_rank() == 0:
            first_sample.extend(loaded.first_sample())
            loaded.print()
        return loaded.samples()

    args = recipe_arguments(options)
    adapter: dict[str, Any] = {}
    if options.trains_adapter:
        lora.check_arguments(args)
        adapter = {"load": lora.causal_model, "meanings": lora.meanings}
    if options.merge:
        adapter["finish"] = write_merged
    try:
        language.fine_tune(
            args,
            lambda args: (tokenizer_texts(options), None),
            documents=False,
            samples=load,
            configure=configure,
            schedule=warmup_decay,
            on_step=lambda stats: watch[0].end_step(stats) if watch else None,
            **adapter,
        )
    except ConfigError as error:
        raise translate_error(error, str(options.out)) from error


def recipe_arguments(options: TrainOptions) -> argparse.Namespace:
    """Translate the options into a recipe's arguments; arguments without an option keep their defaults."""
    parser = run.arguments("train", "")
    text.add_arguments(parser)
    folder, resumable = str(options.out), options.resumable
    same = ("stages", "epochs", "max_steps", "dropout", "seed", "save_every")
    # Note: a recipe has no arguments of these names, but checkpoints compare them when a run resumes.
    compared = ("batch", "dtype", "gradients")
    given = argparse.Namespace(
        **{name: getattr(options, name) for name in (*same, *compared, "lora_dropout", "dora", "rslora")},
        lr=options.rate,
        packing=options.packing is not False,
        lora_rank=options.lora,
        lora_alpha=2 * options.lora if options.lora and options.lora_alpha is None else options.lora_alpha,
        lora_targets=(options.lora_targets or lora.ALL_LINEAR).split(",") if options.lora else None,
        adapter=None if options.adapter is None else str(options.adapter),
        bits=options.bits,
        compute_dtype="bfloat16" if options.dtype == "bf16" else "float32",
        no_tie=not options.tie,
        train_file=[str(file) for file in options.data],
        eval_file=None if options.evaluate is None else str(options.evaluate),
        block_size=options.tokens,
        out=folder,
        save=f"{folder}/{MODEL}",
        overwrite=options.overwrite,
        checkpoint=f"{folder}/{CHECKPOINTS}" if resumable else None,
        resume="auto" if resumable else None,
        report_to=options.report_to or [],
    )
    required = {"deepspeed_config": f"{folder}/{_CONFIG_FILE}", "model": options.model}
    required["tokenizer"] = options.tokenizer or options.model
    return parser.parse_args([f"--{name}={value}" for name, value in required.items()], given)


def data_options(options: TrainOptions) -> DataOptions:
    """Return the options of the data, with their names on the command line."""
    columns = [*(options.column or []), *([] if options.field is None else [options.field])]
    return DataOptions(
        columns=columns,
        documents=FILES if options.documents == JOINED else options.documents,
        loss=options.loss,
        chat_template=options.chat_template,
        eval_split=options.eval_split,
        seed=options.seed,
        keys={"max_length": "--tokens"},
    )


def tokenizer_texts(options: TrainOptions) -> list[str]:
    """Return the texts to train a tokenizer on, where --tokenizer asks for a new one."""
    if not (options.tokenizer or "").startswith("train:"):
        return []
    return list(read_texts(options.data, data_options(options)))


def translate_error(error: ConfigError, folder: str) -> ConfigError:
    """Replace a recipe's arguments in an error by the options of `pipecomp train`. folder: of --out."""

    def translate(text: str) -> str:
        return text.replace("--block-size", "--tokens").replace("--lora-rank", "--lora")

    got = folder if error.key in ("--resume", "--save") else error.got
    names = {"--block-size": "--tokens", "--resume": "--out", "--save": "--out", "--lora-rank": "--lora"}
    key = names.get(error.key, error.key)
    return ConfigError(key, got, translate(error.allowed), error.hint and translate(error.hint))


def plan_run(
    options: TrainOptions,
    args: argparse.Namespace,
    model: Any,
    size: int,
    samples: int,
    watch: list[MachineWatch] | None = None,
) -> tuple[dict[str, Any], list[int]]:
    """Plan the run, or read the plan of the run that resumes, and write its configuration to a file for people.

    Args:
        options: Options of `pipecomp train`.
        args: From `recipe_arguments`.
        model: The model's Hugging Face configuration, or the model with its adapter.
        size: Tokens per sample.
        samples: Samples of the training data.
        watch: Receives, on rank 0 of a run that goes on without lost machines, what looks after its machines.

    Returns:
        DeepSpeed's configuration, and the model's cuts.

    Raises:
        ConfigError: On every rank, if the batch is impossible, or the folder cannot be written, is in use by another
            run, or has checkpoints that this run does not resume.
    """
    folder, world = Path(args.out), dist.get_world_size()
    stages = options.stages or world
    first, first_here = dist.get_rank() == 0, os.environ.get("LOCAL_RANK", "0") == "0"
    ranks = rendezvous.all_ranks()
    store = Path(options.store or folder / "messages")
    with ranks.collective_errors():
        check_processes("--stages", stages)
        plan_options = planning_options(options, model, size, samples, stages, world // stages)
        batch = plan_options.batch
        if not options.elastic:
            check_unused(options, folder)
    lock_machines(folder)
    given = None
    with ranks.collective_errors():
        if first and options.plan is not None and options.overwrite:  # it may be in the folder
            given = read_given_plan(options.plan, stages, world, options.batch, samples)
    given = broadcast(given)
    begin_run(folder, store, overwrite=options.overwrite, plan=given)
    if options.elastic:
        go_on_without_lost(folder)
    with ranks.collective_errors():
        check_unused(options, folder)
        resumed = resumes(options, folder)
    resumed = broadcast(resumed)
    args.overwrite = options.overwrite and not resumed
    earlier = find_plan(folder) if resumed else None
    if resumed:
        with ranks.collective_errors():
            earlier = check_plan(earlier, folder, None if options.elastic else stages, world)
        if options.batch is None:  # the number of epochs may have changed
            batch = plan_batch(earlier, world // stages)
    names = machine_names(world) if options.elastic and stages == world else []
    with ranks.collective_errors():
        if first and options.plan is not None and given is None and not resumed:
            given = read_given_plan(options.plan, stages, world, options.batch, samples)
    given = broadcast(None if resumed else given)
    if given is not None:
        made, batch = given, plan_batch(given, world // stages)
    elif earlier is not None and len(earlier["cuts"]) - 1 == stages and suits(earlier, names):
        made = earlier
    else:
        memory = None if earlier is None else smallest_memory()
        with ranks.collective_errors():
            wanted = replace(plan_options, batch=batch, memory=memory, store=store)
            planned = run_plan(Console(), wanted, throttle_to, settings=False)
        made = broadcast(planned)
        if earlier is not None:  # the machines have changed: new cuts, but the settings of the run's start
            start = earlier.get("start", earlier["config"])
            alone = {**made["config"], **{key: start[key] for key in _BATCH_KEYS if key in start}}
            made |= {"config": fit_links(start, stages) if stages > 1 else alone, "start": start}
    made.pop(RECUT, None)
    machines = len(set(ranks.all_gather_object(machine())))
    home = choose_second_home(options, machines, world)
    if names:
        before = (earlier or {}).get("machines")
        made["machines"] = (
            {**before, "names": names} if made is earlier and before else describe_machines(made, names, before)
        )
        room = smallest_memory()
        if first and watch is not None and (home != "off" or world == 1):  # others could not get the state
            planner = CutPlanner(made, plan_options, 1e9 * room)
            watch.append(watch_machines(options, folder, planner, world // len(set(names))))
    made = with_layout(made, options.layout, world // stages)
    if resumed:
        layout = RankLayout(stages, world // stages, made["config"]["pipecomp"].get("layout", STAGES_ACROSS))
        with ranks.collective_errors():
            forget_other_links(store, made["cuts"], layout)
    with ranks.collective_errors(), writable("--out", folder):
        if first_here:  # any machine may be lost
            write_here(folder / PLAN, made, dist.get_rank())
    ds_config = deepspeed_config(options, made["config"], folder, home)
    if first:
        saved = None if options.adapter is None else model.adapter.config
        shown = replace(options, plan=None if given is None else options.plan)
        for line in describe_defaults(shown, batch, samples, saved):
            Console(highlight=False, soft_wrap=True).print(line)
    with ranks.collective_errors(), writable("--out", folder):
        if first:
            atomic_write_text(folder / _CONFIG_FILE, json.dumps(ds_config, indent=2) + "\n")
            used = options.to_yaml(stages=len(made["cuts"]) - 1, batch=batch, lr=options.rate)
            atomic_write_text(folder / OPTIONS_FILE, used)
    return ds_config, made["cuts"]


def forget_other_links(store: Path, cuts: Sequence[int], layout: RankLayout) -> None:
    """Remove this rank's cached activations of other cuts, and say so."""
    rank = dist.get_rank()
    _, replica = layout.place(rank)
    with local_activity(f"opens its message store {store}"):
        removed = forget_other_cuts(store, layout.state_number(rank), cuts, f"{replica} of {layout.replicas}")
    if removed and len(cuts) > 2:
        links = ", ".join(removed)
        print(f"rank {rank}: {links}: the cut is new, so cached activations are sent again", flush=True)


def watch_machines(options: TrainOptions, folder: Path, planner: CutPlanner, each: int) -> MachineWatch:
    """Return what looks, on rank 0, for machines that wait to take part and for slow ones. each: ranks per machine."""

    def write_plan(made: Mapping[str, Any]) -> None:
        write_here(folder / PLAN, {**made, RECUT: True}, 0)

    return MachineWatch(
        planner,
        lambda: [*read_candidates(folder), *visiting_machines(each)],
        each=each,
        rebalance=options.rebalance,
        write_plan=write_plan,
    )


def planning_options(
    options: TrainOptions, model: Any, size: int, samples: int, stages: int, replicas: int
) -> PlanOptions:
    """Return the options of a run's plan, with its batch. The arguments are those of `plan_run`."""
    fewest = min(options.max_steps or FEWEST_STEPS, FEWEST_STEPS)
    return PlanOptions(
        model=model,
        stages=stages,
        batch=choose_batch(options.batch, samples, replicas, options.epochs, fewest),
        tokens=size,
        dtype=options.dtype,
        tie=options.tie,
        layout=options.layout,
        gradients=options.gradients,
        measure=True,
        dropout=options.dropout,
        one_pass=options.epochs == 1,
        samples=samples,
        epochs=options.epochs,
        max_steps=options.max_steps,
    )


def predict_run(options: TrainOptions, args: argparse.Namespace, model: Any, size: int, samples: int) -> None:
    """Print the plan of a run, and how long it takes, on rank 0.

    Ranks of one machine measure together, as in the run. Other machines are not asked: with --peers one process
    measures this one, with a rank's share of its cores, and the plan is for several rates of the links.

    The arguments and errors are those of `plan_run`.
    """
    world, ranks, threads, per_machine = dist.get_world_size(), rendezvous.all_ranks(), None, None
    console = Console(quiet=dist.get_rank() != 0, highlight=False, soft_wrap=True)
    if options.peers is not None:
        hosts = len(options.peers.split(","))
        world = options.stages or hosts
        per_machine = world // hosts
        threads = max(1, usable_cores() // per_machine)
        console.print("The links between the machines are measured when the run starts; here they have given rates.")
    stages = options.stages or world
    with ranks.collective_errors():
        if options.peers is None:
            check_processes("--stages", stages)
        check_unused(options, Path(args.out))
        planned = planning_options(options, model, size, samples, stages, world // stages)
        nodes = None if threads is None else world
        store = Path(options.store or Path(args.out).parent)
        planned = replace(planned, store=store, nodes=nodes, threads=threads, per_machine=per_machine)
        run_plan(console, planned, throttle_to, settings=False)


def check_unused(options: TrainOptions, folder: Path) -> None:
    """Raise ConfigError if a new run would overwrite a finished one, or files that existing checkpoints need."""
    if options.overwrite or resumes(options, folder):
        return
    unused = options.resumable or not list_checkpoints(str(folder / CHECKPOINTS))
    hint = f"{folder} has checkpoints: the run resumes from the last good one. {OVERWRITE}"
    require(unused, "--save-every", None, "a number", hint)
    check_no_results(folder, folder / MODEL, "--out")


def choose_batch(
    batch: int | None, samples: int, replicas: int = 1, epochs: int | None = None, fewest: int = FEWEST_STEPS
) -> int:
    """Return `batch`, or if None the largest number of samples per step up to DEFAULT_BATCH that replicas can share.

    With `epochs` it is the largest that makes at least `fewest` steps, or the smallest.

    Raises:
        ConfigError: If the data have fewer samples than `batch`.
        DataError: If the data have fewer samples than there are replicas.
    """
    if batch is not None:
        require(batch <= samples, "--batch", batch, f"at most {samples}, the number of samples in the data")
        return batch
    if samples < replicas:
        raise DataError(f"the data have {format_count(samples, 'sample')}, too few for {replicas} replicas")
    sizes = [max(n // replicas, 1) * replicas for n in (DEFAULT_BATCH, 16, 8, 4, 2, 1) if n <= samples]
    return next((n for n in sizes if epochs is None or epochs * samples // n >= fewest), sizes[-1])


def describe_defaults(options: TrainOptions, batch: int, samples: int, saved: Any = None) -> list[str]:
    """Return lines about the values that this program has chosen. saved: configuration of the adapter to continue."""
    lines = []
    if options.plan is not None:
        lines.append(f"plan      {options.plan}; nothing is measured")
    if options.batch is None:
        usual = min(DEFAULT_BATCH, samples)
        why = "" if batch >= usual else f": {usual} would make {options.epochs * samples // usual} steps"
        lines.append(f"batch     {format_count(batch, 'sample')} per step{why} (--batch)")
    if options.lr is None:
        kind = "adapters" if options.trains_adapter else "all weights"
        lines.append(f"rate      {options.rate:g}, the default for {kind} (--lr); it warms up, then decays")
    if options.lora is not None:
        alpha = 2 * options.lora if options.lora_alpha is None else options.lora_alpha
        targets = options.lora_targets or lora.ALL_LINEAR
        lines.append(f"adapters  LoRA of rank {options.lora}, alpha {alpha:g}, layers: {targets}")
    if saved is not None:
        base = saved.base_model_name_or_path
        same = base is None or Path(base).name == Path(options.model).absolute().name
        other = "" if same else f". It was trained on {base}: check that this is the same model"
        lines.append(f"adapters  {options.adapter} continued, LoRA of rank {saved.r}{other}")
    if options.bits is not None:
        lines.append(f"model     linear layers in {options.bits} bits, quantized while they are read")
    return lines


def write_merged(model: Any, folder: str) -> None:
    """Write the base model with the trained adapter of `folder` merged into its weights, beside it, on rank 0.

    model: the source that was trained. Every rank must call this.
    """
    out = Path(folder).with_name(MERGED)
    first = dist.get_rank() == 0
    with rendezvous.all_ranks().collective_errors():
        while_others_wait(lambda: merge_adapter(str(model.weights), folder, out) if first else None)
    if first:
        Console(highlight=False, soft_wrap=True).print(f"merged model saved in {out}")


def choose_second_home(options: TrainOptions, machines: int, ranks: int) -> str:
    """Return the setting for the second home of each rank's state.

    A restart that goes on from records needs them, and the machine that --second-home names may be the lost one.
    """
    if ranks == 1:
        return "off"
    chosen = options.second_home or ("next" if machines > 1 or options.elastic else "off")
    return "next" if restarts() and chosen != "off" else chosen


def deepspeed_config(options: TrainOptions, planned: dict[str, Any], folder: Path, home: str = "off") -> dict[str, Any]:
    """Make DeepSpeed's configuration.

    planned: the plan's settings for batches, links and gradients. home: from `choose_second_home`.
    """
    section = dict(planned["pipecomp"])
    if home != "off":
        section["elastic"] = {"second_home": int(home) if home.isdecimal() else home, "path": str(folder / RECORDS)}
    if section.get("activations", {}).get("method") == "aqsgd":
        section["store"] = {"path": str(options.store or folder / "messages"), **section.get("store", {})}
    # Note: an earlier plan may have other values; the comparison with the checkpoint then raises an error.
    if options.gradients is not None:
        section["gradients"] = {"method": options.gradients}
    if not options.tie:
        section["tie"] = False
    return {
        **{key: planned[key] for key in _BATCH_KEYS if key in planned},
        "optimizer": {"type": "AdamW", "params": {"lr": options.rate, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        **precision_sections(options.dtype),
        "pipecomp": section,
    }


def resumes(options: TrainOptions, folder: Path) -> bool:
    """Return whether a finished checkpoint in the folder makes this run resume."""
    found = list_checkpoints(str(folder / CHECKPOINTS))
    return options.resumable and any((path / STATE_FILE).is_file() for _, path in found)


def smallest_memory() -> float:
    """Return the memory in GB that the rank with the least can use; every rank must call this."""
    if rendezvous.computes_on_cpu():
        own = psutil.virtual_memory().available / (rendezvous.ranks_here() or 1)
    else:
        own = float(torch.cuda.mem_get_info()[0])
    return float(min(gathered(own))) / 1e9


if __name__ == "__main__":
    rank_parser = argparse.ArgumentParser(prog="train", description="One rank of `pipecomp train`.")
    rank_parser.add_argument("options", type=TrainOptions.from_json)
    rank_parser.add_argument("--dry-run", action="store_true", help="plan, predict the duration, and write nothing")
    run.run(lambda args: main(args.options, dry_run=args.dry_run), rank_parser)
