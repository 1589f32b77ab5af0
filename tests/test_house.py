"""The plan of the house: who may import whom, what is exported, and how fast it opens."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import farthing as ft

SOURCE = Path(ft.__file__).parent

# Imports point down only: a module may import those on lines above its own.
LAYERS = [
    "errors arrays validate summing native halfnormal streams noise",
    "accounting.tolerance accounting.gaussian accounting.zcdp accounting.composition",
    "budget events",
    "accounting.moments accounting.sampling accounting.rdp",
    "accounting.pairs accounting.transform accounting.inversion accounting.grid accounting.cells",
    "accounting.pld",
    "accounting.online accounting.calibrate accounting.filters",
    "samplers bounds mechanisms query",
    "head journal books failsafe ledger",
    "facade data plans verifier",
    "tables losses",
    "algorithms.problem algorithms.spending algorithms.purse",
    "algorithms.dppca algorithms.regression",
    "algorithms.descent",
    "algorithms.leastsquares algorithms.adassp algorithms.sufficient",
    "algorithms.functional algorithms.gradient",
    "algorithms.pricing",
    "algorithms.dpsgd algorithms.dpagd algorithms.perturbation algorithms.privgene algorithms.baselines",
    "algorithms.ball",
    "solvers estimators selection",
    "torch.precision torch.totals torch.products torch.kernels torch.sums torch.grams torch.updates",
    "torch.stock",
    "torch.noise torch.coordinates torch.flat",
    "torch.compiled torch.clipping torch.vmapped torch.terms torch.convolution torch.tape torch.recurrent",
    "torch.layers torch.probe torch.traces torch.isolation torch.calm torch.company torch.selfcheck",
    "torch.graphs torch.stack",
    "torch.bookkeeping",
    "torch.collating torch.records torch.plan torch.quantile torch.schedules torch.averaging",
    "torch.randomness torch.optim torch.checkpoint torch.preparation torch.rehearsal torch.overlap",
    "torch.agreement torch.distributed torch.training torch.evaluation",
    "torch.adadp torch.dpopt torch.dpagd torch.scattering torch.whitening torch.deferred torch.lightning",
    "crowd.terms crowd.protocol crowd.compact crowd.draws crowd.people crowd.simulated",
    "algorithms.together algorithms.addp algorithms.addp_baselines algorithms.sgd1 algorithms.sgd2",
    "audit.statistics audit.canaries audit.curves audit.tells audit.verdict audit.auditing audit.helpers",
    "audit.groups audit.as_published audit.adaptive audit.overheard audit.steps audit.targets",
    "audit.deep audit.seams",
    "audit.methods",
    "audit.laws audit.prices audit.charges audit.contributions audit.entrances audit.rounding audit.adapters",
    "report.words report.scales report.drawing report.subject report.spending report.statement",
    "report.pictures report.table report.style report.document report.reading",
    "progress csvfile parquetfile tablefile drafting modelfile exporting following training",
    "crowd.messages crowd.forms crowd.transport crowd.post crowd.shamir crowd.secagg crowd.sessions",
    "crowd.members crowd.checkpoint crowd.coordinator",
    "guard.policy guard.pricing guard.answers guard.masking guard.keeper guard.server guard.command",
    "audit.guards",
    "job simulating",
    "auditing",
    "processes tomlfile page keyring",
    "crowd.bridge crowd.flower_control crowd.superlink crowd.flower crowd.flower_link crowd.flower_node",
    "serving joining",
    "demo reporting options",
    "training_cli simulating_cli accounting_cli books_cli auditing_cli deploying_cli report_cli",
    "cli demo_parties",
]
ORDER = [name for layer in LAYERS for name in layer.split()]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "farthing":
            prefix = node.module.removeprefix("farthing").removeprefix(".")
            for alias in node.names:
                inner = f"{prefix}.{alias.name}".removeprefix(".")
                yield inner if module_file(inner) else prefix
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("farthing.") for a in node.names if a.name.startswith("farthing.")
            )


def module_file(name):
    return (SOURCE / (name.replace(".", "/") + ".py")).exists()


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path):
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    if path.name == "__init__.py":
        return
    assert name in ORDER, f"give {name} a place in the order of the house"
    for imported in imports(path):
        assert ORDER.index(imported) < ORDER.index(name), f"{name} must not import {imported}"


def test_nothing_in_the_house_uses_the_global_generators():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert "random" not in names, path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("np.random", "numpy.random"), path


def test_exports_are_curated():
    assert ft.__all__ == sorted(ft.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(hasattr(ft, name) for name in ft.__all__)
    assert len(ft.__all__) <= 62  # of them a class for each of the 14 solvers


def test_every_error_that_people_catch_is_exported():
    raised = {name for name, kind in vars(ft.errors).items() if isinstance(kind, type)}
    assert raised <= {*ft.__all__}
    assert ft.BudgetSpent is ft.errors.BudgetSpent


def test_opening_is_light():
    code = (
        "import sys, farthing; "
        "heavy = 'dp_accounting torch flwr sklearn matplotlib scipy.stats mpmath'.split(); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
