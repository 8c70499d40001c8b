"""A group's record to read, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]


def document(record: Row) -> str:
    return "\n".join([*_opening(record), *_checks(record), *_steps(record), *_graphs(record), *_wire(record)]) + "\n"


def _opening(record: Row) -> Iterator[str]:
    (H, HV), where = record["heads"], record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version is not None)
    gpus = ", ".join(dict.fromkeys(gpu for gpu in record["gpus"] if gpu)) or "CPUs"
    yield f"# {record['world_size']} ranks over {record['over']}"
    yield ""
    yield f"{where['hosts']} host(s), {gpus}, {where['platform']}. {versions}, commit {record['commit'] or 'unknown'}."
    yield f"{H} key and {HV} value heads of 128, bf16, {record['decay']} decay, tier {record['backend']},"
    yield f"seed {record['seed']}. {'All holds.' if record['ok'] else 'NOT ALL HOLDS.'}"


def _checks(record: Row) -> Iterator[str]:
    if not record["checks"]:
        return
    failed = [check for check in record["checks"] if not check["ok"]]
    yield f"\n{len(record['checks']) - len(failed)} of {len(record['checks'])} checks of awkward cases hold."
    yield from (f"- failed: {check['name']}: {check['row']}: {dict(check['figures'])}" for check in failed)


def _steps(record: Row) -> Iterator[str]:
    if not record["rows"]:
        return
    yield ""
    yield "Times in ms are medians of the slowest rank's, forward / checkpointed step: with work beside the exchange,"
    yield "and after it. Model, of the latter: what the slowest of simulated ranks compute, and the wire at"
    rates = "{latency_us:g} us a collective and {gb_per_s:g} GB/s, {gathered_gb_per_s:g} for an all-gather."
    yield f"{rates.format(**record['model'])} Early: segments"
    yield "of each rank that are walked while states cross, of how many. Over gloo nothing is done beside an exchange."
    yield ""
    head = ["pack", "layout", "exchange", "beside", "after", "gain", "model", "of it wire", "after / model", "early"]
    yield _line([*head, "right"])
    yield _line(["---"] * 3 + ["---:"] * 6 + ["---"] * 2)
    for row in record["rows"]:
        both = [row["forward"], row["step"]]
        model = [x["local_ms"] + x["wire_ms"] for x in both]
        gain = [None if x["ms"] is None else x["after_ms"] - x["ms"] for x in both]
        columns = [*([x[name] for x in both] for name in ("ms", "after_ms")), gain, model, [x["wire_ms"] for x in both]]
        cells = [" / ".join("-" if x is None else f"{x:.3f}" for x in column) for column in columns]
        ratio = " / ".join(f"{x['measured_to_model']:.2f}" for x in both)
        early = " ".join(f"{n}/{of}" for n, of in row["early"])
        yield _line([row["pack"], row["layout"], row["exchange"], *cells, ratio, early, "yes" if row["ok"] else "NO"])


def _graphs(record: Row) -> Iterator[str]:
    if "graphs" not in record["parts"]:
        return
    if record["graphs"]["not_run"]:
        yield f"\nGraphs of a step were not run: {record['graphs']['not_run']}."
        return
    yield "\nA checkpointed step with its collectives as one CUDA graph, replayed and eager, ms:\n"
    yield _line(["pack", "layout", "exchange", "graph", "eager", "bits of eager"])
    yield _line(["---"] * 3 + ["---:"] * 2 + ["---"])
    for row in record["graphs"]["rows"]:
        times = (f"{row[name]:.3f}" for name in ("graph_ms", "eager_ms"))
        yield _line([row["pack"], row["layout"], row["exchange"], *times, "yes" if row["ok"] else str(row["bits"])])


def _wire(record: Row) -> Iterator[str]:
    if not record["wire"]:
        return
    yield "\nCollectives by themselves, and what fits them best:\n"
    yield _line(["collective", "latency, us", "GB/s a rank", "ms by MB sent to others"])
    yield _line(["---", "---:", "---:", "---"])
    for kind, fit in record["wire"]["fitted"].items():
        rows = [row for row in record["wire"]["rows"] if row["collective"] == kind]
        sizes = ", ".join(f"{row['bytes'] / 1e6:.3g}: {row['ms']:.3g}" for row in rows)
        yield _line([kind, f"{fit['latency_us']}", f"{fit['gb_per_s']}", sizes])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
