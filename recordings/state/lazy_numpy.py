"""numpy, imported when it is first used: that takes a sixth of the time of a start.

`Ints`, `Floats`, `Bools`: arrays of 64-bit numbers and of truth values, to annotate with.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["Bools", "Floats", "Ints", "np"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            found = self.__dict__[name] = getattr(numpy, name)
            return found

    np = _Numpy()
    Ints = Floats = Bools = Any
