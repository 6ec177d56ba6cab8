"""The common part of `PipelineSFTTrainer` and `PipelineDPOTrainer`: TRL's configuration, model, data and metrics.

TRL's own code makes the samples, so that tokens, masks and order are those of its trainers. One process of each machine
prepares a dataset; the files are in pipecomp's cache of tokenized data.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from datasets.fingerprint import Hasher
from torch import Tensor, nn
from transformers import AutoProcessor, BitsAndBytesConfig, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging as transformers_logging
from trl import __version__ as trl_version

from pipecomp.data import IGNORED, ShardedSampler
from pipecomp.data.loading import cache_folder, once_per_machine, tokenizer_digest
from pipecomp.distributed.collectives import gathered
from pipecomp.distributed.rendezvous import all_ranks
from pipecomp.errors import ConfigError, DataError, PipecompError, require
from pipecomp.stages.partition.loading import Source, pretrained
from pipecomp.trainer.data_loading import SampleSource, TrainerSampler, make_sampler, packs
from pipecomp.trainer.trainer import PipelineTrainer

_log = transformers_logging.get_logger(__name__)
TRAINING = "train_dataset"
_CHUNK = 1024  # tokens whose logits are in float32 at a time
# Arguments of from_pretrained that say how the whole model is loaded; here each process reads its own stage.
_LOADING = ("device_map", "low_cpu_mem_usage", "use_safetensors")
_BITS = ("load_in_", "bnb_4bit_", "llm_int8_")  # of the names of BitsAndBytesConfig's options
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TRLTrainer(PipelineTrainer):
    """The base of trainers with TRL's configurations. It takes samples in the order of transformers.Trainer."""

    def _make_sampler(self, samples: SampleSource, replica: int) -> ShardedSampler:
        return self._trl_sampler(samples, replica, TrainerSampler)

    def _trl_sampler(self, samples: SampleSource, replica: int, kind: type[ShardedSampler]) -> ShardedSampler:
        data, processing = self.train_dataset, self.processing_class
        return make_sampler(samples, self.args, data, processing, replicas=self.replicas, replica=replica, kind=kind)

    def _run_evaluation(self, data: Any, name: str, *args: Any, **more: Any) -> EvalLoopOutput:
        with all_ranks().collective_errors():
            data = self._prepared(data, name, self.args)
        return super()._run_evaluation(data, name, *args, **more)

    def _prepared(self, data: Any, name: str, args: Any) -> Any:
        """Return a dataset as it is evaluated or trained on; each is prepared once."""
        known = self.__dict__.setdefault("_datasets", {})  # with the dataset, whose id is not used again
        key = id(data), name == TRAINING
        if key not in known:
            made = self._prepare(data, name, args)
            known |= {key: (data, made), (id(made), True): (made, made), (id(made), False): (made, made)}
        return known[key][1]

    def _prepare(self, data: Any, name: str, args: Any) -> Any:
        """Prepare a dataset with TRL's code."""
        raise NotImplementedError

    def _training_metrics(self, tokens: int, real_tokens: int) -> dict[str, float]:
        counted = tokens if packs(self.data_collator) else real_tokens  # TRL counts the padding of a single row
        return {**self._take_metrics(training=True), "num_tokens": counted}

    def _derived_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {f"eval_{name}": value for name, value in self._take_metrics(training=False).items()}

    def _take_metrics(self, *, training: bool) -> dict[str, float]:
        """Return the means of the last stages' metrics since the last call; every rank must call this."""
        with self.engine.propagate_failure():
            rows = gathered(self._metrics.take(training=training), self.group)
        rows = [row for row in rows if row]
        return {name: sum(row[name] for row in rows) / len(rows) for name in (rows[0] if rows else ())}

    @property
    def _metrics(self) -> Metrics:
        raise NotImplementedError


