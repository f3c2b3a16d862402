# mypy: ignore-errors
"""A kernel with all it is compiled for, started without triton's search for it.

That search reads the environment, binds every argument by name and compares the constants of the module: several times
as long as the start itself, and with a batch of a thousand longer than the kernel runs. Here the compiled form is found
by what triton compiles for: the types of arguments, whether addresses and whole numbers divide by 16, and ones.
"""

import inspect

from nearkin import kernels


class CachedLauncher:
    """kernel: a `triton.jit` function whose constants come last; way: these, and the compiler's options."""

    def __init__(self, kernel, **way):
        self.kernel, self.way = kernel, way
        names = [name for name in inspect.signature(kernel.fn).parameters if name in way]
        self.constants = tuple(way[name] for name in names)
        self.compiled = {}

    def __call__(self, grid, *given):
        """grid: three numbers."""
        key = [given[0].get_device()]
        for value in given:
            kind = type(value)
            if kind is int:
                key.append((value == 1) + 2 * (value % 16 == 0) + 4 * (-(2**31) <= value < 2**31))
            elif kind is not float:
                key.append((value.dtype, value.data_ptr() % 16))
        key = tuple(key)
        known = self.compiled.get(key)
        if known is not None:
            known[grid](*given, *self.constants)
            return
        known = self.kernel[grid](*given, **self.way)
        if not kernels.interpreted():
            self.compiled[key] = known
