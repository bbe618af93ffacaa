"""Files that the ranks write: checkpoints, in separate processes, and Hugging Face folders."""
