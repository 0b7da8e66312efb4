"""`confirm` by its documented name: users' schedulers import it from here, see docs/library.md."""

from ifbbench.engine.passes import confirm

__all__ = ["confirm"]
