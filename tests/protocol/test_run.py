"""The run configuration and its id."""

from pathlib import Path

import msgspec
import pytest
from example_run import COORDINATOR, PUBLISHER, example_run
from hypothesis import given
from hypothesis import strategies as st

from intellect_protocol.errors import ConfigError
from intellect_protocol.run import RunConfig, load_run_config, parse_run_config, run_id


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = example_run()
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml())
    assert load_run_config(path) == config
    assert load_run_config(path).run_id == config.run_id


def test_the_run_id_covers_the_terms_and_only_them() -> None:
    config = example_run()
    other_terms = msgspec.structs.replace(config.terms, name="another")
    assert run_id(other_terms) != config.run_id
    other_revision = msgspec.structs.replace(config.revision, head_poll_s=9.0)
    assert msgspec.structs.replace(config, revision=other_revision).run_id == config.run_id


def test_only_the_coordinator_can_revise() -> None:
    config = example_run()
    revised = msgspec.structs.replace(
        config, revision=msgspec.structs.replace(config.revision, bootstrap=["/ip4/10.0.0.1/tcp/1"])
    )
    for forged in (revised, revised.signed(PUBLISHER), msgspec.structs.replace(revised, signature="zz")):
        with pytest.raises(ConfigError, match="not signed"):
            parse_run_config(forged.to_toml().encode())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "example"', 'name = "example"\nsurprise = 1'),
        ("temperature = 1.0", "temperature = 0.0"),
        ("samples_per_prompt = 8", "samples_per_prompt = 1"),
        ("stop_ids = [\n    1,\n]", "stop_ids = [100]"),
        ('dtype = "float32"', 'dtype = "int8"'),
        ("weight = 2", "weight = 0"),
        ("protocol = 1", 'protocol = "one"'),
    ],
)
def test_a_wrong_value_is_named(old: str, new: str) -> None:
    text = example_run().to_toml()
    assert old in text
    with pytest.raises(ConfigError) as caught:
        parse_run_config(text.replace(old, new).encode(), source="run.toml")
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_configuration_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_run_config(data)


def test_a_missing_or_huge_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        load_run_config(tmp_path / "nothing.toml")
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * 300_000)
    with pytest.raises(ConfigError, match="larger"):
        load_run_config(huge)


def test_whole_numbers_in_float_fields_survive_the_file() -> None:
    config = example_run()
    revision = msgspec.structs.replace(config.revision, head_poll_s=5)
    terms = msgspec.structs.replace(
        config.terms, sampling=msgspec.structs.replace(config.terms.sampling, temperature=1)
    )
    written = RunConfig(terms, revision).signed(COORDINATOR)
    read = parse_run_config(written.to_toml().encode())
    assert read.run_id == written.run_id == config.run_id
