"""The JSON schema of settings: in `run.json`, and in config files."""

from dataclasses import replace
from typing import Any

from ifbbench.settings.config import settings
from ifbbench.settings.fields import BYTES_FORMS, Setting

DRAFT = "https://json-schema.org/draft/2020-12/schema"
JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def setting_schema(setting: Setting) -> dict[str, Any]:
    """The schema of a setting's value in `run.json`: as resolved, or null where it has no meaning."""
    json_type = JSON_TYPES[setting.type]
    limits = {"minimum": setting.minimum, "exclusiveMinimum": setting.above, "maximum": setting.maximum}
    schema: dict[str, Any] = {
        "description": setting.help,
        "type": [json_type, "null"] if setting.is_optional else json_type,
        **{name: limit for name, limit in limits.items() if limit is not None},
    }
    if setting.choices and not setting.other_texts:
        choices: list[str | None] = [*setting.choices]
        schema["enum"] = choices + [None] * setting.is_optional
    return schema


def config_schema() -> dict[str, Any]:
    """The schema of a config file: all settings by each of their names, and what commands take besides."""
    properties: dict[str, Any] = {}
    for item in settings():
        found = setting_schema(replace(item, is_optional=False))
        if item.unit:
            found["description"] += f" [{item.unit}]"
        if item.value_aliases and "enum" in found:
            found["enum"] = [*found["enum"], *item.value_aliases]
        if item.unit == "bytes":
            sizes = {"type": "string", "pattern": r"^[0-9.]+(e\+?[0-9]+)? ?([kKmMgGtT]i?)?[bB]?$"}
            found = {"description": f"{found['description']}: {BYTES_FORMS}", "anyOf": [found, sizes]}
        if item.takes_none:
            found = {"description": found["description"], "anyOf": [found, {"enum": ["none", None]}]}
        if item.is_list:
            found = {"description": found["description"], "anyOf": [found, {"type": "array", "items": found}]}
        if item.command_line_default is not None:
            found["default"] = item.command_line_default
        properties |= dict.fromkeys((item.name, *item.aliases), found)
    value = {"type": [*JSON_TYPES.values()]}
    values = {"anyOf": [value, {"type": "array", "items": value}]}
    text, count = {"type": "string"}, {"type": "integer", "minimum": 1}
    keys: dict[str, tuple[str, dict[str, Any]]] = {
        "trace": ("The trace, where the command names none.", text),
        "repeat": ("Runs with other seeds: of the command, or of each point of a sweep.", count),
        "over": (
            "Of a sweep: the swept settings, each with its values: a list, or a text such as 512..16384:x2.",
            {"anyOf": [{"type": "object", "additionalProperties": values}, {"type": "array", "items": text}]},
        ),
        "zip": ("Of a sweep: pair the values of several settings instead of crossing them.", {"type": "boolean"}),
        "keep": ("Of a sweep: what is kept of each run.", {"enum": ["run", "summary"]}),
        "processes": ("Of a sweep: simulated runs at the same time.", count),
        "executor": ("Of a sweep: where the points run.", {"enum": ["local", "ray"]}),
    }
    for name, (help_text, found) in keys.items():
        properties[name] = {"description": help_text, **found}
    return {
        "$schema": DRAFT,
        "title": "Config file of ifbbench",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
