"""Layers of settings: who wins, where a value came from, and that nothing unknown is ignored."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol.errors import ConfigError
from intellect_protocol.settings import load_settings


class Store(msgspec.Struct, frozen=True):
    quota_bytes: Annotated[int, msgspec.Meta(ge=1)] = 100


class Example(msgspec.Struct, frozen=True, kw_only=True):
    device: str = "auto"
    engine: Literal["torch", "vllm"] = "torch"
    wait_s: float = 1.5
    fast: bool = False
    folder: Path | None = None
    listen: list[str] = msgspec.field(default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"])
    store: Store = Store()


def load(tmp_path: Path, text: str | None = None, environ=None, flags=None):
    file = None
    if text is not None:
        file = tmp_path / "node.toml"
        file.write_text(text)
    return load_settings(Example, role="node", file=file, environ=environ or {}, flags=flags or {})


def test_flags_beat_the_environment_beats_the_file_beats_defaults(tmp_path: Path) -> None:
    text = '# mine\ndevice = "file"\nwait_s = 2.0\nengine = "vllm"\n\n[store]\nquota_bytes = 7\n'
    found = load(
        tmp_path,
        text,
        {"INTELLECT_DEVICE": "environment", "INTELLECT_WAIT_S": "3"},
        {"device": "flag", "engine": None},
    )
    value = found.value
    assert (value.device, value.wait_s, value.engine, value.store.quota_bytes) == ("flag", 3.0, "vllm", 7)
    assert value.fast is False
    file = tmp_path / "node.toml"
    assert found.origins == {
        "device": "--device",
        "engine": f"{file}:4",
        "wait_s": "INTELLECT_WAIT_S",
        "fast": "default",
        "folder": "default",
        "listen": "default",
        "store.quota_bytes": f"{file}:7",
    }
    assert ("store.quota_bytes", "7", f"{file}:7") in list(found.lines())


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('device = "cpu"\ndevcie = "cpu"\n', 2, "unknown key 'devcie' (did you mean device?)"),
        ("[store]\nquota = 3\n", 2, "unknown key 'store.quota'"),
        ("\n[stor]\nquota_bytes = 3\n", 2, "unknown key 'stor'"),
        ("wait_s = 1.0\n\nengine = 'cuda'\n", 3, "engine"),
        ("[store]\n\nquota_bytes = 0\n", 3, ">= 1"),
        ("store = 3\n", 1, "is a section"),
        ("store.quota = 3\n", 1, "unknown key"),
        ('fast = "yes"\n', 1, "bool"),
    ],
)
def test_a_wrong_file_is_an_error_with_file_and_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert f"node.toml:{line}: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["device = ", "= 3", "a = 1\na = 2", "\x00", "[[store]]\nquota_bytes = 1"])
def test_a_file_that_is_not_settings_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.toml"):
        load(tmp_path, text)


@given(st.binary(max_size=200))
def test_no_bytes_in_the_file_raise_anything_but_a_config_error(tmp_path_factory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.toml"
    file.write_bytes(content)
    try:
        load_settings(Example, role="node", file=file)
    except ConfigError as error:
        assert "fuzz.toml" in str(error)  # noqa: PT017 - whether it raises depends on the bytes


def test_a_missing_or_huge_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(Example, role="node", file=tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="larger than"):
        load(tmp_path, "#" * 300_000)


def test_a_variable_nobody_knows_is_an_error_unless_it_is_another_roles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"INTELLECT_DEVCIE: unknown key \(did you mean device\?\)"):
        load(tmp_path, environ={"INTELLECT_DEVCIE": "cpu"})
    with pytest.raises(ConfigError, match="INTELLECT_NODE_BATCH"):
        load(tmp_path, environ={"INTELLECT_NODE_BATCH": "1"})
    others = {"INTELLECT_TRAINER_STEPS": "1", "INTELLECT_PASSWORD_FILE": "x", "PATH": "/bin"}
    assert load(tmp_path, environ=others).value == Example()


def test_a_variable_of_the_role_beats_one_for_all_roles(tmp_path: Path) -> None:
    environ = {"INTELLECT_NODE_DEVICE": "mine", "INTELLECT_DEVICE": "everybody's"}
    for order in (environ, dict(reversed(environ.items()))):
        assert load(tmp_path, environ=order).value.device == "mine"


def test_variables_become_numbers_lists_sections_and_paths(tmp_path: Path) -> None:
    environ = {
        "INTELLECT_LISTEN": "/ip4/1.2.3.4/tcp/1, /ip4/1.2.3.4/tcp/2",
        "INTELLECT_STORE__QUOTA_BYTES": "12",
        "INTELLECT_FAST": "true",
        "INTELLECT_FOLDER": "~/x",
    }
    value = load(tmp_path, environ=environ).value
    assert value.listen == ["/ip4/1.2.3.4/tcp/1", "/ip4/1.2.3.4/tcp/2"]
    assert (value.store.quota_bytes, value.fast, value.folder) == (12, True, Path.home() / "x")
    with pytest.raises(ConfigError, match="INTELLECT_WAIT_S"):
        load(tmp_path, environ={"INTELLECT_WAIT_S": "soon"})


def test_relative_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    assert load(tmp_path, 'folder = "data"').value.folder == tmp_path / "data"
    assert load(tmp_path, 'folder = "/abs"').value.folder == Path("/abs")
