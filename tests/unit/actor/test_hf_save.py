"""Weight files of a saved Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from recipe_gkd.actor.checkpoint.hf_save import CHAT_TEMPLATES, plan_files, write_hf_folder
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.tiny_models import make_folder


class TestWriteHfFolder:
    def test_write_hf_folder_of_large_model_has_files_and_index(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "model", "qwen2_untied")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        weights = model.state_dict()
        meta = [[(name, tuple(tensor.shape), "float32")] for name, tensor in weights.items()]
        write_hf_folder(
            tmp_path / "saved", folder, meta, lambda first, last: list(weights.items())[first:last],
            lambda function, _: function(), max_file_bytes=50_000,
        )  # fmt: skip
        files = sorted((tmp_path / "saved").glob("*.safetensors"))
        assert len(files) > 2 and all(file.stat().st_size < 60_000 for file in files)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
        assert not (tmp_path / "saved.partial").exists()

    def test_write_hf_folder_copies_named_chat_templates_and_no_other_folder(self, tmp_path: Path) -> None:
        source, saved = make_family_folder(tmp_path / "model", BY_TYPE["qwen2"]), tmp_path / "saved"
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        tokenizer.save_pretrained(source)
        assert (source / CHAT_TEMPLATES).is_dir()
        (source / "original").mkdir()
        (source / "original" / "params.json").write_text("{}")
        weights = {"weight": torch.zeros(2)}
        write_hf_folder(
            saved, source, [[("weight", (2,), "float32")]], lambda first, last: weights.items(),
            lambda function, _: function(),
        )  # fmt: skip
        assert transformers.AutoTokenizer.from_pretrained(saved).chat_template == tokenizer.chat_template
        assert not (saved / "original").exists()


def test_weights_of_one_tensor_are_in_one_file() -> None:
    """A weight without tensors is a part of the one before it, even of one that is larger than a file."""
    small: list[TensorMeta] = [("small", (10,), "float32")]
    large: list[TensorMeta] = [("large", (90,), "float32")]
    weights = [small, large, [], [], small, small, []]
    assert [(file.first, file.end) for file in plan_files(weights, 100)] == [(0, 1), (1, 4), (4, 7)]
