"""Write one HTML page about a run: curves, time per stage, advice, sample responses, checkpoints and configuration.

python -m recipe_gkd report RUN [--out report.html]

RUN is the folder of a run (trainer.default_local_dir) with a metrics.jsonl, which the logger "jsonl" writes. The run
may still be in progress. The page is one file that loads nothing from the network, so it can be sent to others.
"""

from recipe_gkd.commands.report.command import main

__all__ = ["main"]
