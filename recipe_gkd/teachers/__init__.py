"""Teachers of a run: which teacher scores which sample, prompts, backends, failure policy, scoring workers."""
