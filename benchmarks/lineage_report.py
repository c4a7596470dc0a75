"""What the records of `benchmarks.lineage` say together: the table, the claims, the pictures."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lineage_models import FIXED_VECTOR, RECURRENT_WITH_ATTENTION

Record = dict[str, Any]


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean, and behind it the least and the most where there are several."""
    mean = f"{statistics.mean(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g} to {max(values):.3g})"


def errors_of(records: Sequence[Record], task: str) -> dict[str, dict[str, list[float]]]:
    """Token error rates by model and range of lengths, one for each seed."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["record"] == "errors" and record["task"] == task:
            for group, rates in record["errors"].items():
                errors[record["model"]][group].append(rates["ter"])
    return errors


def claims(records: Sequence[Record]) -> Iterator[Record]:
    """Of reversal: how much worse the fixed vector is on long sources, and how much of that attention takes away.

    `ratio` is the fixed vector's token error rate for the longest range over that for the shortest, and `share_closed`
    (long error of the fixed vector - that with attention) / (long error - short error of the fixed vector). Of the
    fixed vectors the one that is best on long sources counts, of those with attention likewise.
    """
    errors = errors_of(records, "reversal")
    fixed = [name for name in FIXED_VECTOR if name in errors]
    attending = [name for name in RECURRENT_WITH_ATTENTION if name in errors]
    if not fixed or not attending:
        return
    short, *_, long = errors[fixed[0]]
    means = {name: {group: statistics.mean(rates) for group, rates in errors[name].items()} for name in errors}
    worst_case = min(fixed, key=lambda name: means[name][long])
    best = min(attending, key=lambda name: means[name][long])
    gap = means[worst_case][long] - means[worst_case][short]
    yield {
        "record": "claim",
        "fixed_vector": worst_case,
        "attention": best,
        "short_error": means[worst_case][short],
        "long_error": means[worst_case][long],
        "long_error_with_attention": means[best][long],
        "ratio": means[worst_case][long] / means[worst_case][short] if means[worst_case][short] else None,
        "share_closed": (means[worst_case][long] - means[best][long]) / gap if gap else None,
    }


def table(records: Sequence[Record]) -> str:
    """In Markdown: one table of errors for each task, one of costs, one of perplexities."""
    parts = []
    tasks = dict.fromkeys(record["task"] for record in records if record["record"] == "errors")
    for task in tasks:
        errors = errors_of(records, task)
        groups = list(next(iter(errors.values())))
        rows = [[model, *(mean_and_spread(rates[group]) for group in groups)] for model, rates in errors.items()]
        parts.append(_markdown([f"{task}: token error rate, % by length", *groups], rows))
    speeds = {r["model"]: r["target_tokens_per_second"] for r in records if r["record"] == "training speed"}
    sizes: dict[str, int] = {}
    for record in records:
        if record["record"] == "errors":  # of the first task; another's vocabulary makes it a little more or less
            sizes.setdefault(record["model"], record["parameters"])
    decoding = {(r["model"], r["length"]): r for r in records if r["record"] == "decoding"}
    lengths = sorted({length for _, length in decoding})
    header = ["", "parameters", "training, target tokens a second"]
    header += [f"ms a step, {length} tokens" for length in lengths] + [f"cache, {length} tokens" for length in lengths]
    parts.append(
        _markdown(
            header,
            [
                [
                    model,
                    f"{sizes[model]:,}" if model in sizes else "",
                    f"{speed:,}",
                    *(f"{decoding[model, length]['step_milliseconds']:.2g}" for length in lengths),
                    *(f"{decoding[model, length]['cache_bytes'] / 1024:,.0f} KiB" for length in lengths),
                ]
                for model, speed in speeds.items()
            ],
        )
    )
    perplexities = _perplexities(records)
    if perplexities:
        groups = list(next(iter(perplexities.values())))
        rows = [[name, *(mean_and_spread(values[group]) for group in groups)] for name, values in perplexities.items()]
        parts.append(_markdown(["positions: perplexity by length", *groups], rows))
    return "\n\n".join(parts)


def _perplexities(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["record"] == "perplexity":
            for group, value in record["perplexity"].items():
                values[record["positions"]][group].append(value)
    return values


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(records: Sequence[Record], folder: Path) -> None:
    """errors.png (by length, for each task) and costs.png (decoding time and cache by length) in the folder."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(record["task"] for record in records if record["record"] == "errors"))
    figure = Figure(figsize=(5 * len(tasks), 4), layout="constrained")
    for task, axes in zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True):
        for model, by_group in errors_of(records, task).items():
            groups = list(by_group)
            means = [statistics.mean(by_group[group]) for group in groups]
            spread = [[mean - min(by_group[g]) for g, mean in zip(groups, means, strict=True)],
                      [max(by_group[g]) - mean for g, mean in zip(groups, means, strict=True)]]  # fmt: skip
            axes.errorbar(groups, means, yerr=spread, marker="o", capsize=3, label=model)
        axes.set(title=task, xlabel="source length", ylabel="token error rate, %")
        axes.set_yscale("symlog", linthresh=1)  # from none at all to several hundred, for answers that never end
        axes.set_ylim(0, 1000)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(folder / "errors.png", dpi=120)

    decoding = [record for record in records if record["record"] == "decoding"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    time_axes, bytes_axes = figure.subplots(1, 2)
    for model in dict.fromkeys(record["model"] for record in decoding):
        mine = [record for record in decoding if record["model"] == model]
        lengths = [record["length"] for record in mine]
        time_axes.plot(lengths, [record["step_milliseconds"] for record in mine], marker="o", label=model)
        bytes_axes.plot(lengths, [record["cache_bytes"] for record in mine], marker="o", label=model)
    time_axes.set(xlabel="tokens of source and answer", ylabel="ms a step, 8 rows", xscale="log", yscale="log")
    bytes_axes.set(xlabel="tokens of source and answer", ylabel="bytes of the cache", xscale="log", yscale="log")
    bytes_axes.legend(fontsize="small")
    figure.savefig(folder / "costs.png", dpi=120)
