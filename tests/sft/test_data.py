"""From files in LLaMA-Factory's formats to rows that verl can batch; what is wrong with a file or row is said."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from omegaconf import OmegaConf

from megatrain_verl.sft.conversations import Conversation, UnusableRow, to_conversation
from megatrain_verl.sft.data_files import read_rows
from megatrain_verl.sft.dataset import ChatDataset
from megatrain_verl.sft.registry import find_datasets
from tests.sft.cases import alpaca_rows, byte_tokenizer, data_config, write_dataset

CHAT = [
    {"from": "human", "value": "Tea?"},
    {"from": "function_call", "value": '{"name": "search", "arguments": {"text": "tea"}}'},
    {"from": "observation", "value": "green"},
    {"from": "gpt", "value": "Green tea."},
]
SHAREGPT = {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}}
OPENAI = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        "role_tag": "role",
        "content_tag": "content",
        "user_tag": "user",
        "assistant_tag": "assistant",
        "system_tag": "system",
    },
}


def conversations(folder: Path, rows: list[dict[str, Any]], **entry: Any) -> list[Conversation]:
    write_dataset(folder, rows, **entry)
    (found,) = find_datasets(["rows"], folder)
    read, columns = read_rows(found)
    return [to_conversation(row, columns, found) for _, row in read]


def dataset(
    config: Any, *, names: tuple[str, ...] = ("rows",), part: str = "all", template: str = "chatml"
) -> ChatDataset:
    files = OmegaConf.create({"names": list(names), "part": part})
    return ChatDataset(files, byte_tokenizer(template), config)


# ------------------------------------------------------------------------------------------------------- formats


def test_alpaca_rows(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": "3", "past": [["Hi", "Hello"]], "rules": "Be brief."},
        {"instruction": "Say a", "input": "", "output": "a", "past": None, "rules": None},
    ]
    columns = {"prompt": "instruction", "query": "input", "response": "output", "history": "past", "system": "rules"}
    first, second = conversations(tmp_path, rows, columns=columns)
    assert [(message["role"], message["content"]) for message in first.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 and 2"),
        ("assistant", "3"),
    ]
    assert [message["content"] for message in second.messages] == ["Say a", "a"]


def test_sharegpt_rows_with_tools(tmp_path: Path) -> None:
    tool = {"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
    rows = [{"conversations": CHAT, "tools": json.dumps([tool])}, {"conversations": CHAT[::3], "tools": "[]"}]
    first, second = conversations(tmp_path, rows, **SHAREGPT)
    assert first.tools == [{"type": "function", "function": tool}] and second.tools == []
    question, call, result, answer = first.messages
    (function,) = call["tool_calls"]
    assert function["function"] == {"name": "search", "arguments": {"text": "tea"}}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "green", function["id"])
    assert (question["content"], answer["content"]) == ("Tea?", "Green tea.")


def test_sharegpt_rows_with_other_tags(tmp_path: Path) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    (chat,) = conversations(tmp_path, [{"messages": messages}], **OPENAI)
    assert chat == Conversation(messages, [])


def test_json_lines_are_read_like_a_json_array(tmp_path: Path) -> None:
    rows = alpaca_rows(3)
    lines = "\n\n".join(json.dumps(row) for row in rows)
    as_array, as_lines = (dataset(write_dataset(tmp_path / kind, given)) for kind, given in (("a", rows), ("l", lines)))
    assert len(as_array) == len(as_lines) == 3
    assert all(torch.equal(as_array[row]["input_ids"], as_lines[row]["input_ids"]) for row in range(3))


def test_tokens_are_mapped_from_a_file_that_nothing_can_leave_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tokens"))
    before = pyarrow.total_allocated_bytes()
    data = dataset(write_dataset(tmp_path, alpaca_rows(200)))
    taken = pyarrow.total_allocated_bytes() - before
    assert data._rows.data.nbytes > 30_000 and taken < 5_000
    assert not list((tmp_path / "tokens").iterdir()) and len(data[len(data) - 1]["input_ids"]) > 30


def test_rows_in_the_shape_that_verl_collates(tmp_path: Path) -> None:
    row = dataset(write_dataset(tmp_path, alpaca_rows(1)))[0]
    assert set(row) == {"input_ids", "position_ids", "loss_mask"}
    assert all(column.dtype == torch.int64 and column.shape == row["input_ids"].shape for column in row.values())
    assert row["position_ids"].tolist() == list(range(len(row["input_ids"])))
    assert byte_tokenizer("chatml").decode(row["input_ids"][row["loss_mask"].bool()]) == "a<|im_end|>"


@pytest.mark.skipif("MEGATRAIN_TEST_DATA" not in os.environ, reason="MEGATRAIN_TEST_DATA names no folder of real data")
@pytest.mark.parametrize(
    ("name", "entry", "rows"),
    [("alpaca_en_demo", {}, 999), ("identity", {}, 91), ("glaive_toolcall_en_demo", SHAREGPT, 300)],
)
def test_real_files_are_used_unchanged(tmp_path: Path, name: str, entry: dict[str, Any], rows: int) -> None:
    text = (Path(os.environ["MEGATRAIN_TEST_DATA"]) / f"{name}.json").read_text(encoding="utf-8")
    config = write_dataset(tmp_path, text, name=name, **entry)
    config.max_length = 1 << 20
    for template in ("chatml", "tools"):
        assert len(dataset(config, names=(name,), template=template)) == rows


# ----------------------------------------------------------------------------------------------- files and registry

GOOD = json.dumps(alpaca_rows(2)[0])
BROKEN_FILES = {
    "empty": ("", "rows.json is empty"),
    "no rows": ("[]", "rows.json has no rows"),
    "blank lines": ("\n\n", "rows.json has no rows"),
    "bad line": (f'{GOOD}\n{{"instruction": }}\n{GOOD}\n', r"rows.json, row 2 \(line 2, column 17\): not JSON"),
    "bad element": (f"[{GOOD},\n{GOOD},\n{{]", r"rows.json, row 3 \(line 3, column 2\): not JSON"),
    "cut off": (f"[{GOOD},\n{GOOD[:-4]}", r"rows.json, row 2 \(line 2, column \d+\): not JSON"),
    "not an object": (f"{GOOD}\n5\n", "rows.json, row 2 .line 2.: a row must be a JSON object, got 5"),
    "no such column": ('[{"question": "a", "output": "b"}]', "columns.prompt is 'instruction', but .*question, output"),
}
BROKEN_ENTRIES = {
    "key": ({"colums": {}}, "'colums' is not a key of .*did you mean columns"),
    "format": ({"formatting": "sharegtp"}, "'sharegtp' is not a formatting of .*did you mean sharegpt"),
    "column": ({"columns": {"promt": "a"}}, "'promt' is not a column of alpaca data .*did you mean prompt"),
    "tag": ({"formatting": "sharegpt", "tags": {"rol_tag": "a"}}, "'rol_tag' is not a tag .*did you mean role_tag"),
    "mapping": ({"columns": ["prompt"]}, "columns must map names to names"),
    "file": ({"file_name": "absent.json"}, "absent.json does not exist"),
    "nowhere": ({"file_name": None}, "has no file_name or hf_hub_url"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_broken_file_is_named_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        dataset(write_dataset(tmp_path, text))


def test_file_that_is_not_utf8_is_named_with_the_line(tmp_path: Path) -> None:
    config = write_dataset(tmp_path, [])
    (tmp_path / "rows.json").write_bytes(f"{GOOD}\n".encode() + GOOD.encode().replace(b"Say", b"\xff\xfe"))
    with pytest.raises(ValueError, match="rows.json, line 2: not UTF-8"):
        dataset(config)


@pytest.mark.parametrize(("entry", "message"), BROKEN_ENTRIES.values(), ids=BROKEN_ENTRIES.keys())
def test_registry_entry_that_is_wrong_is_named(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"dataset_info.json.*{message}|{message}"):
        dataset(write_dataset(tmp_path, alpaca_rows(2), **entry))


def test_registry_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.dataset_dir=.* has no dataset_info.json"):
        dataset(data_config(tmp_path))
    config = write_dataset(tmp_path, alpaca_rows(2))
    with pytest.raises(ValueError, match="'row' is not a data set in .*dataset_info.json; did you mean rows"):
        dataset(config, names=("row",))
    (tmp_path / "dataset_info.json").write_text('{"rows": }')
    with pytest.raises(ValueError, match="dataset_info.json is not JSON: .*line 1 column 10"):
        dataset(config)


# ---------------------------------------------------------------------------------------------------- unusable rows

UNUSABLE = {
    "empty answer": ({"instruction": "a", "output": " "}, {}, "column 'output' is empty"),
    "no answer": ({"instruction": "a", "output": None}, {}, "column 'output' is empty"),
    "number": ({"instruction": "a", "output": 5}, {}, "column 'output' is not text"),
    "no messages": ({"conversations": [], "tools": ""}, SHAREGPT, "'conversations' is not a list of messages"),
    "only a question": ({"conversations": CHAT[:1], "tools": ""}, SHAREGPT, "the last turn is not an assistant turn"),
    "answer first": ({"conversations": CHAT[3:], "tools": ""}, SHAREGPT, "the first turn is an assistant turn"),
    "role": ({"conversations": [{"from": "me", "value": "a"}], "tools": ""}, SHAREGPT, "from 'me', which no tag names"),
    "tag": (
        {"conversations": [{"by": "gpt", "value": "a"}], "tools": ""},
        SHAREGPT,
        r"without 'from' \(tags.role_tag\)",
    ),
    "call": (
        {"conversations": [CHAT[0], {"from": "function_call", "value": "search"}, CHAT[3]], "tools": ""},
        SHAREGPT,
        "function call that is not JSON",
    ),
    "tools": ({"conversations": CHAT, "tools": "search"}, SHAREGPT, "column 'tools' is not a JSON list of tools"),
    "silence": (
        {"conversations": [CHAT[0], {"from": "gpt", "value": ""}], "tools": ""},
        SHAREGPT,
        "an assistant turn without text",
    ),
}


@pytest.mark.parametrize(("row", "entry", "reason"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_unusable_row_has_a_reason(tmp_path: Path, row: dict[str, Any], entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        conversations(tmp_path, [row], **entry)
    with pytest.raises(
        ValueError, match=rf"rows.json has no usable row of 1: 1 dropped: .*{reason}.* \(first: row 1\)"
    ):
        dataset(data_config(tmp_path))


def test_dropped_rows_are_counted_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = alpaca_rows(10)
    rows[2]["output"] = rows[6]["output"] = ""
    rows[4]["output"] = "long " * 100
    assert len(dataset(write_dataset(tmp_path, rows))) == 7
    printed = capsys.readouterr().out
    assert "data set rows: 7 of 10 rows" in printed
    assert "2 dropped: column 'output' is empty (first: row 3)" in printed
    assert "1 dropped: longer than data.max_length=256 tokens (first: row 5)" in printed


def test_long_rows_may_be_cut_or_refused(tmp_path: Path) -> None:
    rows = alpaca_rows(3)
    rows[1]["output"] = "long " * 100
    rows[2]["instruction"] = "long " * 100
    config = write_dataset(tmp_path, rows)
    config.truncation = "right"
    cut = dataset(config)
    assert len(cut) == 2 and len(cut[1]["input_ids"]) == 256 and cut[1]["loss_mask"][-1] == 1
    config.truncation = "error"
    with pytest.raises(ValueError, match=r"rows.json, row 2: 5\d\d tokens are more than data.max_length=256"):
        dataset(config)
    config.truncation = "left"
    with pytest.raises(ValueError, match="data.truncation must be one of drop, error, right"):
        dataset(config)


# ------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize(("val_size", "held_out"), [(3, 4), (0.05, 2), (0.5, 6)])
def test_held_out_rows_are_the_others(tmp_path: Path, val_size: float, held_out: int) -> None:
    config = write_dataset(tmp_path, alpaca_rows(11))
    config.val_size = val_size
    parts = {part: dataset(config, part=part) for part in ("all", "train", "held_out")}
    rows = {part: [tuple(data[row]["input_ids"].tolist()) for row in range(len(data))] for part, data in parts.items()}
    assert len(rows["held_out"]) == held_out
    assert sorted(rows["train"] + rows["held_out"]) == sorted(rows["all"]) and len(set(rows["all"])) == 11


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    config = write_dataset(tmp_path, alpaca_rows(4))
    config.val_size = 3
    with pytest.raises(ValueError, match="data.val_size=3 of 4 usable rows holds out 4, a multiple of"):
        dataset(config, part="train")


def test_several_datasets_follow_each_other(tmp_path: Path) -> None:
    write_dataset(tmp_path, alpaca_rows(3))
    config = write_dataset(tmp_path, [{"conversations": CHAT, "tools": ""}], name="chats", **SHAREGPT)
    assert len(dataset(config, names=("rows", "chats"))) == 4
