from tests._support.triton_compiler import compiler
from tests._support.triton_interpreter import interpreted, interpreted_ranks

__all__ = ["compiler", "interpreted", "interpreted_ranks"]
