"""Write the tables of measured speed into the pages, from benchmarks/results: python benchmarks/speed_tables.py

python benchmarks/engine.py --json --keep benchmarks/results/benchmarks.json        # the engine, CPU or --device cuda
python benchmarks/own_models.py --json > benchmarks/results/own_models.json         # users' modules
python benchmarks/scale.py --keep benchmarks/results/scale.json                     # scale
python benchmarks/speed_tables.py --check                                           # status 1 if a page is outdated
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import scale_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / "reference" / name for name in ("performance.md", "scale.md")))
PARAMETERS = {"logistic": 7_850, "cnn": 26_010, "mcmahan_cnn": 1_663_370}
CPU, DEVICE = "x86_64", "NVIDIA H200"
MODULES = {
    "vit": "ViT, 32 × 32, width 128, 4 blocks",
    "gpt": "GPT, 64 tokens, width 128, 4 blocks",
    "resnet18": "ResNet-18 with GroupNorm, 11 million",
    "mlp": "MLP 784-64-10, `nn.Sequential`",
    "mlp_class": "the same as a class",
    "large_mlp": "MLP of 12 million, `nn.Sequential`",
    "large_mlp_class": "the same as a class",
}
_MARK = re.compile(r"<!-- speed ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)


def number(value: float) -> str:
    """Return a number in four digits, or whole, thousands apart.

    >>> number(34690.0), number(143.74), number(0.5848)
    ('34 690', '143.7', '0.5848')
    """
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:.4g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    head, rule = f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in rows)])


def engine() -> dict[str, dict[str, Any]]:
    """Return what `engine.py --keep` has written, by machine and model."""
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / "benchmarks.json").read_text("utf-8"))
    return found


def named(model: str) -> str:
    return f"{model}, {number(PARAMETERS[model])}"


def summary() -> str:
    """Return the engine beside a loop with Opacus, as users run it and with its allocator told to keep memory."""
    rows = [
        [
            named(model),
            number(one["polyeps"]),
            number(one["opacus_loop"]),
            number(one["opacus_loop_kept"]),
            f"{one['polyeps'] / one['opacus_loop']:.1f}, {one['polyeps'] / one['opacus_loop_kept']:.1f}",
        ]
        for model, one in ((model, engine()[CPU][model]) for model in PARAMETERS)
    ]
    loop = "loop over clients with Opacus"
    return table(["model, parameters", "polyeps", loop, "the same, keeping freed memory", "ratios"], rows)


def cpu() -> str:
    """Return the engine on the CPU in detail."""
    columns = [
        "model", "ours, client-steps/s", "Opacus loop", "the same, keeping freed memory", "ratio", "ratio, memory kept",
        "ours without privacy", "share of noise", "DP over plain, without noise",
    ]  # fmt: skip
    rows = [
        [
            named(model),
            *(number(one[name]) for name in ("polyeps", "opacus_loop", "opacus_loop_kept")),
            *(f"{one['polyeps'] / one[name]:.1f}" for name in ("opacus_loop", "opacus_loop_kept")),
            number(one["nonprivate"]),
            f"{100 * one['noise_share']:.0f} %",
            f"{one['dp_over_nonprivate']:.2f}",
        ]
        for model, one in ((model, engine()[CPU][model]) for model in PARAMETERS)
    ]
    return table(columns, rows)


def device() -> str:
    """Return the engine on a device by cohort, beside the version before ragged batches."""
    rows = []
    for model in PARAMETERS:
        before = engine()[f"{DEVICE}, before"][model]["cohorts"]
        for clients, one in sorted(engine()[DEVICE][model]["cohorts"].items(), key=lambda pair: int(pair[0])):
            speeds = (one["polyeps"], before[clients]["polyeps"], one["nonprivate"])
            dearer = f"{one['nonprivate'] / one['polyeps']:.2f}"
            rows.append([model, clients, *map(number, speeds), dearer, f"{100 * one['noise_share']:.0f} %"])
    columns = ["model", "clients", "client-steps/s", "before", "without privacy", "DP over plain", "share of noise"]
    return table(columns, rows)


def modules(file: str = "own_models.json") -> str:
    """Return users' modules beside a loop with Opacus."""
    found = json.loads((RESULTS / file).read_text("utf-8"))
    rows = [
        [said, number(found[name]["polyeps"]), number(found[name]["opacus_loop"]), f"{found[name]['ratio']:.2f}"]
        for name, said in MODULES.items()
        if name in found
    ]
    return table(["model", "ours", "Opacus loop", "ratio"], rows)


def of_part(part: str) -> Callable[[], str]:
    """Return the maker of a table with all figures of a part of `scale.py`."""
    return lambda: table(["what", "measured"], scale_model.figures(part))


PARTS: dict[str, Callable[[], str]] = {
    "summary": summary,
    "cpu": cpu,
    "device": device,
    "modules": modules,
    "modules-device": lambda: modules("own_models_h200.json"),
    **{
        f"scale-{part}": of_part(part)
        for part in (
            "replies", "budgets_file", "draws", "calibration", "ledger",
            "start", "overhead", "million", "fedsel", "shards",
        )
    },
    "scale-growth": lambda: table(
        ["clients", "a round", "parameters", "start, s", "a round, ms", "a client-step, µs", "peak MB"],
        scale_model.growth_rows(),
    ),
    "scale-sums": lambda: table(
        ["clients", "may fail", "collude", "neighbours", "all in turn, s", "beside a client's vector, kB"],
        scale_model.sum_rows(),
    ),
    "scale-model": lambda: table(["of", "takes"], scale_model.model_rows()),
    "scale-forecast": lambda: table(["clients", "what", "model", "measured"], scale_model.forecast_rows()),
}  # fmt: skip


def filled(page: str) -> str:
    """Return a page with all of its marked tables made anew."""
    return _MARK.sub(lambda found: f"<!-- speed {found[1]} -->\n{PARTS[found[1]]()}\n<!-- end -->", page)


def outdated() -> Iterator[Path]:
    """Yield the pages that do not show the results."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            yield page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a page is outdated")
    if parser.parse_args().check:
        late = [str(page.relative_to(ROOT)) for page in outdated()]
        sys.exit(f"outdated: {', '.join(late)}; run {Path(__file__).name}" if late else 0)
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
