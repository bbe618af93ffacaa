"""Measure what each rank of an actor reads from a model folder, and its own memory while it does.

    OMP_NUM_THREADS=1 python benchmarks/model_loading.py [--ranks 2] [--layers 16] [--json FILE]

A Llama model of random weights is written in bfloat16, in several files: 1.8 GB with 16 layers. Each backend loads it
in float32, as the start of a run does:

    whole      from_pretrained of transformers in one process: a rank that loads the model before it is divided
    fsdp       shards of all ranks
    megatron   tensor parallelism of all ranks

``read`` is the size of the tensor slices that a rank reads. ``peak`` is the highest own memory (RssAnon) until the
weights are loaded, above that before the start, ``held`` what remains then. Each is of the rank with the most. The time
includes building the model, and for the actors the rendezvous.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from own_memory import PeakMemory, own_memory
from teacher_processes import free_port

METHODS = ("whole", "fsdp", "megatron")
TIMEOUT_S = 600
ACTOR = "actor_rollout_ref.actor"


def write_model(folder: Path, layers: int) -> None:
    """Write a model and a tokenizer file, which is only looked for."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="500MB")
    (folder / "tokenizer.json").write_text("{}")


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Yield a dictionary that has seconds, peak and held own memory of this process at the end, in bytes."""
    before: int = own_memory()
    found: dict[str, float] = {}
    start = time.monotonic()
    with PeakMemory() as memory:
        yield found
        found["seconds"] = time.monotonic() - start
        gc.collect()
        found["held"] = own_memory() - before
    found["peak"] = memory.peak - before


def load_whole(folder: Path) -> dict[str, float]:
    """Load the model with transformers in float32."""
    import torch
    import transformers

    with measured() as found:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found["read"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    del model
    return found


def start_actor(folder: Path, strategy: str, rank: int, ranks: int, port: int) -> dict[str, float]:
    """Start one rank of an actor."""
    from recipe_gkd.actor.folder_reader import FolderReader
    from recipe_gkd.actor.fsdp import backend
    from recipe_gkd.actor.megatron import megatron_model
    from recipe_gkd.commands.gpu_smoke.tiny_actor import running_actor
    from recipe_gkd.config import load_config

    parallel = f"{ACTOR}.megatron.tensor_model_parallel_size={ranks if strategy == 'megatron' else 1}"
    config = load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu",
            f"{ACTOR}.strategy={strategy}", f"{ACTOR}.megatron.dtype=float32", f"{ACTOR}.fsdp_config.dtype=float32",
            f"trainer.n_gpus_per_node={ranks}", parallel,
        ],
    )  # fmt: skip
    n_bytes, read = 0, FolderReader.read

    def count(self: Any, name: str, index: tuple[slice, ...] = ()) -> Any:
        nonlocal n_bytes
        tensor = read(self, name, index)
        n_bytes += tensor.nbytes
        return tensor

    module, name = (backend, "load_sharded") if strategy == "fsdp" else (megatron_model, "load_hf")
    load, measuring = getattr(module, name), ExitStack()

    def load_and_stop(*arguments: Any, **options: Any) -> Any:
        result = load(*arguments, **options)
        measuring.close()
        return result

    with mock.patch.object(FolderReader, "read", count), mock.patch.object(module, name, load_and_stop):
        found = measuring.enter_context(measured())
        with running_actor(config, rank=rank, world_size=ranks, rendezvous=("127.0.0.1", port)):
            return found | {"read": n_bytes}


def run_rank(method: str, folder: Path, rank: int, ranks: int, port: int) -> dict[str, float]:
    """Return the figures of one rank, which is this process."""
    return load_whole(folder) if method == "whole" else start_actor(folder, method, rank, ranks, port)


def measure(method: str, folder: Path, ranks: int) -> dict[str, float]:
    """Return the highest figures of all ranks."""
    n_processes = 1 if method == "whole" else ranks
    port = free_port()
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_rank, method, folder, rank, n_processes, port) for rank in range(n_processes)]
        found = [future.result(TIMEOUT_S) for future in futures]
    return {name: max(each[name] for each in found) for name in found[0]}


def main() -> None:
    """Print one line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.layers)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(f"{size / 1e9:.2f} GB in {len(list(Path(folder).glob('*.safetensors')))} files, {args.ranks} ranks")
        print(f"{'':10}{'read GB':>9}{'peak GB':>9}{'held GB':>9}{'seconds':>9}")
        for method in METHODS:
            row = rows[method] = measure(method, Path(folder), args.ranks)
            sizes = "".join(f"{row[name] / 1e9:9.2f}" for name in ("read", "peak", "held"))
            print(f"{method:10}{sizes}{row['seconds']:9.1f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"bytes": size, "ranks": args.ranks, **rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
