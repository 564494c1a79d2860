"""A model's folder without weights: a small byte-level tokenizer, and the chat template of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from batch_pipeline.models import Model
from batch_pipeline.settings import Intake, Settings

NAME = "smollm2-135m"
CONTEXT_LENGTH = 2048
TEMPLATE = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
_TEXT = (
    "the quick brown fox jumps over the lazy dog and says a word to the helpful assistant word word the of and to in is"
)


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write tokenizer.json, tokenizer_config.json and the template to a folder; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def small_settings(source: Path, **changes: int | str) -> Settings:
    """Return settings whose catalogue has the model in `source` and one for embeddings; `changes` are of its intake."""
    endpoints = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
    return Settings(
        intake=msgspec.structs.replace(Intake(), **changes),
        models={
            NAME: Model(source=str(source), context_length=CONTEXT_LENGTH, endpoints=endpoints),
            "embedder": Model(source=str(source), context_length=256, endpoints=["/v1/embeddings"]),
        },
    )
