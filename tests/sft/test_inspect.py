"""`python -m megatrain_verl.sft.inspect`: what a user sees of a data set."""

import io
import json
from pathlib import Path

import pytest

from megatrain_verl.sft import inspect
from megatrain_verl.sft.chat_template import Encoded
from tests.sft.cases import alpaca_rows, byte_tokenizer, data_config, write_dataset


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(folder: Path, output: io.StringIO, rows: int = 1) -> str:
    inspect.show("rows", byte_tokenizer("chatml"), data_config(folder), rows, output)
    return output.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = alpaca_rows(5)
    rows[3]["output"] = ""
    write_dataset(tmp_path, rows)
    return tmp_path


def test_rows_reasons_and_lengths(folder: Path) -> None:
    assert shown(folder, io.StringIO()) == (
        "--- usable row 1: 27 tokens, 2 trained\n"
        "<|im_start|>user\nSay a<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n\n"
        "---\n"
        "data set rows: 4 of 5 rows, 127 tokens, 15 of them trained\n"
        "  1 dropped: column 'output' is empty (first: row 4)\n"
        "tokens per row, percentiles: 0%: 27, 5%: 27, 50%: 33, 95%: 35, 100%: 35\n"
        "trained tokens per row, percentiles: 0%: 2, 5%: 2, 50%: 4, 95%: 6, 100%: 6\n"
    )


def test_colours_on_a_terminal_unless_no_color_is_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[2m<|im_start|>user" in shown(folder, Terminal())
    assert "\033[32ma<|im_end|>\033[0m" in shown(folder, Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown(folder, Terminal()) and "⟦a<|im_end|>⟧" in shown(folder, Terminal())


def test_data_cannot_steer_the_terminal() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokens = tokenizer("a\033[31mb\n\tc\r", add_special_tokens=False)["input_ids"]
    assert inspect.marked(Encoded(tokens, [0] * len(tokens)), tokenizer, colour=False) == "a\\x1b[31mb\n\tc\\x0d"


def test_command_takes_the_options_of_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer("chatml").save_pretrained(folder / "model")
    model = ["--model", str(folder / "model"), "--rows", "0"]
    inspect.main(["rows", *model, f"data.dataset_dir={folder}", "data.max_length=30", "data.system_prompt=null"])
    printed = capsys.readouterr().out
    assert "data set rows: 1 of 5 rows" in printed
    assert "3 dropped: longer than data.max_length=30 tokens (first: row 2)" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["row"], "error: 'row' is not a data set in .*dataset_info.json; did you mean rows"),
        (["rows", "data.max_lenght=5"], "error: Could not override 'data.max_lenght'"),
        (["rows", "model.tokenizer_path=empty"], "error: no tokenizer in empty: "),
    ],
)
def test_mistakes_end_with_one_line(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    byte_tokenizer("chatml").save_pretrained(folder / "model")
    with pytest.raises(SystemExit, match=f"(?s){message}"):
        inspect.main([*arguments, "--model", str(folder / "model"), f"data.dataset_dir={folder}"])


def test_all_tokens_may_be_trained_and_rows_without_system_message_get_one(folder: Path) -> None:
    rows = [
        {"conversations": [{"from": "system", "value": "Own."}, *chat], "tools": "[]"}
        for chat in [[{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]]
    ]
    (folder / "rows.json").write_text(json.dumps(rows + [{"conversations": rows[0]["conversations"][1:]}]))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json", "formatting": "sharegpt"}}')
    output, config = io.StringIO(), data_config(folder, system_prompt="Given.", train_on_prompt=True)
    inspect.show("rows", byte_tokenizer("chatml"), config, 2, output)
    chat = "\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>⟧\n"
    # The first token is never trained: nothing precedes it.
    assert f"<|im_start|>⟦system\nOwn.<|im_end|>{chat}" in output.getvalue()
    assert f"<|im_start|>⟦system\nGiven.<|im_end|>{chat}" in output.getvalue()
