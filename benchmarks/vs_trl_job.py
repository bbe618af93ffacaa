"""The jobs of ``benchmarks/vs_trl.py``: their models and prompts, and their training with TRL.

    python vs_trl_job.py JOB.json

This module imports nothing from the repository, because the command runs in TRL's own environment. JOB.json has the
folders ``student`` and ``teacher``, the file ``data`` (parquet or jsonl), the file for the ``result``, ``responses``
(per step), ``response_tokens``, ``steps``, ``lr`` and ``adam_beta2``, and optionally ``save``, a folder for the trained
student, and ``bf16`` (see :func:`settings`). The result has the wall clock and the CPU time of the process after each
optimizer step, and the mean length of the responses.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)

PROMPT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a Qwen2 model. The heads have ``hidden / heads`` channels, and at least 32, for vLLM's CPU attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job.

    Attributes:
        vocabulary: Ids of both models.
        student: Size of the student.
        teacher: Size of the teacher.
        responses: Responses per step.
        target: Intended ratio of the seconds per step, TRL / ours. It is printed and not asserted.
    """

    vocabulary: int
    student: Shape
    teacher: Shape
    responses: int
    response_tokens: int
    target: float


JOBS = {
    "small": Job(
        vocabulary=1024, responses=64, response_tokens=64, target=1.5,
        student=Shape(layers=2, hidden=96, heads=3, kv_heads=3, ffn=512),  # 0.47M parameters
        teacher=Shape(layers=4, hidden=256, heads=8, kv_heads=4, ffn=736),  # 3.3M
    ),
    "medium": Job(
        vocabulary=4096, responses=32, response_tokens=128, target=3.0,
        student=Shape(layers=6, hidden=320, heads=5, kv_heads=5, ffn=1216),  # 10.8M
        teacher=Shape(layers=12, hidden=512, heads=8, kv_heads=8, ffn=1376),  # 40M
    ),
}  # fmt: skip


def prepare(job: Job, folder: Path, steps: int) -> None:
    """Write ``student``, ``teacher`` and ``train.parquet``."""
    for name, shape in (("student", job.student), ("teacher", job.teacher)):
        torch.manual_seed(len(name))
        config = Qwen2Config(
            vocab_size=job.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=PROMPT_TOKENS + job.response_tokens,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=job.vocabulary - 1,
            pad_token_id=0,
            dtype="float32",
        )
        model = Qwen2ForCausalLM(config)
        # The first channel is the same at all positions, and lowers the logit of the EOS id by over 40.
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1.0
            model.model.embed_tokens.weight[job.vocabulary - 1, 0] = -4.0
        model.save_pretrained(folder / name)
        _tokenizer(job.vocabulary).save_pretrained(folder / name)
    letters = random.Random(0)
    rows = [{"prompt": "".join(letters.choices(ascii_letters, k=PROMPT_TOKENS))} for _ in range(job.responses * steps)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters. The last id is its EOS token."""
    names = ["<pad>", *ascii_letters]
    names += [f"<unused_{i}>" for i in range(len(names), vocabulary - 1)]
    core = Tokenizer(models.BPE({name: i for i, name in enumerate([*names, "<eos>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def busy_s() -> float:
    """Return the CPU seconds of all processes since the machine's start, in user and kernel mode."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    idle, iowait, steal = int(fields[3]), int(fields[4]), int(fields[7])
    return (sum(map(int, fields[:8])) - idle - iowait - steal) / os.sysconf("SC_CLK_TCK")


class Clock(TrainerCallback):
    """Times at the end of each optimizer step.

    Attributes:
        wall_s: Monotonic time.
        cpu_s: CPU time of all threads of this process.
        busy_s: CPU time of all processes of the machine.
    """

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.busy_s: list[float] = []

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Append the times."""
        self.wall_s.append(time.monotonic())
        self.cpu_s.append(time.process_time())
        self.busy_s.append(busy_s())


def settings(job: dict[str, Any]) -> Any:
    """Return a ``DistillationConfig``: on-policy, forward KL, on the CPU, without checkpoints or evaluation.

    With ``bf16``, the student has float32 weights and computes in bfloat16 (autocast), as TRL does by default.
    """
    from trl import DistillationConfig

    return DistillationConfig(
        output_dir=str(Path(job["result"]).parent / "trl_output"),
        use_cpu=True,
        bf16=job.get("bf16", False),
        gradient_checkpointing=False,
        beta=0.0,  # forward KL
        temperature=1.0,
        max_completion_length=job["response_tokens"],
        per_device_train_batch_size=job["responses"],
        gradient_accumulation_steps=1,
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        adam_beta2=job["adam_beta2"],
        logging_steps=1,  # the other side writes metrics of each step too
        save_strategy="no",
        report_to="none",
        seed=1,
    )


def main(path: str) -> int:
    """Run the job. Return the exit status."""
    from datasets import load_dataset
    from trl import DistillationTrainer

    job = json.loads(Path(path).read_text(encoding="utf-8"))
    student = AutoModelForCausalLM.from_pretrained(job["student"], dtype=torch.float32)
    teacher_dtype = torch.bfloat16 if job.get("bf16") else torch.float32
    teacher = AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=teacher_dtype)
    file_format = "parquet" if job["data"].endswith(".parquet") else "json"
    clock = Clock()
    trainer = DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=settings(job),
        train_dataset=load_dataset(file_format, data_files=job["data"], split="train").select_columns("prompt"),
        processing_class=AutoTokenizer.from_pretrained(job["student"], padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    if "save" in job:
        trainer.save_model(job["save"])
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    found = {
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "busy_s": clock.busy_s,
        "mean_length": sum(lengths) / len(lengths),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "threads": torch.get_num_threads(),
    }
    Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
