"""Small tokenizers of the kinds that language models have, trained on a text."""

from __future__ import annotations

from typing import Any

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")


def gpt2(text: str) -> Any:
    """Byte-level BPE with GPT-2's pre-tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _trained(made, text, byte_level=True, end="<|endoftext|>")


def split(text: str, pattern: str = LLAMA3) -> Any:
    """Byte-level BPE behind a regular expression, as Llama 3's and Qwen's; begins a text with a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.BPE(ignore_merges=True))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trained = _trained(made, text, byte_level=True, end="<|end|>", begin="<|begin|>")
    core = trained.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    return trained


def sentencepiece(text: str, *, across_words: bool = False) -> Any:
    """BPE over the whole text with a mark for spaces put first, as Llama 2's; across_words: tokens may hold a space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if not across_words:  # tokens are learned within words, as SentencePiece does; then the pre-tokenizer goes
        made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trained = _trained(made, text, byte_level=False, end="</s>", begin="<s>")
    core = trained.backend_tokenizer
    core.pre_tokenizer = None
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return trained


def words(text: str) -> Any:
    """WordPiece in lower case, as BERT's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", unk_token="[UNK]")


def unigram(text: str) -> Any:
    """Unigram with Metaspace, as T5's and XLM-R's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(text.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def _trained(made: Any, text: str, *, byte_level: bool, end: str, begin: str | None = None) -> Any:
    from tokenizers import pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [end, *([begin] if begin else [])] if byte_level else ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    special += [] if byte_level else [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, bos_token=begin)
