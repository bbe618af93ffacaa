"""Scoring of responses by the teachers: routes, prompts, backends, requests and their failure policy."""

from recipe_gkd.teacher_routing.backends import TeacherBackend
from recipe_gkd.teacher_routing.prompts import make_teacher_prompts
from recipe_gkd.teacher_routing.router import Teachers, open_teachers
from recipe_gkd.teacher_routing.routes import Routes, read_routes
from recipe_gkd.teacher_routing.worker_count import with_worker_count

__all__ = [
    "Routes",
    "TeacherBackend",
    "Teachers",
    "make_teacher_prompts",
    "open_teachers",
    "read_routes",
    "with_worker_count",
]
