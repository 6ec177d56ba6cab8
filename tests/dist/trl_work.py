"""Training by TRL's trainers in one process and by pipecomp's over a pipeline: the same cases for both."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.models import made_up_text, tokenizer_for

SEED, RATE, LENGTH = 3, 2e-3, 64
ONE_TOKEN = 1e-2  # at most, of an accuracy: two tokens may be equally likely
SFT_STEPS, DPO_STEPS, SAMPLES = 20, 10, 48
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Case(NamedTuple):
    """A training. data: "text", "prompt", "messages" or their preference forms. adapter: "new", "old" or None."""

    data: str
    settings: Mapping[str, Any] = {}
    adapter: str | None = "new"
    bits: bool = False
    preferences: bool = False


LONG = {"max_length": 256}
ASSISTANT = {"assistant_only_loss": True, **LONG}
PACKED = {"packing": True}
CASES = {
    "LoRA": Case("text"),
    "QLoRA": Case("text", bits=True),
    "packing": Case("text", PACKED),
    "assistant": Case("messages", ASSISTANT),
    "all together": Case("messages", {**ASSISTANT, **PACKED}, bits=True),
    "DPO": Case("prompt", {"eval_strategy": "steps", "eval_steps": 5}, preferences=True),
    "DPO, QLoRA": Case("messages", LONG, bits=True, preferences=True),
}
MORE_CASES = {
    "all weights": Case("prompt", adapter=None),
    "dft": Case("prompt", {"loss_type": "dft"}),
    "smoothing": Case("prompt", {"label_smoothing_factor": 0.1}),
    "completion_only_loss=False": Case("prompt", {"completion_only_loss": False}),
    "padding_free": Case("tokens", {"padding_free": True, "max_length": None, "pad_to_multiple_of": 8}),
    "wrapped": Case("text", {**PACKED, "packing_strategy": "wrapped"}),
    "bfd_split": Case("text", {**PACKED, "packing_strategy": "bfd_split", "max_length": 24}),
    "checkpointing": Case("text", {"gradient_checkpointing": True}),
    "an old adapter": Case("text", adapter="old"),
    "DPO, all weights": Case("prompt", {"precompute_ref_log_probs": True}, adapter=None, preferences=True),
    "DPO, an old adapter": Case("prompt", adapter="old", preferences=True),
    "DPO, several losses": Case(
        "prompt",
        {"loss_type": ["sigmoid", "ipo", "sft", "bco_pair"], "loss_weights": [1.0, 0.5, 0.2, 0.3], "ld_alpha": 0.5},
        preferences=True,
    ),
    "DPO, weighting": Case("prompt", {"use_weighting": True}, preferences=True),
    "DPO, divergence": Case("prompt", {"f_divergence_type": "js_divergence", "loss_type": "hinge"}, preferences=True),
    "DPO, aot": Case("prompt", {"loss_type": "aot"}, preferences=True),
}


def tokenizer() -> Any:
    made = tokenizer_for([made_up_text(50, 1)])
    made.chat_template = TEMPLATE
    return made


def write_model(folder: Path) -> None:
    """A Llama whose logits depend on its adapter, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **sizes, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)  # else a fresh model's logits are near 0
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def data_of(kind: str, count: int = SAMPLES, *, preferences: bool = False) -> Any:
    """Made-up samples of different lengths."""
    from datasets import Dataset

    rows = []
    for i in range(count):
        draw = random.Random(i)
        question, answer, other = (made_up_text(draw.randint(1, 4), 1000 * k + i).strip() for k in range(3))
        turns = [("user", question), ("assistant", answer), ("user", other), ("assistant", question)]
        messages = [{"role": role, "content": text} for role, text in turns]
        if preferences and kind == "messages":
            rejected = [{"role": "assistant", "content": other}]
            rows.append({"prompt": messages[:1], "chosen": messages[1:2], "rejected": rejected})
        elif preferences:
            rows.append({"prompt": question, "chosen": f" {answer}", "rejected": f" {other}"})
        elif kind == "messages":
            rows.append({"messages": messages})
        elif kind == "text":
            rows.append({"text": f"{question} {answer}"})
        else:
            rows.append({"prompt": question, "completion": f" {answer}"})
    data = Dataset.from_list(rows)
    if kind == "tokens":
        made = tokenizer()
        return Dataset.from_list([{"input_ids": made(row["prompt"] + row["completion"])["input_ids"]} for row in rows])
    return data


def lora() -> Any:
    import peft

    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")


