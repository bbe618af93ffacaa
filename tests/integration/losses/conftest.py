from tests._support.fixtures import pool

__all__ = ["pool"]
