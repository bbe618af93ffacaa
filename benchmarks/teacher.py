"""`python benchmarks/teacher.py`: what the teacher service costs. All of it is in teacher_service.py.

This file bears the name of the package that is measured, so its folder must not be where Python looks first.
"""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:1] = [str(FOLDER.parent)]
sys.path.append(str(FOLDER))

from teacher_service import main  # noqa: E402

if __name__ == "__main__":
    main()
