"""ifbbench replays request traces through an in-flight batching engine and records what every iteration decided.

The batch manager is also a library:

    from ifbbench import BatchManager, InferenceRequest, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ifbbench.compiled import use_compiled_modules

if TYPE_CHECKING:
    from ifbbench.engine.retention import Retention, RetentionRange
    from ifbbench.engine.sampling_params import SamplingParams
    from ifbbench.report.export import load_run
    from ifbbench.serving.library.batch_manager import BatchManager, BatchManagerFailed
    from ifbbench.serving.library.request import InferenceRequest
    from ifbbench.torch.communicator import Communicator

__version__ = "0.1.0"
__all__ = [
    "BatchManager",
    "BatchManagerFailed",
    "Communicator",
    "InferenceRequest",
    "Retention",
    "RetentionRange",
    "SamplingParams",
    "__version__",
    "load_run",
]

use_compiled_modules()

# Imported at first use, so that `import ifbbench` and `ifbbench --help` are quick.
_MODULES = {
    "BatchManager": "ifbbench.serving.library.batch_manager",
    "BatchManagerFailed": "ifbbench.serving.library.batch_manager",
    "Communicator": "ifbbench.torch.communicator",
    "InferenceRequest": "ifbbench.serving.library.request",
    "Retention": "ifbbench.engine.retention",
    "RetentionRange": "ifbbench.engine.retention",
    "SamplingParams": "ifbbench.engine.sampling_params",
    "load_run": "ifbbench.report.export",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ifbbench' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
