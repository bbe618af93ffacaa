"""Data of docs/tutorial.md: problems of addition as JSON lines, 4000 to train on and 200 held out.

python docs/examples/addition_data.py outputs/tutorial
"""

import json
import random
import sys
from pathlib import Path

from recipe_gkd.addition.task import Problem

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
numbers = random.Random(0).sample([(a, b) for a in range(100, 1000) for b in range(a, 1000)], 4200)
lines = [
    json.dumps({"prompt": [{"role": "user", "content": problem.question}], "ground_truth": problem.answer}) + "\n"
    for problem in (Problem(a, b) for a, b in numbers)
]
(folder / "train.jsonl").write_text("".join(lines[:4000]), encoding="utf-8")
(folder / "val.jsonl").write_text("".join(lines[4000:]), encoding="utf-8")
