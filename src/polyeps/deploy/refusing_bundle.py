"""The bundle of a run, which Flower needs: apps that refuse to run, should a SuperNode without a silo import them."""

from collections.abc import Mapping

REFUSING: Mapping[str, bytes] = {
    "pyproject.toml": b"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "polyeps-contract"
version = "1.0.0"
description = "A run of polyeps silos"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.flwr.app]
publisher = "polyeps"

[tool.flwr.app.components]
serverapp = "refusing:server"
clientapp = "refusing:client"

[tool.flwr.app.config]
""",
    "refusing.py": b'''"""Apps that refuse to run: silos and servers of polyeps run their own installed code."""

raise ImportError("this run is for polyeps silos; start `polyeps silo` beside this SuperNode")
''',
}
