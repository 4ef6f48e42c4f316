"""One operator's configuration in layers: defaults < file < environment < flags.

A program describes its settings as a frozen msgspec struct with defaults; nested structs are sections
(`store.quota_bytes`). A key is spelled `[store] quota_bytes` in the file, `INTELLECT_STORE__QUOTA_BYTES`
in the environment and `--store-quota-bytes` as a flag. In an environment that several roles share,
`INTELLECT_<ROLE>_<KEY>` is read by that role alone and wins over `INTELLECT_<KEY>`.

A key nobody knows is an error in every layer: a setting that is silently ignored is worse than a
program that does not start. Nothing here reads `os.environ`; the caller passes it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from .errors import ConfigError

ROLES = ("node", "coordinator", "validator", "trainer", "seeder", "devnet")
ENVIRONMENT_PREFIX = "INTELLECT_"
# Read by the programs themselves, not settings of one role.
_NOT_SETTINGS = frozenset({"INTELLECT_PASSWORD_FILE", "INTELLECT_DEBUG"})
_MAX_FILE_BYTES = 256 * 1024
_HEADER = re.compile(r"^\s*\[+\s*([^\[\]]+?)\s*\]+")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-.\"']+)\s*=")

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True)
class Settings(Generic[T]):
    """Values, and for each dotted key where its value came from ("default", a file and line, ...)."""

    value: T
    origins: dict[str, str]

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """(key, value as TOML would show it, origin), in the struct's order."""
        for key, value in _flatten(self.value):
            yield key, _shown(value), self.origins[key]


@dataclass(frozen=True)
class _Leaf:
    type: Any
    field: msgspec.structs.FieldInfo

    def default(self, key: str) -> Any:
        if self.field.default is not msgspec.NODEFAULT:
            return self.field.default
        if self.field.default_factory is not msgspec.NODEFAULT:
            return self.field.default_factory()
        raise ConfigError(f"{key} is not set")


def load_settings(
    shape: type[T],
    *,
    role: str,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings[T]:
    """Merge the layers into `shape`.

    Args:
        role: one of `ROLES`.
        file: TOML; must exist if given. Relative paths in it are relative to its folder.
        flags: dotted key -> value as the command line parsed it; None means not given.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a value of the wrong type or out of range;
            the text names file and line, variable, or flag.
    """
    leaves = dict(_leaves(shape))
    found: dict[str, tuple[Any, str]] = {}
    if file is not None:
        found.update(_from_file(file, leaves))
    found.update(_from_environment(environ or {}, role, leaves))
    for key, value in (flags or {}).items():
        if key not in leaves:
            raise ConfigError(f"{key} is not a setting of the {role}{_similar(key, leaves)}")
        if value is not None:
            flag = "--" + key.replace(".", "-").replace("_", "-")
            found[key] = (_converted(value, leaves[key].type, flag, None), flag)
    values, origins = {}, {}
    for key, leaf in leaves.items():
        values[key], origins[key] = found[key] if key in found else (leaf.default(key), "default")
    return Settings(_build(shape, values), origins)


def _leaves(shape: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, _Leaf]]:
    for field in msgspec.structs.fields(shape):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _leaves(field.type, f"{key}.")
        else:
            yield key, _Leaf(field.type, field)


def _build(shape: type[T], values: dict[str, Any], prefix: str = "") -> T:
    arguments = {}
    for field in msgspec.structs.fields(shape):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            arguments[field.name] = _build(field.type, values, f"{key}.")
        else:
            arguments[field.name] = values[key]
    return shape(**arguments)


def _flatten(value: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in value.__struct_fields__:
        item = getattr(value, name)
        if isinstance(item, msgspec.Struct):
            yield from _flatten(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    if isinstance(value, Path):
        value = str(value)
    return msgspec.json.encode(value).decode()  # of plain values and lists of them, JSON is TOML


def _from_file(path: Path, leaves: Mapping[str, _Leaf]) -> dict[str, tuple[Any, str]]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
    try:
        text = content.decode()
        plain = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    found = {}
    for key, value in _walk(plain, leaves, path, text):
        origin = _place(path, text, key)
        found[key] = (_converted(value, leaves[key].type, f"{origin}: {key}", path.parent), origin)
    return found


def _walk(
    table: Mapping[str, Any], leaves: Mapping[str, _Leaf], path: Path, text: str, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        is_section = any(leaf.startswith(f"{key}.") for leaf in leaves)
        if key in leaves:
            yield key, value
        elif is_section and isinstance(value, dict):
            yield from _walk(value, leaves, path, text, f"{key}.")
        elif is_section:
            raise ConfigError(f"{_place(path, text, key)}: {key} is a section, not a value")
        else:
            raise ConfigError(f"{_place(path, text, key)}: unknown key {key!r}{_similar(key, leaves)}")


def _place(path: Path, text: str, key: str) -> str:
    """`path:line` of a dotted key; only `path` where the file spells the key in an unusual way."""
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        header, assignment = _HEADER.match(line), _KEY.match(line)
        if header:
            section = header[1].replace('"', "").replace(" ", "") + "."
            if section == f"{key}.":
                return f"{path}:{number}"
        elif assignment and section + assignment[1].replace('"', "").replace("'", "") == key:
            return f"{path}:{number}"
    parent = key.rpartition(".")[0]
    return _place(path, text, parent) if parent else str(path)


def _from_environment(
    environ: Mapping[str, str], role: str, leaves: Mapping[str, _Leaf]
) -> dict[str, tuple[Any, str]]:
    by_name = {key.replace(".", "__").upper(): key for key in leaves}
    own, others = f"{role.upper()}_", tuple(f"{name.upper()}_" for name in ROLES if name != role)
    found: dict[str, tuple[Any, str]] = {}
    # Sorted so that the role's own variables, handled second, win.
    for variable in sorted(environ, key=lambda name: name.startswith(ENVIRONMENT_PREFIX + own)):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable:
            continue
        key = by_name.get(name) or by_name.get(name.removeprefix(own))
        if key is None:
            if name.startswith(others) or variable in _NOT_SETTINGS:
                continue
            raise ConfigError(f"environment variable {variable}: unknown key{_similar(name.lower(), leaves)}")
        found[key] = (_from_text(environ[variable], leaves[key].type, variable), variable)
    return found


def _from_text(text: str, kind: Any, origin: str) -> Any:
    """A value from an environment variable; lists are separated by commas."""
    if getattr(kind, "__origin__", kind) is list:
        return _converted([item.strip() for item in text.split(",") if item.strip()], kind, origin, None)
    return _converted(text, kind, origin, None, strict=False)


def _converted(value: Any, kind: Any, origin: str, folder: Path | None, *, strict: bool = True) -> Any:
    def hook(target: type, plain: Any) -> Any:
        if target is Path and isinstance(plain, (str, Path)):
            path = Path(plain).expanduser()
            return path if folder is None else folder / path
        raise ValueError(f"expected {target.__name__}")

    try:
        return msgspec.convert(value, kind, strict=strict, dec_hook=hook)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{origin}: {error}") from error


def _similar(key: str, leaves: Mapping[str, _Leaf]) -> str:
    close = difflib.get_close_matches(key, leaves, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
