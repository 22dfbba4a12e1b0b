"""What `polyeps run` imports until its first round is over: torch and little else, so that it starts soon."""

import json
import subprocess
import sys
from pathlib import Path

# scipy's statistics alone take half a second; dp-accounting imports them with its accountants, which we do not use.
HEAVY = {
    *("dp_accounting.pld", "dp_accounting.mechanism_calibration", "dp_accounting.gaussian_mechanism"),
    *("scipy.stats", "scipy.signal", "scipy.optimize", "scipy.linalg", "scipy.sparse", "scipy.interpolate"),
    *("sklearn", "pandas", "matplotlib", "sympy", "mpmath", "torch._dynamo", "torch._inductor"),
    *("torchvision", "onnx", "onnxruntime", "flwr", "ray", "mlflow", "wandb", "tensorboard", "polars", "pyarrow"),
}
EXPERIMENT = """
rounds = 2
evaluate_every = 2
[data]
clients = 12
partition = "iid"
[budgets]
distribution = "uniform"
delta = 1e-4
[training]
batch = 4
local_steps = 10
learning_rate = 0.1
[[algorithm]]
name = "weiavg"
"""
STOPPED = """
import json, os, sys
from polyeps.cli import main, run

load = run._import_all

def loaded():
    load()
    from polyeps.experiment.journal import Journal

    def stop(*_, **__):
        print(json.dumps(sorted(sys.modules)), flush=True)
        os._exit(0)

    Journal.write_round = stop

run._import_all = loaded
main()
"""


def said(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_the_first_round_needs_no_heavy_module_beside_torch(tmp_path: Path) -> None:
    (tmp_path / "start.toml").write_text(EXPERIMENT)
    known = said(STOPPED, "run", str(tmp_path / "start.toml"), "--output", str(tmp_path / "run"), "--quiet")
    modules = set(json.loads(known.splitlines()[-1]))
    assert {"torch", "polyeps.server", "polyeps.ledger.hash_chain"} <= modules
    assert sorted(modules & HEAVY) == []


def test_dp_accounting_is_whole_as_soon_as_more_than_its_events_is_used() -> None:
    code = """
import polyeps, sys
from dp_accounting.dp_event import GaussianDpEvent
assert "dp_accounting.pld" not in sys.modules
import dp_accounting
assert not hasattr(dp_accounting, "not_there")
assert dp_accounting.GaussianDpEvent is GaussianDpEvent
from dp_accounting import rdp
accountants = dp_accounting.pld.PLDAccountant(), rdp.RdpAccountant()
found = [one.compose(GaussianDpEvent(2.0)).get_epsilon(1e-5) for one in accountants]
print(*found)
"""
    exact, renyi = map(float, said(code).split())
    assert 1.9 < exact < renyi < 2.6
