"""The actor on PyTorch FSDP2, for the causal language models of transformers."""
