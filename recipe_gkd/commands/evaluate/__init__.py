"""Generate responses with vLLM, score them with a reward function, and compare models.

python -m recipe_gkd evaluate FOLDER [FOLDER ...] --data FILE [--reward FILE.py[:NAME]] [--n 8] [--json OUT]

A FOLDER is a Hugging Face folder, a checkpoint global_step_N with a folder huggingface, or a run, whose newest complete
checkpoint is used. With --n 1 (default), decoding is greedy and the table shows the mean reward. With a larger n,
responses are sampled and the table shows avg@n, the mean over all responses, and best@n, the mean of the best response
to each prompt. The number after ± is the standard error of the mean over prompts. Differences to the first model are
paired by prompt. Keys of the section data describe the columns, such as data.prompt_key=question
data.ground_truth_key=answer data.max_response_length=512.
"""

from recipe_gkd.commands.evaluate.command import main

__all__ = ["main"]
