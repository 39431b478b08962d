"""Where rows come from: JSON of any size and shape, Parquet, CSV, folders, saved data sets, a hub; OpenAI's format."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from megatrain_verl.sft import data_files, json_files
from megatrain_verl.sft.conversations import to_conversation
from megatrain_verl.sft.registry import find_datasets
from tests.sft.cases import alpaca_rows

ROWS = alpaca_rows(5)


def read(folder: Path, **entry: Any) -> list[dict[str, Any]]:
    return [row for _, row in places_and_rows(folder, **entry)]


def places_and_rows(folder: Path, **entry: Any) -> list[tuple[str, dict[str, Any]]]:
    (folder / "dataset_info.json").write_text(json.dumps({"rows": entry}))
    (found,) = find_datasets(["rows"], folder)
    return list(data_files.read_rows(found)[0])


def test_parquet(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    assert read(tmp_path, file_name="rows.parquet") == ROWS


def test_csv_cells_are_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('instruction,output\n"a, b",007\nc,None\nd,\n')
    assert [row["output"] for row in read(tmp_path, file_name="rows.csv")] == ["007", "None", ""]


def test_folder_of_files_is_read_in_order_and_each_is_named(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for part in (1, 0):
        (tmp_path / "parts" / f"{part}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[part * 2 :][:2]))
    found = places_and_rows(tmp_path, file_name="parts")
    assert [row for _, row in found] == ROWS[:4]
    assert [place for place, _ in found] == [
        "0.jsonl, row 1",
        "0.jsonl, row 2",
        "1.jsonl, row 1",
        "1.jsonl, row 2",
    ]
    (tmp_path / "parts" / "notes.csv").write_text("a\n")
    with pytest.raises(ValueError, match="parts has files of several types: csv, json"):
        read(tmp_path, file_name="parts")


def test_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    splits = {"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:])}
    splits["train"].save_to_disk(tmp_path / "plain")
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    assert read(tmp_path, file_name="plain") == ROWS[:2]
    assert read(tmp_path, file_name="both", split="test") == ROWS[2:]
    with pytest.raises(ValueError, match="both has no split 'validation'; it has train, test"):
        read(tmp_path, file_name="both", split="validation")


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.arrow", "rows.csv", "rows.txt"):
        (tmp_path / name).write_bytes(b"\x00\xff not a table")
        with pytest.raises(ValueError, match=name):
            read(tmp_path, file_name=name)


def test_hub_dataset_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ValueError, match="hub data set someone/rows cannot be loaded .*name its files by file_name"):
        read(tmp_path, hf_hub_url="someone/rows", file_name="absent.json", subset="main")


def test_description_in_place_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"q": "a", "a": "b"}]))
    entry = {"file_name": str(tmp_path / "rows.json"), "columns": {"prompt": "q", "response": "a"}}
    (found,) = find_datasets([entry], tmp_path / "absent")
    assert [row for _, row in data_files.read_rows(found)[0]] == [{"q": "a", "a": "b"}]
    with pytest.raises(ValueError, match="'file' is not a key of data.dataset; did you mean"):
        find_datasets([{"file": "rows.json"}], tmp_path)


# ------------------------------------------------------------------------------------------------------------- JSON


def test_array_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.json"
    file.write_text("\ufeff" + json.dumps(ROWS, indent=1, ensure_ascii=False).replace("Say", "Säy"), encoding="utf-8")
    whole = list(json_files.read_json(file))
    assert len(whole) == 5 and whole[1]["instruction"] == "Säy b"
    for chunk in (1, 2, 7, 64):  # a character, a key and a number are all cut somewhere
        monkeypatch.setattr(json_files, "CHUNK", chunk)
        assert list(json_files.read_json(file)) == whole


def test_memory_holds_one_row_of_an_array_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"text": "x" * 1000}] * 200))
    monkeypatch.setattr(json_files, "CHUNK", 100)
    with file.open("rb") as opened:
        window = json_files._Window(opened)
        window.take("[")
        for _ in range(199):
            window.skip_space()
            window.value()
            window.skip_space()
            window.take(",")
            assert len(window._text) < 4000


@pytest.mark.parametrize("chunk", [3, 1 << 20])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"a": 2}\n {"a": 3}]', r"row 3 \(line 3, column 2\): not JSON: expected , or \]"),
        ('[{"a": 1},\n {"a": }]', r"row 2 \(line 2, column 8\): not JSON: Expecting value"),
        ('[{"a": 1}', r"row 2 \(line 1, column 10\): not JSON: expected , or \]"),
        ('[{"a": 1}] x', r"row 2 \(line 1, column 12\): not JSON: text after the end"),
        ("[" * 100_000, "row 1 .*nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "row 1 .*not JSON"),
    ],
)
def test_broken_json_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, text: str, message: str
) -> None:
    monkeypatch.setattr(json_files, "CHUNK", chunk)
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=f"rows.json, {message}"):
        list(json_files.read_json(tmp_path / "rows.json"))


def test_bad_byte_in_an_array_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_bytes(b'[{"a": "b"},\n\n{"a": "\xff"}]')
    with pytest.raises(ValueError, match="rows.json, line 3: not UTF-8"):
        list(json_files.read_json(tmp_path / "rows.json"))


def test_late_row_may_have_keys_that_no_row_before_had(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "x" * 900}, {"role": "assistant", "content": "b"}]}
    late = {"messages": [*plain["messages"][:1], {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in [plain] * 12_000 + [late])  # 11 MB
    assert read(tmp_path, file_name="rows.jsonl", formatting="openai")[-1] == late


# ---------------------------------------------------------------------------------------------------- OpenAI's format

CALL = {"id": "abc", "type": "function", "function": {"name": "search", "arguments": '{"text": "tea"}'}}


def test_openai_messages_with_tool_calls(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
    messages = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "green"},
        {"role": "tool", "content": "black"},
        {"role": "assistant", "content": "Green or black.", "tool_calls": None},
    ]
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": messages, "tools": [tool]}]))
    (tmp_path / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json", "formatting": "openai"}}')
    (entry,) = find_datasets(["rows"], tmp_path)
    rows, columns = data_files.read_rows(entry)
    chat = to_conversation(next(rows)[1], columns, entry)
    question, called, green, black, answer = chat.messages
    assert chat.tools == [tool] and question == messages[0]
    assert answer == {"role": "assistant", "content": "Green or black."}
    assert called["content"] == "Let me see."
    assert [call["function"] for call in called["tool_calls"]] == [{"name": "search", "arguments": {"text": "tea"}}] * 2
    assert [green["content"], black["content"]] == ["green", "black"]
    assert [green["tool_call_id"], black["tool_call_id"]] == [call["id"] for call in called["tool_calls"]]
