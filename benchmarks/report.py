"""From measured seconds and bytes to the figures of a row, and the table of all rows."""

from ceilings import Bound, Ceilings
from workload import Workload

from megatrain_verl.model_sizes import ModelSizes

GIB = 1 << 30
# Heading, field of the row, factor, decimals.
COLUMNS = (
    ("step s", "step_s", 1, 3),
    ("forward", "forward_s", 1, 3),
    ("backward", "backward_s", 1, 3),
    ("AdamW not hidden", "adamw_not_hidden_s", 1, 3),
    ("tokens/s", "tokens_per_s", 1, 0),
    ("TFLOP/s", "tflops", 1, 1),
    ("no embedding", "tflops_without_embedding", 1, 1),
    ("active", "tflops_active", 1, 1),
    ("GPU GiB", "gpu_peak_bytes", 1 / GIB, 1),
    ("host B/param", "host_bytes_per_parameter", 1, 1),
    ("H2D GB", "h2d_bytes", 1e-9, 1),
    ("D2H GB", "d2h_bytes", 1e-9, 1),
    ("bound s", "bound_s", 1, 3),
    ("x bound", "ratio_to_bound", 1, 2),
    ("loss", "loss", 1, 4),
    ("rows/micro-batch", "micro_batch", 1, 0),
)


def finish(fields: dict[str, object], workload: Workload, sizes: ModelSizes, ceilings: Ceilings) -> dict[str, object]:
    """The row of a system from its measured `fields`: TFLOP/s = 6 x parameters x tokens / step time.

    The bound is that of this project's order, for every system, with AdamW hidden behind the forward pass;
    `bound_adamw_hidden_s` has it hidden altogether.
    """
    row = dict(fields)
    seconds, tokens = row["step_s"], workload.tokens
    config = workload.config.get_text_config()
    embedding = config.vocab_size * config.hidden_size

    def tflops(parameters: int) -> float:
        return 6 * parameters * tokens / seconds / 1e12

    row["tokens_per_s"] = tokens / seconds
    row["tflops"] = tflops(sizes.num_parameters)
    row["tflops_without_embedding"] = tflops(sizes.num_parameters - embedding)
    if sizes.active_parameters != sizes.num_parameters:
        row["tflops_active"] = tflops(sizes.active_parameters)
    row["host_bytes_per_parameter"] = row["host_bytes"] / sizes.num_parameters
    if ceilings.h2d is not None:
        bound = Bound.of(sizes, tokens, ceilings, row.get("adamw_backend", "native"))
        row["bound_s"], row["bound_adamw_hidden_s"] = bound.adamw_behind_forward, bound.adamw_hidden
        row["ratio_to_bound"] = seconds / row["bound_s"]
    return row


def table(rows: list[dict[str, object]]) -> str:
    """Aligned columns, one line per system; a system that failed has its error instead."""
    columns = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    measured = [row for row in rows if "error" not in row]
    lines = [["system", *(heading for heading, *_ in columns)]]
    lines += [[row["system"], *(_cell(row, *column[1:]) for column in columns)] for row in measured]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text += [f"{row['system']}: {row['settings']}" for row in measured]
    text += [f"{row['system']} failed: {row['error']}" for row in rows if "error" in row]
    return "\n".join(text)


def _cell(row: dict[str, object], field: str, factor: float, decimals: int) -> str:
    return f"{row[field] * factor:,.{decimals}f}" if field in row else "-"
