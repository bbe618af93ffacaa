from tests._support.triton_compiler import compiler
from tests._support.triton_interpreter import interpreted

__all__ = ["compiler", "interpreted"]
