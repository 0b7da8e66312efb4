"""Command lines in YAML of Docker Compose and Kubernetes: the words that each container runs."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ifbbench.errors import InputError
from ifbbench.settings.fields import shown

# What a container runs: of Kubernetes `command` and `args`, of Docker Compose `entrypoint` and `command`.
IMAGE, RUN = "image", ("entrypoint", "command", "args")
ENVIRONMENT = "environment"
ENVIRONMENTS = ("env", ENVIRONMENT)
SERVICES, EXTENDS = "services", "extends"  # of Docker Compose
# $(NAME) of Kubernetes; ${NAME}, ${NAME:-default} and $NAME of Docker Compose and of shells.
_VARIABLE = re.compile(r"\$\((\w+)\)|\$\{(\w+)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_DOCUMENTS = re.compile(r"^---.*$", re.MULTILINE)


def container_lines(text: str) -> list[list[str]]:
    """The image and the words of each container in `text`; of a list of words, these. Empty where `text` is no YAML, or
    describes no container."""
    from yaml import YAMLError

    from ifbbench.settings.yaml_text import parse_yaml

    try:
        documents = [parse_yaml(document, as_texts=True) for document in _DOCUMENTS.split(text)]
    except (YAMLError, InputError, RecursionError):
        return []
    found = list[list[str]]()
    for document in documents:
        found += [_texts(document)] if isinstance(document, list) and _texts(document) else _containers(document)
    if not found and (elsewhere := [name for one in documents for name in _extending_files(one)]):
        raise InputError(
            f"extends: {', '.join(elsewhere)} is another file, which is not read here; give what "
            "`docker compose config` prints."
        )
    return found


def _containers(value: Any) -> Iterator[list[str]]:
    """The words of each container at or below `value`."""
    if isinstance(value, list):
        for item in value:
            yield from _containers(item)
    if not isinstance(value, dict):
        return
    if isinstance(services := value.get(SERVICES), dict):  # what stands beside them, as x-name, are templates
        for name in services:
            yield from _containers(_service(services, name))
        return
    words = [word for name in RUN for word in _words(value.get(name))]
    if words:
        known = _environment(value)
        yield [_filled(word, known) for word in (*_words(value.get(IMAGE)), *words)]
    else:
        for item in value.values():
            yield from _containers(item)


def _service(services: Mapping[str, Any], name: str, seen: tuple[str, ...] = ()) -> Any:
    """A service of Docker Compose, on top of the one of the same file that it extends: its own values win, and
    variables are put together."""
    service = services.get(name)
    if not isinstance(service, dict):
        return service
    extended = service.get(EXTENDS)
    base = extended.get("service") if isinstance(extended, dict) and "file" not in extended else extended
    if not isinstance(base, str):
        return service
    if base not in services or base in (*seen, name):
        expected = "a service of this file that does not extend this one"
        raise InputError(f"{SERVICES}.{name}.{EXTENDS} is {shown(base)}; expected {expected}.")
    lower = _service(services, base, (*seen, name))
    if not isinstance(lower, dict):
        return service
    environment = {ENVIRONMENT: {**_environment(lower), **_environment(service)}}
    return {**lower, **service, **environment}


def _extending_files(document: Any) -> Iterator[str]:
    """The files of the services that services extend."""
    services = document.get(SERVICES) if isinstance(document, dict) else None
    for service in services.values() if isinstance(services, dict) else ():
        extended = service.get(EXTENDS) if isinstance(service, dict) else None
        if isinstance(extended, dict) and "file" in extended:
            yield str(extended["file"])


def _words(value: Any) -> list[str]:
    """The words of `command: vllm serve m` or of a list of words; none of another value."""
    if isinstance(value, str):
        try:
            return shlex.split(value.replace("\\\n", " "))
        except ValueError as error:
            raise InputError(f"{value!r} cannot be split into words ({error}); check its quotes.") from error
    return _texts(value)


def _texts(value: Any) -> list[str]:
    """The items of a list of texts; none of another value."""
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return list(value) if is_list else []


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a container, which are a table, or a list of NAME=VALUE or of `name` and `value`. Those whose
    value comes from elsewhere (`valueFrom`, NAME alone) are left out."""
    known = dict[str, str]()
    for listed in (container.get(name) for name in ENVIRONMENTS):
        for item in listed if isinstance(listed, list) else [listed]:
            if isinstance(item, str):
                name, equals, value = item.partition("=")
                known |= {name: value} if equals else {}
            elif isinstance(item, dict) and isinstance(item.get("name"), str):
                known |= {item["name"]: str(item["value"])} if "value" in item else {}
            elif isinstance(item, dict):
                known |= {str(name): str(value) for name, value in item.items()}
    return known


def _filled(word: str, known: Mapping[str, str]) -> str:
    """`word` with the values of its variables; those without one stay as they are."""

    def value(found: re.Match[str]) -> str:
        in_parentheses, in_braces, default, plain = found.groups()
        return known.get(in_parentheses or in_braces or plain, found[0] if default is None else default)

    return _VARIABLE.sub(value, word)
