"""The trainer's side of its teachers: which prompt is for which, asking them, and what happens when one fails."""

from recipe_gkd.teacher_routing.router import Teachers, open_teachers
from recipe_gkd.teacher_routing.routes import Routes, read_routes

__all__ = ["Routes", "Teachers", "open_teachers", "read_routes"]
