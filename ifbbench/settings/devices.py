"""Names of devices and of hardware profiles."""

from functools import cache
from pathlib import Path
from typing import Any

DEVICES = ("auto", "cpu", "cuda", "null")
SIMULATED = "sim:"
HARDWARE_PROFILES = Path(__file__).parents[1] / "simulated" / "profiles"
ENGINE_OVERHEADS = Path(__file__).parents[1] / "simulated" / "engines"
# The hardware profile that a short name means, where there are several or its name is longer.
DEVICE_FAMILIES = {"a100": "a100-80gb-sxm", "gh200": "gh200-96gb", "h100": "h100-sxm", "h200": "h200-sxm"}


@cache  # each change of a setting asks for them, and to read a directory takes longer than all else of a check
def profile_names() -> tuple[str, ...]:
    """Names of the built-in hardware profiles."""
    return tuple(sorted(path.stem for path in HARDWARE_PROFILES.glob("*.toml")))


def profile_name(device: str) -> str:
    """The name of the hardware profile that `device` means, with or without `sim:`; of a family its usual member."""
    name = device.removeprefix(SIMULATED)
    plain = name.lower().replace("_", "-")
    return DEVICE_FAMILIES.get(plain, name)


def device_name(name: Any) -> Any:
    """`name`, with `sim:` before the name or the file of a hardware profile that is not the name of a device."""
    if not isinstance(name, str) or name.lower() in ("", *DEVICES):
        return name
    profile = profile_name(name)
    begin = profile.lower().replace("_", "-")
    is_profile = name.endswith(".toml") or any(one.startswith(begin) for one in profile_names())
    return SIMULATED + profile if is_profile or name.startswith(SIMULATED) else name
