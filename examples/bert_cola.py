"""Fine-tune a BERT classifier on CoLA with transformers' Trainer on several processes, gradients compressed or not.

    torchrun --nproc-per-node 2 examples/bert_cola.py --train-file in_domain_train.tsv --eval-file in_domain_dev.tsv
    torchrun --nproc-per-node 2 examples/bert_cola.py ... --compress global_qsgd --options '{"bits": 8}'

CoLA's files have a sentence a line: source, label (1 acceptable, 0 not), the author's mark, the sentence; no header.
Without --model a small BERT with random weights learns from them alone, with a tokenizer made from the training file.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

import pipecomp


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train-file", required=True, metavar="TSV", help="training sentences")
    add("--eval-file", required=True, metavar="TSV", help="sentences to evaluate on, after the last epoch")
    add("--compress", metavar="METHOD", help="compress gradients: global_qsgd, double_squeeze, powersgd, …")
    add("--options", type=json.loads, default={}, metavar="JSON", help="the method's options, such as '{\"bits\": 4}'")
    add("--model", metavar="NAME", help="a folder or a name on the hub (default: a small BERT with random weights)")
    add("--tokenizer", metavar="NAME", help="a folder or a name on the hub (default: the model's, or one made here)")
    add("--vocabulary", type=int, default=3000, help="tokens of a tokenizer made here (default 3000)")
    add("--layers", type=int, default=2, help="of the small BERT (default 2)")
    add("--width", type=int, default=128, help="of the small BERT, a multiple of 64 (default 128)")
    add("--epochs", type=float, default=4, help="default 4")
    add("--batch", type=int, default=32, help="sentences per process and step (default 32)")
    add("--lr", type=float, default=3e-4, help="peak learning rate (default 3e-4)")
    add(
        "--seed",
        type=int,
        nargs="+",
        default=[0],
        metavar="S",
        help="of weights, order of sentences, dropout and compression; one training for each (default 0)",
    )
    add("--out", default="runs/bert_cola", metavar="FOLDER", help="for checkpoints (default runs/bert_cola)")
    add("--resume", metavar="FOLDER", help="go on from a checkpoint")
    add("--save-steps", type=int, metavar="N", help="write a checkpoint every N steps")
    add("--result", metavar="FILE", help="append what each training reached as a line of JSON")
    args = parser.parse_args(arguments)
    if args.options and args.compress is None:
        parser.error("--options needs --compress METHOD")
    return args


def read(path: str) -> tuple[list[str], list[int]]:
    """Sentences and labels of one of CoLA's files."""
    sentences, labels = [], []
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            columns = line.removesuffix("\n").removesuffix("\r").split("\t")
            if len(columns) != 4 or columns[1] not in ("0", "1"):
                raise SystemExit(f"{path}, line {number}: not source, 0 or 1, mark and sentence with tabs between them")
            sentences.append(columns[3])
            labels.append(int(columns[1]))
    return sentences, labels


def make_tokenizer(args: argparse.Namespace, sentences: list[str]) -> Any:
    """The one that was asked for, or a new one: byte-level pairs, the same ones on every process."""
    name = args.tokenizer or args.model
    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    special = ["[PAD]", "[CLS]", "[SEP]"]
    pairs = ByteLevelBPETokenizer(lowercase=True, add_prefix_space=True)
    pairs.train_from_iterator(
        sentences, vocab_size=args.vocabulary, min_frequency=2, special_tokens=special, show_progress=False
    )
    made = Tokenizer.from_str(pairs.to_str())
    ids = [(token, pairs.token_to_id(token)) for token in special[1:]]
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def make_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    """A classifier of two classes."""
    if args.model is not None:
        return AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.width // 64),
        intermediate_size=4 * args.width,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertForSequenceClassification(config)


