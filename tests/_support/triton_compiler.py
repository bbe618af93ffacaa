"""Compilation of Triton kernels without a GPU. The compiler refuses programs that the interpreter accepts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TARGETS = [
    pytest.param(capability, dtype, id=f"sm_{capability}-{dtype}", marks=() if is_fast else pytest.mark.slow)
    for capability in (80, 90, 100, 120)
    for dtype in ("bf16", "fp16", "fp32")
    for is_fast in [capability == 90 and dtype in ("bf16", "fp32")]
]
"""Architectures, and types of the tensors. Most combinations are slow tests."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel for one GPU architecture.

    Attributes:
        ptx: Virtual assembly.
        spilled_bytes: Bytes per thread that do not fit into registers and are stored in local memory.
    """

    ptx: str
    spilled_bytes: int

    def reads(self, n_bytes: int) -> bool:
        """Return True if a thread reads ``n_bytes`` of global memory at once."""
        return self._accesses("ld", n_bytes)

    def writes(self, n_bytes: int) -> bool:
        """Return True if a thread writes ``n_bytes`` of global memory at once."""
        return self._accesses("st", n_bytes)

    def _accesses(self, instruction: str, n_bytes: int) -> bool:
        found = re.findall(rf"\b{instruction}\.global\S*?(?:\.v(\d))?\.[busf](\d+)\b", self.ptx)
        return n_bytes in {int(count or 1) * int(bits) // 8 for count, bits in found}


class KernelCompiler:
    """Compiler of kernels, with a cache in a folder.

    Args:
        folder: Folder of the cache.
        capsys: Fixture that captures the assembler's log.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
        self._capsys = capsys

    def compile(
        self,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, int],
        capability: int,
        *,
        aligned: Collection[str],
        **options: Any,
    ) -> CompiledKernel:
        """Compile a kernel as a launch does.

        Args:
            kernel: Function with Triton's decorator.
            types: Types of the arguments, such as ``*bf16`` and ``i64``. Other arguments are ``i32``.
            constants: Constants of the kernel, and arguments for which a launch compiles a variant with the value 1.
            capability: Architecture: 90 for sm_90.
            aligned: Numbers that are multiples of 16. Pointers always are.
            options: Options of the compiler, such as ``num_warps``.
        """
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        attributes = {
            (number,): [["tt.divisibility", 16]]
            for number, (name, kind) in enumerate(signature.items())
            if kind[0] == "*" or (name in aligned and kind != "constexpr")
        }
        source = ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs=attributes,
        )
        self._capsys.readouterr()
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        log = self._capsys.readouterr().out
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
        assert spills, f"no report of registers in the assembler's log: {log!r}"
        return CompiledKernel(ptx=compiled.asm["ptx"], spilled_bytes=max(map(int, spills)))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> KernelCompiler:
    """Compiler with an empty cache."""
    return KernelCompiler(tmp_path, monkeypatch, capsys)
