"""Reading YAML in which no key is there twice: PyYAML keeps the last value, and the one before it has no effect."""

from typing import Any

import yaml

from ifbbench.errors import InputError
from ifbbench.settings.fields import shown


def parse_yaml(text: str, as_texts: bool = False) -> Any:
    """The content of a YAML text, None if it is empty. as_texts: each value is a text, as it is written. Merge keys
    (`<<: *name`) are merged in either case.

    InputError, with the line, for a key that is there twice; yaml.YAMLError for what is no YAML."""
    if yaml.__with_libyaml__:
        try:
            return _parsed(_texts_of(yaml.CSafeLoader)(text) if as_texts else yaml.CSafeLoader(text))
        except (yaml.YAMLError, ValueError, RecursionError):
            pass  # the parser in Python words errors better, and libyaml has limits of its own
    return _parsed(_texts_of(yaml.SafeLoader)(text) if as_texts else yaml.SafeLoader(text))


def _texts_of(loader: Any) -> Any:
    """A loader that makes a text of each scalar, whatever its tag. PyYAML's own (BaseLoader) does not merge."""
    resolvers = {"<": loader.yaml_implicit_resolvers["<"]}
    return type("TextLoader", (loader,), {"yaml_implicit_resolvers": resolvers, "yaml_constructors": {}})


def _parsed(loader: Any) -> Any:
    """The content of the one document of a loader."""
    try:
        node = loader.get_single_node()
        _check_keys(node)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _check_keys(root: yaml.Node | None) -> None:
    """InputError for a key that is there twice in a mapping at or below `root`. Before values are made: merging (`<<`)
    adds keys to a mapping that its own keys replace."""
    waiting, known = [root], set[int]()  # an anchor is several times below the root, and may be below itself
    while waiting:
        node = waiting.pop()
        if node is None or id(node) in known:
            continue
        known.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set[str]()
            for key, value in node.value:
                waiting += (key, value)
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise InputError(
                            f"line {key.start_mark.line + 1}: the key {shown(key.value)} is there twice; "
                            "expected each key once."
                        )
                    seen.add(key.value)
