"""Files that the ranks write: checkpoints, in processes of their own, and Hugging Face folders."""
