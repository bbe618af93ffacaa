"""Training of each family with FSDP: equality with programs of transformers and peft, export, saved folders, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.actor.fsdp.model_dims import read_causal_lm_dims
from recipe_gkd.actor.fsdp.packing import RowStyle
from recipe_gkd.commands.gpu_smoke.reference import sample_logits
from recipe_gkd.errors import ConfigError, ModelError
from tests._support.causal_models import VOCABULARY
from tests._support.errors import check_error, raises
from tests._support.families import BY_TYPE, FAMILIES, Family, make_family_folder, randomize
from tests._support.repository import REPO
from tests._support.tiny_models import ACTOR, make_config, make_samples, with_turns, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor.jobs import start_with_error
from tests.integration.actor.lora_reference import ADAPTERS, peft_training
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training
from tests.integration.families import jobs

LR = 1e-3
FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32", f"{ACTOR}.optim.lr={LR}"]
CHECKPOINTED = f"{ACTOR}.fsdp_config.gradient_checkpointing=true"
LORA = [*FSDP, *ADAPTERS]
BATCHES = [make_samples(9, seed=0), with_turns(make_samples(9, seed=1)), make_samples(9, seed=2)]
LOGITS_TOLERANCE = 1e-4


def rows(column: str, *, refused: bool = False) -> list[Any]:
    """Return the families that a column supports, or does not support, as parameters of a test."""
    return [
        pytest.param(family, marks=() if family.is_default or refused else pytest.mark.slow, id=family.model_type)
        for family in FAMILIES
        if bool(getattr(family, column)) == refused and (column == "fsdp" or not family.fsdp)
    ]


def load(folder: Path, dtype: torch.dtype) -> Any:
    """Return a model of transformers and what differed from its folder. Only "eager" supports all options."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )


@pytest.mark.parametrize("family", rows("fsdp"))
def test_training_equals_transformers_and_resumes_from_its_checkpoint(
    family: Family, pool: WorkerPool, tmp_path: Path
) -> None:
    folder, saved, checkpoint = make_family_folder(tmp_path / "model", family), tmp_path / "saved", tmp_path / "state"
    results = pool.run(2, jobs.train_and_save, make_config(folder, *FSDP, ranks=2), BATCHES, checkpoint, saved)
    training = results[0]
    assert {result.style for result in results} == {RowStyle.PADDED if family.is_padded else RowStyle.PACKED}
    assert_logits(folder, {uid: logits for result in results for uid, logits in result.logits.items()})
    assert_stored(folder, training)
    want_metrics, want_weights = reference_training(folder, BATCHES, lr=LR)
    for result in results:
        assert_metrics(result.metrics, want_metrics, rel=5e-4)
    assert training.weights.keys() == want_weights.keys()
    assert_weights(training.weights, want_weights)
    assert_saved(saved, training.weights)
    resumed = make_config(folder, *FSDP, CHECKPOINTED)
    metrics, weights = pool.run(1, jobs.resume_and_train, resumed, BATCHES[1:], checkpoint)[0]
    for again, first in zip(metrics, training.metrics[1:], strict=True):
        assert again["actor/kl_loss"] == pytest.approx(first["actor/kl_loss"], rel=1e-5)
    assert_weights(weights, {name: tensor.double() for name, tensor in training.weights.items()})


def assert_logits(folder: Path, logits: dict[int, Tensor]) -> None:
    """Compare the logits of the first update with each sequence alone."""
    model, _ = load(folder, torch.float32)
    samples = without_empty(BATCHES[0])
    assert logits.keys() == {sample.prompt.uid for sample in samples}
    with torch.no_grad():
        for sample in samples:
            want_TV = sample_logits(model, sample)
            torch.testing.assert_close(logits[sample.prompt.uid], want_TV, atol=LOGITS_TOLERANCE, rtol=LOGITS_TOLERANCE)


def assert_stored(folder: Path, training: jobs.Training) -> None:
    """Compare the export before the training with the folder, and the announced tensors with the exported ones."""
    stored = load_file(folder / "model.safetensors")
    assert training.before.keys() == stored.keys()
    assert all(torch.equal(training.before[name], tensor) for name, tensor in stored.items())
    found = [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in training.weights.items()]
    assert found == training.meta
    assert {name: tensor.shape for name, tensor in training.weights.items()} == {n: t.shape for n, t in stored.items()}


