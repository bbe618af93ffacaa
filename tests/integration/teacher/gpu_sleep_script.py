"""Let an engine sleep and wake up on a GPU, in a separate process: `gpu_sleep_script.py MODEL OUT`.

The .npz file OUT contains the bytes that the sleep released and the wake-up allocated ("released", "restored"), the
size of the KV cache, results before and after, and the error of a wake-up whose copy of the weights was changed.
"""

from __future__ import annotations

import sys

import numpy as np

from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from tests.integration.teacher.engine_script import N_TOKENS, refusal, score
from tests.integration.teacher.gpu_engine_script import LONG

KV_CACHE_MIB = 2048


def free_bytes() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def change_one_byte_of_saved_weights() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator

    saved = [data.cpu_backup_tensor for data in CuMemAllocator.get_instance().pointer_to_data.values()]
    next(tensor for tensor in saved if tensor is not None)[0] ^= 1


def main(model: str, out: str) -> None:
    engine = VllmEngine(
        EngineConfig(
            model, N_TOKENS, dtype="bfloat16", logits_mib=1, kv_cache_mib=KV_CACHE_MIB, gpu_memory_utilization=0.1,
            sleep_mode=True,
        )
    )  # fmt: skip
    found = {f"before/{name}": value for name, value in score(engine, LONG).items() if name.endswith("sampled_logps_T")}
    awake = free_bytes()
    engine.sleep()
    asleep = free_bytes()
    engine.wake()
    found |= {"released": asleep - awake, "restored": asleep - free_bytes(), "kv cache": KV_CACHE_MIB * 2**20}
    found |= {f"after/{name}": value for name, value in score(engine, LONG).items() if name.endswith("sampled_logps_T")}
    engine.sleep()
    change_one_byte_of_saved_weights()
    found["wake error"] = refusal(engine.wake)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