def four_bits() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def adapted(folder: Path, quantization: Any = None, *, disturbed: bool = False) -> Any:
    """The model in memory with the adapter that peft starts with, or one that changes something."""
    import peft
    from transformers import AutoModelForCausalLM, set_seed

    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    set_seed(SEED)
    model = peft.get_peft_model(base, lora())
    for name, parameter in model.named_parameters():
        if disturbed and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def arguments(kind: type, out: Path, settings: Mapping[str, Any]) -> Any:
    """Small and quiet, in float32; the samples' order is the default, random."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": RATE,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": SEED,
        "max_length": LENGTH,
        "gradient_checkpointing": False,
    }
    return kind(output_dir=str(out), **usual | dict(settings))


def trainer_of(kind: type, case: Case, folder: Path, out: Path, *, rows: list[int] | None = None, **own: Any) -> Any:
    """A trainer of a kind. rows: to train on, in their order. own: arguments of pipecomp's."""
    import trl

    settings = {"max_steps": DPO_STEPS if case.preferences else SFT_STEPS, **case.settings}
    args = arguments(trl.DPOConfig if case.preferences else trl.SFTConfig, out, settings)
    model: Any = adapted(folder, disturbed=True) if case.adapter == "old" else str(folder)
    data = data_of(case.data, preferences=case.preferences)
    trainer = kind(
        model,
        args=args,
        train_dataset=data if rows is None else data.select(rows),
        eval_dataset=data_of(case.data, 9, preferences=case.preferences),
        processing_class=tokenizer() if case.adapter == "old" else None,
        peft_config=lora() if case.adapter == "new" else None,
        quantization_config=four_bits() if case.bits else None,
        **own,
    )
    if case.bits and not own:
        # TRL rounds the adapter of a quantized model to bfloat16, whatever the arguments say: undo that.
        start = dict(adapted(folder, four_bits()).named_parameters())
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.data = start[name].data
    return trainer


def result(trainer: Any, model: Any) -> dict[str, Any]:
    """The logs, and the trained weights by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {
        name.removeprefix("base_model.model.").replace(".ref.", ".default."): p.detach().float().numpy().copy()
        for name, p in trained.items()
        if ".ref." not in name
    }
    return {"logs": trainer.state.log_history, "weights": weights}


def train_alone(name: str, folder: Path) -> dict[str, Any]:
    """A case by TRL in this process."""
    import trl

    case = {**CASES, **MORE_CASES}[name]
    kind = trl.DPOTrainer if case.preferences else trl.SFTTrainer
    trainer = trainer_of(kind, case, folder / "model", folder / f"{name} alone")
    trainer.train()
    return result(trainer, trainer.model)


def train_here(name: str, folder: Path, stages: int) -> dict[str, Any]:
    """A case on this rank of a pipeline."""
    import pipecomp

    case = {**CASES, **MORE_CASES}[name]
    kind = pipecomp.PipelineDPOTrainer if case.preferences else pipecomp.PipelineSFTTrainer
    trainer = trainer_of(kind, case, folder / "model", folder / f"{name} {stages}", num_stages=stages)
    trainer.train()
    found = result(trainer, trainer.engine.stage)
    trainer.end()
    return found


def use_cache(folder: Path) -> None:
    """Keep prepared data there; `datasets` has read the environment already."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder / "cache"


def train_cases(rank: int, world: int, note: Any, folder: str, names: list[str]) -> dict[str, Any]:
    use_cache(Path(folder))
    return {name: train_here(name, Path(folder), world) for name in names}