def assert_saved(folder: Path, weights: dict[str, Tensor]) -> None:
    """Check that a saved folder has the weights, and that transformers misses nothing in it."""
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    _, loading = load(folder, torch.float32)
    assert not any(loading.values()), loading


@pytest.mark.parametrize("family", rows("lora"))
def test_update_of_adapters_equals_peft(family: Family, pool: WorkerPool, tmp_path: Path) -> None:
    folder, saved = make_family_folder(tmp_path / "model", family), tmp_path / "saved"
    config = make_config(folder, *LORA, ranks=2)
    (metrics, weights), _ = pool.run(2, jobs.update_and_save, config, BATCHES[0], saved)
    want_metrics, want_weights = peft_training(folder, None, 1, LR)
    assert_metrics([metrics], want_metrics, rel=1e-4)
    assert weights.keys() == want_weights.keys()
    assert_weights(weights, want_weights)
    assert_saved(saved, weights)
    stored = load_file(folder / "model.safetensors")
    moved = {name for name, tensor in weights.items() if not torch.equal(tensor, stored[name])}
    assert moved == {name for name, tensor in stored.items() if not torch.equal(want_weights[name], tensor.double())}
    assert moved


@pytest.mark.parametrize("family", rows("lora", refused=True))
def test_refusal_of_adapters_names_the_key(family: Family, pool: WorkerPool, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "model", family)
    [error] = pool.run(1, start_with_error, make_config(folder, *LORA), 1)
    check_error(error, ConfigError, keys=(f"{ACTOR}.lora.target_modules",))


@pytest.mark.parametrize("family", rows("fsdp", refused=True))
def test_refusal_names_the_reason_before_anything_starts(family: Family, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "model", family)
    with raises(ModelError, path=folder) as caught:
        read_causal_lm_dims(folder)
    assert family.fsdp in str(caught.value)


VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
)
VISION4 = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "vision"), [("Gemma3", VISION), ("Gemma4", VISION4)])
def test_training_of_a_folder_with_images_changes_its_text_model_only(
    kind: str, vision: dict[str, int], pool: WorkerPool, tmp_path: Path
) -> None:
    folder, saved, checkpoint = tmp_path / "model", tmp_path / "saved", tmp_path / "state"
    family = BY_TYPE[f"{kind.lower()}_text"]
    text = family.config | {"model_type": family.model_type, "pad_token_id": VOCABULARY - 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomize(model, family)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    training = pool.run(2, jobs.train_and_save, make_config(folder, *FSDP, ranks=2), BATCHES, checkpoint, saved)[0]
    assert_stored(folder, training)
    want_metrics, _ = reference_training(folder, BATCHES, lr=LR)
    assert_metrics(training.metrics, want_metrics, rel=5e-4)
    changed = {name for name, tensor in training.weights.items() if not torch.equal(tensor, training.before[name])}
    buffers = {name for name in training.weights if name.endswith(".layer_scalar")}
    assert changed == {name for name in training.weights if "language_model." in name} - buffers
    assert_saved(saved, training.weights)


@pytest.mark.slow
def test_text_model_of_qwen3_5_is_saved_by_the_program_of_the_documentation(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "text"
    text = BY_TYPE["qwen3_5_text"].config | {"model_type": "qwen3_5_text"}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=128, patch_size=4)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    original = transformers.Qwen3_5ForConditionalGeneration(config)
    original.save_pretrained(source)
    with raises(ModelError, path=source, names=("architectures",)):
        read_causal_lm_dims(source)
    program = (REPO / "docs" / "models.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    names = {"SOURCE": str(source), "TEXT_MODEL": str(folder)}
    exec(program, names)
    assert read_causal_lm_dims(folder).family == "qwen3_5_text"
    model, loading = load(folder, torch.float32)
    assert not any(loading.values()), loading
    language = original.model.language_model.state_dict()
    assert all(torch.equal(tensor, language[name]) for name, tensor in model.model.state_dict().items())
