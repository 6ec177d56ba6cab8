"""Options of `pipecomp plan` and `pipecomp train`, each declared once.

A field's annotation holds the option's help text and, where they differ from its name, its flags;
`pipecomp.cli.common.takes_options` makes a command line from them. The module imports no torch, so that
`pipecomp --help` is fast.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pipecomp.errors import ConfigError, require
from pipecomp.rank_layout import LAYOUTS

DTYPES = ("fp32", "bf16", "fp16")
AUTO = "auto"
GRADIENT_METHODS = ("none", "fp16", "global_qsgd", "double_squeeze")
ADAPTER_RATE, FULL_RATE = 2e-4, 5e-5  # default learning rates of `pipecomp train`

_Gradients = Annotated[
    str | None,
    "Gradients of tied weights and between replicas: none, fp16, global_qsgd or double_squeeze; by default the fastest "
    "between replicas, and double_squeeze with 8 bits for tied weights that take much of a step.",
]
_FourBits = Annotated[bool, "With LoRA: the model's linear layers in 4 bits (NF4, bitsandbytes).", "--load-in-4bit"]
_EightBits = Annotated[bool, "With LoRA: the model's linear layers in 8 bits (bitsandbytes).", "--load-in-8bit"]
_Tie = Annotated[
    bool,
    "Keep weights that several stages hold (such as GPT-2's embedding) equal, or train each stage's copy separately.",
    "--tie/--no-tie",
]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `pipecomp plan`; `model` may also be a Hugging Face model or config.

    Raises:
        ConfigError: An option is out of range, or has no effect together with the others.
    """

    model: Annotated[Any, "A folder with config.json, or a hub name. Weights are not read."]
    nodes: Annotated[int | None, "Stages × replicas; by default the number of stages, or 2."] = None
    stages: Annotated[int | None, "Pipeline stages; by default the fastest number."] = None
    batch: Annotated[int, "Samples per step, over all replicas."] = 32
    micro_batch: Annotated[int | None, "Samples per micro-batch; by default the fastest number."] = None
    tokens: Annotated[
        int | None, "Tokens per sample; by default the model's maximum, at most 1024.", "--tokens", "--max-length"
    ] = None
    bandwidth: Annotated[
        str | None, "Rate of the links: 100mbit or, link by link, 1gbit/100mbit; with commas, the first is planned for."
    ] = None
    delay: Annotated[str | None, "One-way latency of the links, such as 20ms."] = None
    speed: Annotated[str | None, "TFLOP/s per node in training: 30 or, node by node, 30/10."] = None
    profile: Annotated[Path | None, "File from --measure --json, instead of --speed."] = None
    layout: Annotated[
        str, "What crosses lines between machines: stages-across (activations), replicas-across (gradients), or auto."
    ] = AUTO
    per_machine: Annotated[int | None, "Nodes on each machine, which share its line; by default one."] = None
    inner_bandwidth: Annotated[str | None, "With --per-machine: rate within a machine; by default unlimited."] = None
    memory: Annotated[float | None, "GB per node for the model; by default unlimited."] = None
    dtype: Annotated[str, "Training precision: fp32, bf16 or fp16."] = "fp32"
    tie: _Tie = True
    gradients: _Gradients = None
    recompute: Annotated[bool, "With --speed: use activation checkpointing.", "--recompute"] = False
    measure: Annotated[bool, "Time blocks, kernels, disk and, under a launcher, links.", "--measure"] = False
    store: Annotated[Path, "With --measure: the message store's folder."] = Path("messages")
    threads: Annotated[
        int | None,
        "With --measure: threads of a node; by default its share of this machine's cores, as if all ran here.",
    ] = None
    samples: Annotated[int | None, "Samples in the training data, for the duration of the training."] = None
    epochs: Annotated[int | None, "With --samples: passes over them; by default 1."] = None
    max_steps: Annotated[int | None, "With --samples: most steps of the training."] = None
    dropout: Annotated[float | None, "Dropout in training; by default the model's own."] = None
    one_pass: Annotated[bool, "Plan for training that sees every sample once.", "--one-pass"] = False
    lora: Annotated[int | None, "Plan for LoRA adapters of this rank in all linear layers, with frozen weights."] = None
    load_in_4bit: _FourBits = False
    load_in_8bit: _EightBits = False

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        require(self.gradients in (None, *GRADIENT_METHODS), "gradients", self.gradients, ", ".join(GRADIENT_METHODS))
        require(self.layout in (*LAYOUTS, AUTO), "layout", self.layout, ", ".join((*LAYOUTS, AUTO)))
        if (self.per_machine or 1) == 1:
            self.require_unset("without --per-machine above 1", "inner_bandwidth")
        for key in (
            *("nodes", "stages", "batch", "micro_batch", "lora", "per_machine"),
            *("threads", "samples", "epochs", "max_steps"),
        ):
            number = getattr(self, key)
            require(number is None or number >= 1, key.replace("_", "-"), number, "a whole number from 1")
        require_dropout("dropout", self.dropout)
        _check_bits(self, trains_adapter=self.lora is not None)
        require(self.memory is None or self.memory > 0, "memory", self.memory, "a number of GB above 0")
        if self.measure:
            self.require_unset("together with --measure", "speed", "profile", "recompute")
        elif self.profile is not None:
            self.require_unset("together with --profile, which states it", "speed", "tokens", "recompute")
        elif self.speed is None:
            self.require_unset("without --speed", "recompute", "dropout", "one_pass", "samples")
        if not self.measure:
            self.require_unset("without --measure", "threads")
        if self.samples is None:
            self.require_unset("without --samples", "epochs", "max_steps")

    def require_unset(self, reason: str, *names: str) -> None:
        """Raise ConfigError if one of the named options is given; `reason` completes "no value ..."."""
        for name in names:
            value = getattr(self, name)
            require(value is None or value is False, name.replace("_", "-"), value, f"no value {reason}")

    @property
    def bits(self) -> int | None:
        """Bits of the model's linear layers, None for plain weights."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @property
    def sizes_only(self) -> bool:
        """True if no option gives the machines' speed, so that only sizes can be planned."""
        return self.speed is None and self.profile is None and not self.measure


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `pipecomp train`. Its ranks receive them as JSON.

    Raises:
        ConfigError: An option is out of range.
    """

    model: Annotated[str, "A causal language model: a folder or a hub name."]
    data: Annotated[
        list[Path], "JSON lines, JSON, CSV, Parquet, text, a folder of these, or a data set's name; may be repeated."
    ]
    stages: Annotated[int | None, "Pipeline stages; by default one per peer, or 2."] = None
    peers: Annotated[str | None, "Machines in the order of the stages, as ssh names them: host1,host2."] = None
    spare: Annotated[str | None, "Machines that take the places of lost ones: host3,host4."] = None
    elastic: Annotated[
        bool | None,
        "Go on without a lost rank or machine; by default with several --peers.",
        "--elastic/--no-elastic",
    ] = None
    rebalance: Annotated[
        bool, "Cut the model anew for a machine that became slow, if steps get at least 10 % faster.", "--rebalance"
    ] = False
    evaluate: Annotated[Path | None, "Held-out text, evaluated after each epoch.", "--eval"] = None
    column: Annotated[list[str] | None, "OLD=NEW renames a column of --data, NAME has the text; may be repeated."] = (
        None
    )
    field: Annotated[str | None, "Column with the text, as --column NAME."] = None
    documents: Annotated[
        str, "Text: files, one document each; lines, a document per line; joined, blocks across all documents."
    ] = "files"
    loss: Annotated[
        str | None, "Tokens that are learned: assistant (default for messages), completion (for prompts), all."
    ] = None
    chat_template: Annotated[str | None, "Jinja file or template; by default the tokenizer's."] = None
    eval_split: Annotated[float | None, "Share of the data to hold out, such as 0.05, instead of --eval."] = None
    packing: Annotated[
        bool | None,
        "Put chats, prompts and documents one after another into rows, or pad them; by default if the model can.",
        "--packing/--no-packing",
    ] = None
    tokenizer: Annotated[str | None, "A folder or hub name; by default the model's."] = None
    epochs: Annotated[int, "Passes over the text. With one, no sample is seen twice."] = 3
    max_steps: Annotated[int | None, "Stop after this many optimizer steps."] = None
    lr: Annotated[
        float | None, "AdamW's learning rate, after warm-up; it decays to 0. By default 2e-4 for adapters, else 5e-5."
    ] = None
    batch: Annotated[int | None, "Samples per step; by default 32, fewer if the run would have under 50 steps."] = None
    tokens: Annotated[
        int | None, "Most tokens of a sample; by default the model's maximum, at most 1024.", "--tokens", "--max-length"
    ] = None
    dtype: Annotated[str, "Training precision: fp32 or bf16."] = "fp32"
    layout: Annotated[
        str,
        "With replicas and several processes a machine, what crosses the line between machines: stages-across "
        "(activations), replicas-across (gradients), or auto, the faster by the plan.",
    ] = AUTO
    plan: Annotated[
        Path | None, "plan.json of an earlier run, used instead of measuring: the same cuts, bits and batches."
    ] = None
    gradients: _Gradients = None
    tie: _Tie = True
    dropout: Annotated[float | None, "Dropout of embeddings, attention and blocks; by default the model's own."] = None
    seed: Annotated[int, "Seed of the sample order, dropout and rounding."] = 0
    out: Annotated[Path | None, "Folder for model, plan, metrics and report; by default runs/train-DATE-TIME."] = None
    save_every: Annotated[int | None, "With --out: a checkpoint every N steps, from which the command resumes."] = None
    store: Annotated[Path | None, "Folder on a local disk for cached activations; by default in --out."] = None
    second_home: Annotated[
        str | None,
        "Where each machine's training state is copied: next (default with several machines), off, a rank or a host.",
    ] = None
    overwrite: Annotated[bool, "Start over in an --out with the results of an earlier run.", "--overwrite"] = False
    report_to: Annotated[list[str] | None, "Curves for tensorboard, trackio, mlflow or wandb; may be repeated."] = None
    lora: Annotated[int | None, "Train LoRA adapters of this rank; the model's weights stay as they are."] = None
    lora_alpha: Annotated[float | None, "Adapters are scaled by this / rank; by default twice the rank."] = None
    lora_dropout: Annotated[float | None, "Dropout before the adapters; by default 0."] = None
    lora_targets: Annotated[str | None, "Layers with adapters: all-linear (default), or ends of names, a,b."] = None
    dora: Annotated[bool, "With --lora: also train a magnitude for each output (DoRA).", "--dora"] = False
    rslora: Annotated[bool, "With --lora: scale by alpha / √rank (rank-stabilized LoRA).", "--rslora"] = False
    adapter: Annotated[Path | None, "Continue a saved adapter, instead of --lora."] = None
    load_in_4bit: _FourBits = False
    load_in_8bit: _EightBits = False
    merge: Annotated[bool, "Also write the model with the adapter merged into its weights.", "--merge"] = False

    def __post_init__(self) -> None:
        from pipecomp.config import MOST_SEED

        least = {"stages": 1, "epochs": 1, "max_steps": 1, "batch": 1, "save_every": 1, "tokens": 2, "lora": 1}
        for key, low in least.items():
            value = getattr(self, key)
            flag = f"--{key.replace('_', '-')}"
            require(value is None or value >= low, flag, value, f"a whole number from {low}")
        require(0 <= self.seed <= MOST_SEED, "--seed", self.seed, f"a whole number from 0 to {MOST_SEED}")
        require(0 < self.rate < math.inf, "--lr", self.lr, "a number above 0")
        self._check_adapter()
        require(self.dtype in ("fp32", "bf16"), "--dtype", self.dtype, "fp32 or bf16")
        require(self.layout in (*LAYOUTS, AUTO), "--layout", self.layout, ", ".join((*LAYOUTS, AUTO)))
        require(self.gradients in (None, *GRADIENT_METHODS), "--gradients", self.gradients, ", ".join(GRADIENT_METHODS))
        require_dropout("--dropout", self.dropout)
        kinds = ("files", "lines", "joined")
        require(self.documents in kinds, "--documents", self.documents, ", ".join(kinds))
        losses = ("assistant", "completion", "all")
        require(self.loss in (None, *losses), "--loss", self.loss, ", ".join(losses))
        share = self.eval_split
        require(share is None or 0 < share < 1, "--eval-split", share, "a share between 0 and 1, such as 0.05")
        require(share is None or self.evaluate is None, "--eval-split", share, "only without --eval")
        allowed = "a folder: with --save-every a run resumes there"
        require(self.save_every is None or self.out is not None, "--out", None, allowed)
        require(not self.overwrite or self.out is not None, "--overwrite", True, "only with --out")

    def _check_adapter(self) -> None:
        names = ("lora_alpha", "lora_dropout", "lora_targets", "dora", "rslora")
        for name in names if self.lora is None else ():
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            allowed = "only without --adapter, which has its own" if self.adapter else "only with --lora RANK"
            require(value in (None, False), flag, value, allowed)
        require(self.lora is None or self.adapter is None, "--adapter", self.adapter, "only without --lora")
        require(not self.merge or self.trains_adapter, "--merge", True, "only with --lora or --adapter")
        require(self.lora_alpha is None or self.lora_alpha > 0, "--lora-alpha", self.lora_alpha, "a number above 0")
        require_dropout("--lora-dropout", self.lora_dropout)
        _check_bits(self, trains_adapter=self.trains_adapter)
        hint = "The adapters have --lora-dropout."
        require(
            not self.trains_adapter or self.dropout is None, "--dropout", self.dropout, "only without adapters", hint
        )

    @property
    def bits(self) -> int | None:
        """Bits of the model's linear layers, None for plain weights."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @property
    def trains_adapter(self) -> bool:
        """True if the run trains LoRA adapters, not the model's weights."""
        return self.lora is not None or self.adapter is not None

    @property
    def resumable(self) -> bool:
        """True if the run keeps checkpoints."""
        return self.save_every is not None or bool(self.elastic)

    @property
    def rate(self) -> float:
        """The learning rate after warm-up."""
        if self.lr is not None:
            return self.lr
        return ADAPTER_RATE if self.trains_adapter else FULL_RATE

    @classmethod
    def names(cls) -> dict[str, str]:
        """Return the options' names in a file of options, such as "lora-alpha", and their fields."""
        hints = get_type_hints(cls, include_extras=True)
        found = {}
        for field in fields(cls):
            _, _, *flags = get_args(hints[field.name])
            found[flags[0].split("/")[0].lstrip("-") if flags else field.name.replace("_", "-")] = field.name
        return found

    @classmethod
    def read_file(cls, path: Path) -> dict[str, Any]:
        """Read a YAML file of options. Returns values by field. Raises ConfigError for a name that is no option."""
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("--config", str(path), f"a file of options ({error.strerror})") from error
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError("--config", str(path), f"YAML: {' '.join(str(error).split())}") from error
        require(isinstance(values, dict), "--config", str(path), "lines such as 'lora: 16'")
        names = cls.names()
        for name in values:
            key = str(name).replace("_", "-")
            require(key in names, f"--config: {path}", name, ", ".join(names))
        given = {names[str(name).replace("_", "-")]: value for name, value in values.items() if value is not None}
        for name in ("data", "column", "report_to"):
            if name in given and not isinstance(given[name], list):
                given[name] = [given[name]]
        return given

    def to_yaml(self, **chosen: Any) -> str:
        """Encode the options for `read_file`, but the folder and the machines. chosen: values that a run has set."""
        import yaml

        lines: dict[str, Any] = {}
        for name, field in self.names().items():
            value = chosen.get(field, getattr(self, field))
            if value is not None and field not in ("out", "peers", "spare", "overwrite"):
                lines[name] = [str(item) for item in value] if isinstance(value, list) else value
                lines[name] = str(value) if isinstance(value, Path) else lines[name]
        return str(yaml.safe_dump(lines, sort_keys=False, allow_unicode=True))

    def to_json(self) -> str:
        """Encode the options that differ from their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return json.dumps({name: value for name, value in values.items() if value != defaults[name]}, default=str)

    @classmethod
    def from_json(cls, text: str) -> TrainOptions:
        """Decode the result of `to_json`."""
        values, hints = json.loads(text), get_type_hints(cls)
        for name, value in values.items():
            if Path in get_args(hints[name]):
                values[name] = [Path(item) for item in value] if isinstance(value, list) else Path(value)
        return cls(**values)


def _check_bits(options: PlanOptions | TrainOptions, *, trains_adapter: bool) -> None:
    """Raise ConfigError for both numbers of bits, or quantized weights without adapters."""
    both = options.load_in_4bit and options.load_in_8bit
    require(not both, "--load-in-8bit", True, "only without --load-in-4bit")
    hint = "Quantized weights are not trained."
    require(options.bits is None or trains_adapter, f"--load-in-{options.bits}bit", True, "only with LoRA", hint)


def require_dropout(key: str, dropout: float | None) -> None:
    """Raise ConfigError unless a dropout is None or in [0, 1)."""
    require(dropout is None or 0 <= dropout < 1, key, dropout, "0, or a share below 1")
