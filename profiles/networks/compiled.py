"""A module run through `torch.compile`: one program per fixed shape. Errors of the compiler are reported as such.

torch is imported when a module is compiled, not with this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenuto.errors import EnvironmentFaultError, first_line

if TYPE_CHECKING:
    import torch

# Modules whose errors are the compiler's. Errors of the model itself are passed on unchanged.
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


class CompiledModule:
    """Calls a compiled module. Invariant: an error of the compiler leaves as `EnvironmentFaultError` and no other."""

    def __init__(self, module: Callable[..., Any], name: str, *, shapes: int) -> None:
        """Prepare; the first call with a shape compiles for it.

        Args:
            module: the forward pass on its device.
            name: the model's name for errors.
            shapes: the number of shapes that it will be called with.
        """
        import torch

        _allow_shapes(shapes)
        self._name = name
        self._call: Any = torch.compile(module, dynamic=False)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the program of these shapes.

        Raises:
            EnvironmentFaultError: there is no program for these shapes yet, and it cannot be made.
        """
        try:
            return self._call(*tensors)
        except Exception as error:
            if not _is_compilers(error):
                raise
            raise EnvironmentFaultError(
                f"'{self._name}' cannot be compiled: {first_line(error)}. Install a C++ compiler (and Triton for a "
                "GPU), or remove `compile: true` from the model's options."
            ) from error


def _is_compilers(error: Exception) -> bool:
    return any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__)


def _allow_shapes(count: int) -> None:
    """Let torch keep a program for every shape. Above its limit (8 per function) it runs uncompiled, and only logs
    it."""
    import torch._dynamo.config as dynamo

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), 64, count))  # limit: shapes of a function, instead of torch's 8
