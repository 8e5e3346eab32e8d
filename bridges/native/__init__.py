"""The `native` bridge: a `Program` as one XLA custom call, launched by a C++ handler without Python or torch at run time.

The code objects travel inside the call, so a function that is traced through this bridge can be exported, and XLA's persistent compilation
cache finds it. `library` builds and registers the handler; `program` compiles the kernels and packs their arguments.
"""

from .program import run_program, unavailable

__all__ = ["run_program", "unavailable"]
