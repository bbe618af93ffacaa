"""Weight files of a saved Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipe_gkd.actor.checkpoint.hf_save import CHAT_TEMPLATES, plan_files, write_hf_folder
from recipe_gkd.actor.checkpoint.stop_ids import GENERATION_CONFIG, generation_config
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


class TestGenerationConfig:
    """Ids that ended responses in training, in the folder of the trained model."""

    @staticmethod
    def declared(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None, *ids: int) -> Any:
        """Return the new file for a model folder with these files. None: the file of the folder is copied."""
        (folder / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (folder / GENERATION_CONFIG).write_text(json.dumps(generation))
        content = generation_config(folder, ids).get(GENERATION_CONFIG)
        return None if content is None else json.loads(content)

    @pytest.mark.parametrize(
        ("config", "generation", "expected"),
        [
            ({"eos_token_id": 3}, {"eos_token_id": 3, "top_p": 0.8}, {"eos_token_id": [3, 7], "top_p": 0.8}),
            ({"eos_token_id": 3}, {"eos_token_id": [5, 3]}, {"eos_token_id": [5, 3, 7]}),
            ({"eos_token_id": 3, "bos_token_id": 1}, None, {"bos_token_id": 1, "eos_token_id": [3, 7]}),
            ({"text_config": {"eos_token_id": 3}}, {"top_p": 0.8}, {"top_p": 0.8, "eos_token_id": [3, 7]}),
        ],
    )
    def test_id_of_the_teacher_is_added(self, tmp_path: Path, config: Any, generation: Any, expected: Any) -> None:
        assert self.declared(tmp_path, config, generation, 3, 7) == expected

    def test_one_id_is_no_list(self, tmp_path: Path) -> None:
        assert self.declared(tmp_path, {}, None, 7) == {"eos_token_id": 7}

    @pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": [7, 3]}])
    def test_folder_that_declares_all_ids_is_copied(self, tmp_path: Path, generation: Any) -> None:
        assert self.declared(tmp_path, {"eos_token_id": [3, 7]}, generation, 3, 7) is None


def test_weights_of_one_tensor_are_in_one_file() -> None:
    """A weight without tensors is a part of the one before it, even of one that is larger than a file."""
    small: list[TensorMeta] = [("small", (10,), "float32")]
    large: list[TensorMeta] = [("large", (90,), "float32")]
    weights = [small, large, [], [], small, small, []]
    assert [(file.first, file.end) for file in plan_files(weights, 100)] == [(0, 1), (1, 4), (4, 7)]