def train_cached(folder: Path) -> dict[str, Any]:
    """DPO with AQ-SGD over two epochs: hit rates of the steps, and the samples that this rank's stores have."""
    import pipecomp

    case = Case("prompt", {"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True}, preferences=True)
    section = {"activations": {"method": "aqsgd", "forward_bits": 4}, "store": {"backend": "memory"}}
    trainer = trainer_of(
        pipecomp.PipelineDPOTrainer, case, folder / "model", folder / "cached", num_stages=2, pipecomp=section
    )
    trainer.train()
    out = {
        "rates": [line["store_hit_rate"] for line in trainer.state.log_history if "store_hit_rate" in line],
        "held": [sorted(held.sample for held in end.store.inventory()) for end in trainer.engine.links],
        "pairs": len(trainer.train_dataset),
    }
    trainer.end()
    return out


def train_resumed(rank: int, world: int, note: Any, folder: str) -> dict[str, list[list[float]]]:
    """Losses of a run, and of one that goes on from its checkpoint in the middle of the second epoch."""
    import pipecomp

    use_cache(Path(folder))
    out = {}
    for name, kind in (("SFT", pipecomp.PipelineSFTTrainer), ("DPO", pipecomp.PipelineDPOTrainer)):
        settings = {"save_strategy": "steps", "save_steps": 14, "max_steps": 16}
        case = Case("prompt", settings, preferences=name == "DPO")
        found = []
        for checkpoint in (None, f"{folder}/resumed {name}/checkpoint-14"):
            trainer = trainer_of(kind, case, Path(folder) / "model", Path(folder) / f"resumed {name}", num_stages=world)
            trainer.train(resume_from_checkpoint=checkpoint)
            found.append(losses({"logs": trainer.state.log_history}))
            trainer.end()
        out[name] = found
    return out


def everything(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """The cases, and DPO with cached activations."""
    return {**train_cases(rank, world, note, folder, list(CASES)), "cached": train_cached(Path(folder))}


# -- `pipecomp train`

COMMAND_CASES = {  # of samples that are not cut, of which none is left out
    "LoRA": Case("prompt", LONG),
    "QLoRA": Case("prompt", LONG, bits=True),
    "packing": Case("prompt", {**LONG, **PACKED}),
    "assistant": Case("messages", ASSISTANT),
    "all together": Case("messages", {**ASSISTANT, **PACKED}, bits=True),
}
STEP = 4  # samples


def write_inputs(folder: Path) -> None:
    """The data as JSON lines, and the adapter that peft starts with."""
    for kind in ("prompt", "messages"):
        data_of(kind).to_json(folder / f"{kind}.jsonl")
    adapted(folder / "model").save_pretrained(folder / "start")


def train_by_command(rank: int, world: int, note: Any, folder: str) -> dict[str, Any]:
    """The cases by `pipecomp train`, with a plan without compression."""
    from pipecomp.plan.options import TrainOptions
    from pipecomp.recipes import planned

    use_cache(Path(folder))
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": STEP // 2, "pipecomp": {}}

    def plan_run(options: TrainOptions, *_: Any) -> tuple[dict[str, Any], list[int]]:
        assert options.out is not None
        return planned.deepspeed_config(options, dict(batch), options.out), [0, 2, 4]

    planned.plan_run = plan_run
    for name, case in COMMAND_CASES.items():
        options = TrainOptions(
            model=f"{folder}/model",
            adapter=Path(folder) / "start",
            data=[Path(folder) / f"{case.data}.jsonl"],
            tokens=case.settings.get("max_length", LENGTH),
            load_in_4bit=case.bits,
            packing=bool(case.settings.get("packing")),
            lr=RATE,
            max_steps=SFT_STEPS,
            epochs=9,
            batch=STEP,
            out=Path(folder) / f"{name} by command",
        )
        assert options.out is not None
        options.out.mkdir(exist_ok=True)
        planned.main(options)
    return {}


def command_result(name: str, folder: Path) -> dict[str, Any]:
    """The command's results."""
    from safetensors.numpy import load_file

    from tests.models import metrics

    out = folder / f"{name} by command"
    saved = load_file(out / "model" / "adapter_model.safetensors")
    names = {key: key.removeprefix("base_model.model.").replace(".weight", ".default.weight") for key in saved}
    lines = [line for line in metrics(out) if "loss" in line and line.get("kind", "step") == "step"]
    return {"logs": lines, "weights": {names[key]: value for key, value in saved.items()}}


def train_like_command(name: str, folder: Path) -> dict[str, Any]:
    """The same samples in the same order and with the same rates by TRL, which does not pack them."""
    import trl

    from pipecomp.data import ShardedSampler
    from pipecomp.recipes.steps import warmup_decay

    class Trainer(trl.SFTTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = warmup_decay(num_training_steps, optimizer or self.optimizer)
            return self.lr_scheduler

    case = COMMAND_CASES[name]
    order = ShardedSampler(SAMPLES, STEP)
    rows = [i for step in range(SFT_STEPS) for i in order.batch(step)]
    settings = {key: value for key, value in case.settings.items() if key != "packing"} | {
        "per_device_train_batch_size": STEP,
        "gradient_accumulation_steps": 1,
        "train_sampling_strategy": "sequential",
        "weight_decay": 0.01,
    }
    trainer = trainer_of(Trainer, case._replace(settings=settings), folder / "model", folder / "out", rows=rows)
    trainer.train()
    return result(trainer, trainer.model)


# -- differences


class Difference(NamedTuple):
    """Largest relative difference of a step's loss; of a weight; of another logged value."""

    loss: float
    weight: float
    logged: float


def losses(found: Mapping[str, Any], key: str = "loss") -> list[float]:
    return [line[key] for line in found["logs"] if key in line]


def compare(alone: Mapping[str, Any], ranks: Mapping[int, Mapping[str, Any]], *, logged_too: bool = True) -> Difference:
    """Compare what came of a case in one process with what came of it on the ranks."""
    expected, found = losses(alone), losses(ranks[0])
    assert len(expected) == len(found) >= DPO_STEPS
    loss = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    weights = {name: value for rank in ranks.values() for name, value in rank["weights"].items()}
    assert weights.keys() == alone["weights"].keys()
    weight = max(float(np.abs(weights[name] - value).max()) for name, value in alone["weights"].items())
    logged = 0.0
    speeds = ("runtime", "per_second", "flos", "eval_num_tokens")
    for ours, theirs in zip(ranks[0]["logs"], alone["logs"], strict=True) if logged_too else ():
        names = [name for name in theirs if not any(part in name for part in speeds)]
        assert set(names) <= set(ours), set(names) - set(ours)
        for name in names:
            difference = abs(ours[name] - theirs[name]) / max(1.0, abs(theirs[name]))
            if "accurac" not in name or difference > ONE_TOKEN:
                logged = max(logged, difference)
    return Difference(loss, weight, logged)
