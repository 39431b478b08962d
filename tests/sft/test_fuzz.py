"""Whatever is in a data file, a registry or a configuration: it is read, or an error names the file, row or key."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict

from megatrain_verl.sft import known_options, option_rules, options, reference_config, search_path
from megatrain_verl.sft.encoding import Report, RowSettings, usable_rows
from megatrain_verl.sft.registry import COLUMNS, KEYS, TAGS, find_datasets
from tests.sft.cases import alpaca_rows, byte_tokenizer

# The same examples each time, few enough for a busy machine.
quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PARSER = OverridesParser.create()
SETTINGS = RowSettings(max_length=200)
TEMPLATE = SETTINGS.template(byte_tokenizer("chatml"))
ALPACA = ("instruction", "input", "output", "system", "tools", "history")
CHAT = ("from", "value", "role", "content", "tool_calls", "conversations", "messages")
WORDS = ("human", "gpt", "system", "observation", "function_call", "user", "assistant", "tool", "name", "arguments")

text = st.one_of(st.text(max_size=8), st.sampled_from([*ALPACA, *CHAT, *WORDS, "\ud800", "\0", "{}", "[]"]))
leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text)
anything = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(text, st.sampled_from([*ALPACA, *CHAT, *WORDS, "function"])), inner, max_size=5),
    ),
    max_leaves=12,
)
message = st.fixed_dictionaries({"from": st.one_of(text, st.sampled_from(WORDS)), "value": st.one_of(text, anything)})


def use(folder: Path) -> int:
    """Read data set "rows" of `folder`; how many rows are usable."""
    (entry,) = find_datasets(["rows"], folder)
    report = Report(entry)
    rows = list(usable_rows(entry, TEMPLATE, SETTINGS, report))
    report.check_some_left()
    return len(rows)


def use_or_name(folder: Path, name: str) -> None:
    try:
        assert use(folder) > 0
    except ValueError as error:
        assert type(error) is ValueError and name in str(error), repr(error)


def register(folder: Path, **entry: Any) -> None:
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json", **entry}}))


GOOD = json.dumps(alpaca_rows(4)).encode()
LINES = b"\n".join(json.dumps(row).encode() for row in alpaca_rows(4))


@quick
@given(good=st.sampled_from([GOOD, LINES]), start=st.integers(0, 300), cut=st.integers(0, 9), new=st.binary(max_size=6))
def test_damaged_json(tmp_path: Path, good: bytes, start: int, cut: int, new: bytes) -> None:
    register(tmp_path)
    (tmp_path / "rows.json").write_bytes(good[:start] + new + good[start + cut :])
    use_or_name(tmp_path, "rows.json")


@quick
@given(suffix=st.sampled_from(["json", "jsonl", "csv", "parquet", "arrow", "txt"]), content=st.binary(max_size=60))
def test_any_bytes(tmp_path: Path, suffix: str, content: bytes) -> None:
    register(tmp_path, file_name=f"rows.{suffix}")
    (tmp_path / f"rows.{suffix}").write_bytes(content)
    use_or_name(tmp_path, f"rows.{suffix}")


@quick
@given(rows=st.lists(st.dictionaries(st.sampled_from(ALPACA), st.one_of(text, anything), min_size=1), max_size=4))
def test_any_alpaca_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    register(tmp_path, columns={"query": "input", "history": "history", "system": "system", "tools": "tools"})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    use_or_name(tmp_path, "rows.json")


@quick
@given(rows=st.lists(st.fixed_dictionaries({"conversations": st.lists(message, max_size=4), "tools": anything})))
def test_any_sharegpt_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    register(tmp_path, formatting="sharegpt", columns={"messages": "conversations", "tools": "tools"})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    use_or_name(tmp_path, "rows.json")


chat_message = st.fixed_dictionaries(
    {"role": st.one_of(text, st.sampled_from(WORDS))},
    optional={"content": anything, "tool_calls": anything, "name": anything},
)


@quick
@given(rows=st.lists(st.fixed_dictionaries({"messages": st.lists(chat_message, max_size=4), "tools": anything})))
def test_any_openai_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    register(tmp_path, formatting="openai", columns={"messages": "messages", "tools": "tools"})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    use_or_name(tmp_path, "rows.json")


@quick
@given(
    entry=st.one_of(
        anything,
        st.dictionaries(st.one_of(st.sampled_from(KEYS), text), st.one_of(st.sampled_from([*COLUMNS]), anything)),
        st.fixed_dictionaries(
            {
                "file_name": st.just("rows.json"),
                "formatting": st.sampled_from([*COLUMNS]),
                "columns": st.dictionaries(st.sampled_from(sum(COLUMNS.values(), ())), text),
                "tags": st.dictionaries(st.sampled_from([*TAGS]), text),
            }
        ),
    )
)
def test_any_registry_entry(tmp_path: Path, entry: Any) -> None:
    if isinstance(entry, dict):
        entry.pop("hf_hub_url", None)  # would be asked for
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    (tmp_path / "rows.json").write_bytes(GOOD)
    try:
        use(tmp_path)
    except ValueError as error:
        assert type(error) is ValueError
        assert "dataset_info.json" in str(error) or str(tmp_path) in str(error), repr(error)


@settings(quick, max_examples=150)  # of a dozen keys
@given(key=st.sampled_from([key for key in KEYS if key != "hf_hub_url"]), value=anything)
def test_any_value_in_a_registry_entry(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json", key: value}}))
    (tmp_path / "rows.json").write_bytes(GOOD)
    use_or_name(tmp_path, str(tmp_path))


@quick
@given(content=st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:rows \n', max_size=40).map(str.encode)))
def test_any_registry(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "dataset_info.json").write_bytes(content)
    with pytest.raises(ValueError, match="dataset_info.json"):
        use(tmp_path)


# ------------------------------------------------------------------------------------------------------ configuration

wrong = st.one_of(st.none(), st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.integers(), max_size=3))
sections = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"name": st.text()}), "dataset": st.fixed_dictionaries({"name": st.text()})},
    optional={
        section: st.fixed_dictionaries({}, optional=dict.fromkeys(keys, wrong))
        for section, keys in reference_config.KEYS.items()
        if section not in ("model", "dataset")
    },
)


@quick
@given(
    content=st.one_of(
        sections.map(lambda given: yaml.safe_dump(given, allow_unicode=True)),
        st.dictionaries(st.sampled_from([*reference_config.KEYS]), wrong).map(yaml.safe_dump),
    )
)
def test_any_configuration(tmp_path: Path, content: str) -> None:
    translate_or_name(tmp_path / "run.yaml", content)


CONFIGURATION = "model: {name: m}\ndataset:\n  name: rows\ntraining:\n  batch_size: 4\n  learning_rate: 1e-5\n"


@quick
@given(start=st.integers(0, 80), cut=st.integers(0, 9), new=st.text(alphabet="{}[]:,-#\n\t&*!%@`'\"\0a1", max_size=5))
def test_damaged_configuration(tmp_path: Path, start: int, cut: int, new: str) -> None:
    translate_or_name(tmp_path / "run.yaml", CONFIGURATION[:start] + new + CONFIGURATION[start + cut :])


def translate_or_name(file: Path, content: str) -> None:
    """Hydra understands the overrides that `content` becomes, or the error names `file`."""
    file.write_text(content, encoding="utf-8", errors="surrogatepass")
    try:
        overrides = reference_config.overrides(file)
    except ValueError as error:
        assert type(error) is ValueError and str(file) in str(error), repr(error)
        return
    parsed = {override.key_or_group: override.value() for override in PARSER.parse_overrides(overrides)}
    assert OmegaConf.create({"path": parsed["model.path"]}).path == yaml.safe_load(content)["model"]["name"]


@pytest.fixture(scope="module")
def defaults() -> DictConfig:
    search_path.register()
    with hydra.initialize_config_module("megatrain_verl.sft.conf", version_base=None):
        return hydra.compose("megatrain_sft", ["model.path=model", "data.dataset=rows"])


value = st.one_of(
    leaf,
    st.sampled_from(["${nothing}", "${data}", "???", "after_each_epoch", "resume_path", "wandb", -1, 1, 10**30]),
    st.lists(leaf, max_size=3),
    st.dictionaries(text, leaf, max_size=2),
)


@quick
@given(option=st.sampled_from([*option_rules.RULES]), value=value)
def test_any_value_of_any_option(defaults: DictConfig, option: str, value: Any) -> None:
    """What follows from the options, up to the data, is a prepared run or an error that names an option."""
    section, key = option.split(".")
    config = copy.deepcopy(defaults)
    config[section][key] = value
    try:
        options.prepare(config, "cpu")
    except ValueError as error:
        assert type(error) is ValueError and re.search(r"(data|trainer|optim|model)\.\w+", str(error)), repr(error)
    else:
        assert option_rules.RULES[option].accepts(OmegaConf.select(config, option)) or section == "data"


@quick
@given(section=st.sampled_from(["data", "trainer", "optim", "engine", "checkpoint", "model", "datas"]), content=value)
def test_any_content_of_a_section(defaults: DictConfig, section: str, content: Any) -> None:
    """As a configuration file of the user's may have it, where Hydra checks nothing."""
    config = copy.deepcopy(defaults)
    with open_dict(config):
        if isinstance(content, dict) and section in config:
            for key, item in content.items():
                with open_dict(config[section]):
                    config[section][key] = item
        else:
            config[section] = content
    try:
        known_options.compare(config, defaults, [])
    except ValueError as error:
        assert type(error) is ValueError and section in str(error), repr(error)
    else:
        assert content == {}


TEXTS = ["It's", "a\\'b\\", "'\\\\'", "${x}", "\\${x}", "{a: 1}", "a=b,c", " ", "true", "5", "\u00fc\n"]


def test_quoted_text_is_read_back_by_hydra() -> None:
    search_path.register()
    overrides = [f"+data.text_{index}={reference_config._quoted(text)}" for index, text in enumerate(TEXTS)]
    with hydra.initialize_config_module("megatrain_verl.sft.conf", version_base=None):
        config = hydra.compose("megatrain_sft", overrides)
    assert [config.data[f"text_{index}"] for index in range(len(TEXTS))] == TEXTS
