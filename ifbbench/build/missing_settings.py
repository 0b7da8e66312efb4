"""The refusal of settings that an engine does not have."""

from collections.abc import Mapping

from ifbbench.errors import InputError
from ifbbench.settings.config import RunConfig
from ifbbench.settings.modes import Overlap
from ifbbench.settings.names import setting


def refuse_missing(config: RunConfig, missing: Mapping[str, str]) -> None:
    """InputError for a setting in `missing` that is given: the engine of `config` does not have it, for this reason."""
    for name, reason in missing.items():
        item, value = setting(name), getattr(config, name)
        if name == "enable_trt_overlap" and config.overlap == Overlap.ASYNC:
            continue  # resolved already
        if value not in (item.default, item.command_line_default, None, 1):
            raise InputError(
                f"--{name}: --engine {config.engine} does not have it: {reason}. Leave out one of the two."
            )
