"""The task of the quickstart and of ``gpu_smoke``: three-digit addition with a scratchpad, and its tokenizer."""