class Metrics:
    """Values of micro-batches, whose means TRL logs; on the last stage only."""

    def __init__(self) -> None:
        self._values: dict[bool, dict[str, list[Tensor]]] = {True: defaultdict(list), False: defaultdict(list)}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Note values of a micro-batch, of a training step where gradients are computed, else of an evaluation."""
        for name, value in values.items():
            self._values[torch.is_grad_enabled()][name].append(torch.as_tensor(value).detach())

    def take(self, *, training: bool) -> dict[str, float]:
        """Return the means, and forget the values."""
        values, self._values[training] = self._values[training], defaultdict(list)
        return {name: float(torch.stack(of_name).double().mean()) for name, of_name in values.items()}


def next_labels(labels_BS: Tensor, logits: Tensor) -> Tensor:
    """Return the label that each place predicts, [B, S], on the device of the logits; none at the last place."""
    return F.pad(labels_BS, (0, 1), value=IGNORED)[:, 1:].to(logits.device)


def token_statistics(logits_BSV: Tensor, labels_BS: Tensor, *names: str) -> dict[str, Tensor]:
    """Return statistics of the predictions of labels, [B, S - 1] each, 0 where there is none; without gradients.

    names: some of "entropy", "is_top1", "mean_logits" and "log_sum_sq_probs", as TRL's fused head has them.
    """
    next_BS = next_labels(labels_BS, logits_BSV)
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    with torch.no_grad():
        flat = logits_BSV.reshape(-1, logits_BSV.shape[-1])
        for logits, label in zip(flat.split(_CHUNK), next_BS.reshape(-1).split(_CHUNK), strict=True):
            x = logits.float()
            log_p = x.log_softmax(-1)
            for name, values in rows.items():
                if name == "entropy":
                    value = -(log_p.exp() * log_p).sum(-1)
                elif name == "is_top1":
                    value = x.argmax(-1) == label
                elif name == "mean_logits":
                    value = x.mean(-1)
                else:
                    value = (2 * log_p).logsumexp(-1)
                values.append(value.masked_fill(label == IGNORED, 0))
    return {name: torch.cat(values).view(next_BS.shape)[:, :-1] for name, values in rows.items()}


def token_log_probs(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the log-probability of each label but the first of a row, [B, S - 1]; 0 where there is none."""
    next_BS = next_labels(labels_BS, logits_BSV)
    flat = logits_BSV.float().reshape(-1, logits_BSV.shape[-1])
    losses = F.cross_entropy(flat, next_BS.reshape(-1), ignore_index=IGNORED, reduction="none")
    return -losses.view(next_BS.shape)[:, :-1]


# -- configuration, model and tokenizer


def warn(text: str) -> None:
    """Log a warning, on rank 0."""
    if dist.get_rank() == 0:
        _log.warning(text)


def check_fields(args: Any, fields: Mapping[str, tuple[Sequence[Any], str]]) -> None:
    """Raise ConfigError for a field that has no effect here. fields: the values without effect, and what is allowed."""
    for name, (values, allowed) in fields.items():
        value = getattr(args, name)
        require(any(value is v or value == v for v in values), name, value, allowed)


# Fields of both configurations that a pipeline does not support.
COMMON_FIELDS: dict[str, tuple[Sequence[Any], str]] = {
    "activation_offloading": ((False,), "False: gradient_checkpointing saves the memory of activations"),
    "router_aux_loss_coef": ((None, 0), "0: a pipeline computes no loss of routers"),
    "truncation_mode": (("keep_start", "keep_end"), "'keep_start' or 'keep_end'"),
}


def trl_arguments(kind: type, args: Any, model: Any, suffix: str) -> Any:
    """Return the given arguments as TRL's trainer takes them: a configuration of `kind`, by default a new one."""
    if args is None:
        name = model if isinstance(model, (str, os.PathLike)) else model_name(model)
        return kind(f"{os.path.basename(str(name))}-{suffix}")
    if type(args) is TrainingArguments:
        return kind(**{**args.to_dict(), "hub_token": args.hub_token})
    require(isinstance(args, kind), "args", type(args).__name__, f"a {kind.__name__}, or TrainingArguments")
    return args


def model_name(model: Any) -> str:
    """Return the folder or hub name that a model in memory, or a source of one, was loaded from."""
    found = model.weights if isinstance(model, Source) else getattr(model.config, "_name_or_path", None)
    return str(found or "")


def load_model(model: Any, args: Any, quantization_config: Any) -> Any:
    """Return the model: of a name its source, with the options of `args.model_init_kwargs`. Raises ConfigError."""
    if not isinstance(model, (str, os.PathLike)):
        given, loaded = args.model_init_kwargs, "None with a model that is loaded already"
        require(given is None, "model_init_kwargs", given, loaded)
        require(quantization_config is None, "quantization_config", quantization_config, loaded)
        allowed = "a Hugging Face model, or a folder or hub name"
        require(isinstance(model, (nn.Module, Source)), "model", type(model).__name__, allowed)
        return model
    options = {name: value for name, value in (args.model_init_kwargs or {}).items() if name not in _LOADING}
    bits = {name: options.pop(name) for name in list(options) if name.startswith(_BITS)}
    ways = [quantization_config, options.pop("quantization_config", None), BitsAndBytesConfig(**bits) if bits else None]
    quantization, *others = [value for value in ways if value is not None] or [None]
    require(not others, "quantization_config", quantization, "one, as an argument or in model_init_kwargs")
    dtype = options.pop("torch_dtype", options.pop("dtype", "float32"))
    dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    half = next((dtype for name, dtype in _DTYPES.items() if getattr(args, name)), None)
    allowed = "torch.float32, or the precision of training, bf16=True or fp16=True"
    require(dtype in (torch.float32, half, "auto", None), "model_init_kwargs['dtype']", dtype, allowed)
    # Training in 16 bits rounds the weights anyway. The weights that bitsandbytes quantizes are read as TRL's are.
    read = half if half is not None and quantization is None else torch.float32
    options.setdefault("trust_remote_code", args.trust_remote_code)
    return pretrained(str(model), quantization_config=quantization, **options, dtype=read)


