"""Talk to a student, and compare its responses with a teacher's.

python -m recipe_gkd chat FOLDER [--teacher FOLDER] [--prompt TEXT ...]

A FOLDER is a Hugging Face folder, a checkpoint global_step_N with a folder huggingface, or a run, whose newest complete
checkpoint is used. Responses are printed while transformers generates them, on a GPU if there is one. With --teacher,
each question gets the student's response and then the teacher's; each model continues its own conversation. Questions
come from the terminal, from a pipe (one per line), or from --prompt. Responses go to stdout; lines about them (tokens,
seconds, and why the response ended) go to stderr.

Commands in the conversation: /reset, /system TEXT, /help, /quit. At a terminal, Ctrl-C stops the response.
"""

from recipe_gkd.commands.chat.command import main

__all__ = ["main"]
