"""The trainer's side of its teachers: which prompt is for which, asking them, and what happens when one fails."""

from recipe_gkd.teachers.routes import Routes, read_routes
from recipe_gkd.teachers.teachers import Teachers, open_teachers

__all__ = ["Routes", "Teachers", "open_teachers", "read_routes"]
