"""Files that a run keeps on disk: its folder, its checkpoints, and the state that it resumes from."""