def check_router(args: Any, config: Any) -> None:
    """Raise ConfigError for a mixture of experts whose routers' loss TRL would add."""
    text = config.get_text_config()
    added = hasattr(text, "output_router_logits") and getattr(text, "router_aux_loss_coef", None)
    require(
        not added or args.router_aux_loss_coef == 0,
        "router_aux_loss_coef",
        args.router_aux_loss_coef,
        "0 for a mixture of experts: a pipeline computes no loss of routers",
    )


def load_processing_class(processing_class: Any, model: Any, args: Any) -> Any:
    """Return the tokenizer or processor; by default that of the model. Raises ConfigError."""
    if processing_class is None:
        name = model_name(model)
        require(name, "processing_class", None, "a tokenizer: the model's configuration does not name its folder")
        try:
            processing_class = AutoProcessor.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError("processing_class", None, f"a tokenizer: {name} has none ({error})") from error
    kinds = (PreTrainedTokenizerBase, ProcessorMixin)
    allowed = "a tokenizer or processor of transformers"
    require(isinstance(processing_class, kinds), "processing_class", type(processing_class).__name__, allowed)
    return processing_class


def tokenizer_of(processing_class: Any) -> Any:
    """Return the tokenizer of a processor, or the given tokenizer."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def choose_pad_token(args: Any, tokenizer: Any) -> int:
    """Set the tokenizer's padding token as TRL does, and return its id. Raises ConfigError."""
    pad_token = args.pad_token or tokenizer.pad_token or tokenizer.eos_token
    require(pad_token in tokenizer.get_vocab(), "pad_token", pad_token, "a token of the tokenizer's vocabulary")
    tokenizer.pad_token = pad_token
    return int(tokenizer.pad_token_id)


# -- data


def first_sample(data: Any, name: str) -> Mapping[str, Any]:
    """Return the first sample of a dataset that can be prepared. Raises ConfigError and DataError."""
    allowed = "a datasets.Dataset"
    hint = "datasets.Dataset.from_list makes one of dicts. Streams cannot be trained on: every rank reads every epoch"
    require(isinstance(data, datasets.Dataset), name, type(data).__name__, allowed, hint)
    if len(data) == 0:
        raise DataError(f"{name}: the dataset has no samples")
    sample: Mapping[str, Any] = data[0]
    images = sorted({"image", "images"} & set(sample))
    require(not images, name, f"the column {images}", "text: a pipeline trains the text part of a model")
    return sample


class DatasetPreparation:
    """Prepares datasets once a machine by a function of TRL.

    Args:
        module: name of TRL's module whose function orders processes by itself.
        args: TRL's configuration.
        processing_class: The tokenizer or processor.
        columns: names of the columns to keep.
        fields: names of the fields of `args` that the result depends on.
        more: Other values that it depends on.
    """

    def __init__(
        self, module: str, args: Any, processing_class: Any, columns: Sequence[str], fields: Sequence[str], *more: Any
    ) -> None:
        self._module, self._args, self._processing = module, args, processing_class
        self._columns, self._fields, self._more = (*columns, args.length_column_name), fields, more

    def __call__(self, data: Any, name: str, prepare: Callable[[Any], Any], *more: Any) -> Any:
        """Return a dataset as `prepare` makes it.

        Args:
            data: A datasets.Dataset.
            name: Its name, for errors.
            prepare: Takes and returns a dataset.
            more: Values that the result depends on.

        Raises:
            DataError: TRL refuses the data.
        """
        path = cache_folder() / f"trl-{self._key(data, *more)}"
        part = path.with_name(f"{path.name}.{os.getpid()}.part")

        def write() -> None:
            try:
                with self._alone():
                    made = prepare(data)
            except PipecompError:
                raise
            except Exception as error:  # those of TRL, of chat templates, and of Arrow
                raise DataError(f"{name}: TRL cannot prepare it: {type(error).__name__}: {error}") from error
            if not len(made):
                raise DataError(f"{name}: no sample is left that has a token to learn; raise max_length")
            try:
                made.select_columns([c for c in made.column_names if c in self._columns]).save_to_disk(part)
                part.replace(path)
            finally:
                shutil.rmtree(part, ignore_errors=True)

        once_per_machine(path, path.is_dir, write)
        return datasets.load_from_disk(path)

    def _key(self, data: Any, *more: Any) -> str:
        values = {name: getattr(self._args, name) for name in self._fields}
        parts = [trl_version, datasets.__version__, data._fingerprint, tokenizer_digest(tokenizer_of(self._processing))]
        parts += [str(getattr(self._processing, "chat_template", None)), Hasher.hash((values, self._more, more))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """In the body, let TRL prepare data in this process alone: it would wait for those that wait for this one."""
        with mock.patch.object(sys.modules[self._module], "global_then_local_main_first", contextlib.nullcontext):
            yield


def each_dataset(data: Any, name: str, prepare: Callable[[Any, str, Any], Any], args: Any) -> Any:
    """Apply `prepare(dataset, name, args)` to one dataset, or to each in a dict of several; None stays."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return {key: prepare(one, f"{name}[{key!r}]", args) for key, one in data.items()}
    return prepare(data, name, args)
