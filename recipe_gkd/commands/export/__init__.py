"""Write the weights of a checkpoint as a Hugging Face folder, in one process on the CPU.

python -m recipe_gkd export CHECKPOINT OUT [--adapter] [--dtype float32] [--max-shard-gb 4]

CHECKPOINT is a folder global_step_N of a run, or the folder of the run: then its newest complete checkpoint.
Checkpoints of any number of ranks and of both backends (Megatron, FSDP) are accepted. The weights are the
checkpoint's, bitwise equal to the folder huggingface that a run saves; tokenizer, chat template, generation
configuration and all other files are copied from the model folder that the run started from. Ids at which the run's
teachers end a turn are added to eos_token_id of generation_config.json. With LoRA, adapters are merged with the
weights; --adapter writes them as a folder for peft instead.
"""

from recipe_gkd.commands.export.command import main

__all__ = ["main"]