def measures(prediction: Any) -> dict[str, float]:
    """Accuracy and Matthews correlation, CoLA's own measure: 0 for guessing, 1 for no mistake."""
    said, right = prediction.predictions.argmax(axis=1), prediction.label_ids
    both, neither = int(np.sum(said & right)), int(np.sum((1 - said) & (1 - right)))
    only_said, only_right = int(np.sum(said & (1 - right))), int(np.sum((1 - said) & right))
    product = (both + only_said) * (both + only_right) * (neither + only_said) * (neither + only_right)
    matthews = (both * neither - only_said * only_right) / math.sqrt(product) if product else 0.0
    return {"accuracy": (both + neither) / len(right), "matthews": matthews}


def training_arguments(args: argparse.Namespace, seed: int) -> TrainingArguments:
    """Trainer's arguments for one training."""
    return TrainingArguments(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=128,
        learning_rate=args.lr,
        warmup_steps=0.1,
        weight_decay=0.01,
        seed=seed,
        logging_strategy="epoch",
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        average_tokens_across_devices=False,  # it multiplies a classifier's loss by the number of processes
    )


def train(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train and evaluate once; returns what was measured."""
    training = training_arguments(args, seed)
    sentences, labels = read(args.train_file)
    held_out, held_out_labels = read(args.eval_file)
    tokenizer = make_tokenizer(args, sentences)

    def samples(texts: list[str], of: list[int]) -> list[dict[str, Any]]:
        encoded = tokenizer(texts, truncation=True, max_length=128)
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": label}
            for ids, mask, label in zip(encoded["input_ids"], encoded["attention_mask"], of, strict=True)
        ]

    set_seed(seed)
    model = make_model(args, tokenizer)
    callback = None
    if args.compress is not None:
        callback = pipecomp.CompressionCallback(method=args.compress, seed=seed, **args.options)
    trainer = Trainer(
        model,
        training,
        train_dataset=samples(sentences, labels),
        eval_dataset=samples(held_out, held_out_labels),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=measures,
        callbacks=[callback] if callback else None,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    found = trainer.evaluate()
    traffic = callback.stats() if callback else uncompressed(model, training.world_size, trainer.state.global_step)
    return {
        "compress": args.compress,
        "options": args.options,
        "seed": seed,
        "processes": training.world_size,
        "steps": trainer.state.global_step,
        "parameters": trainable(model),
        "train_loss": [line["loss"] for line in trainer.state.log_history if "loss" in line][-1],
        "eval_loss": found["eval_loss"],
        "accuracy": found["eval_accuracy"],
        "matthews": found["eval_matthews"],
        "bytes_raw": traffic["bytes_raw"],
        "bytes_sent": traffic["bytes_sent"],
        "first": training.process_index == 0,
    }


def trainable(model: Any) -> int:
    """Values of a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def uncompressed(model: Any, n: int, steps: int) -> dict[str, int]:
    """Bytes that DDP's own all-reduce of float32 gradients puts on each process's links, as a ring does it."""
    count = 2 * 4 * trainable(model) * (n - 1) // n * steps
    return {"bytes_raw": count, "bytes_sent": count}


def report(result: dict[str, Any]) -> None:
    """Print what a training reached."""
    print(f"seed {result['seed']}, gradients {result['compress'] or 'not compressed'}, {result['steps']} steps")
    print(f"  training loss of the last epoch  {result['train_loss']:.4f}")
    print(f"  evaluation loss                  {result['eval_loss']:.4f}")
    print(f"  accuracy                         {result['accuracy']:.4f}")
    print(f"  Matthews correlation             {result['matthews']:.4f}")
    sent, raw = result["bytes_sent"], result["bytes_raw"]
    less = f", {raw / sent:.2f} times less than {raw / 1e6:.1f} MB" if sent < raw else ""
    print(f"  gradients sent by each process   {sent / 1e6:.1f} MB{less}", flush=True)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train with each seed, and let the first process report."""
    args = parse(arguments)
    results = []
    for seed in args.seed:
        result = train(args, seed)
        first = result.pop("first")
        results.append(result)
        if first:
            report(result)
        if first and args.result:
            with open(args.result, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    return results


if __name__ == "__main__":
    main()
