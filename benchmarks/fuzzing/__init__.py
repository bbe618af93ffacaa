"""Coverage-guided fuzzing of the teacher service, see ``benchmarks/fuzz.py``."""
