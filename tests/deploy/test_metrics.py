"""Health and metrics: public figures in Prometheus' format, and nothing else."""

import re
import runpy
import tomllib
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import pytest

from farthing.cli.main import main
from farthing.deploy.flower.superlink import APP, Address
from farthing.deploy.metrics import (
    Health,
    Metric,
    MetricsServer,
    PartyView,
    View,
    exposition,
    of_processes,
    of_run,
)
from farthing.errors import InvalidValue

PARTIES = (
    PartyView(name="north", state="here", left=12, most=20, records=500, epsilon=1.0, delta=1e-6),
    PartyView(name="south", state="away", left=9, most=20, records=700, epsilon=0.5, delta=1e-6, stale=2),
)
RUN = View(
    run="r",
    method="sgd2",
    phase="training",
    round=8,
    parties=PARTIES,
    accuracy=((8, 0.81),),
    seconds=0.5,
)

LINE = re.compile(r'[a-z_]+(\{[a-z]+="[^"\n]*"(,[a-z]+="[^"\n]*")*\})? [0-9.e+-]+')


def test_the_figures_of_the_live_page():
    health, metrics = of_run(RUN)
    text = exposition(metrics)
    assert health == Health(True, "training")
    assert all(LINE.fullmatch(line) or line.startswith("# ") for line in text.splitlines())
    for line in (
        "farthing_round 8",
        "farthing_parties_here 1",
        'farthing_party_state{party="south",state="away"} 1',
        'farthing_party_state{party="south",state="here"} 0',
        'farthing_party_rounds_left{party="north"} 12',
        'farthing_party_staleness{party="south"} 2',
        "farthing_round_seconds 0.5",
        "farthing_accuracy 0.81",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("phase", "number", "state", "well"),
    [
        ("waiting for parties", 0, "awaited", True),
        ("training", 3, "here", True),
        ("training", 3, "away", False),
        ("over: all rounds were taken", 3, "spent", True),
    ],
)
def test_when_a_run_is_well(phase, number, state, well):
    view = View(run="r", method="m", phase=phase, round=number, parties=(PartyView(name="a", state=state),))
    assert of_run(view)[0].well is well


def test_labels_are_escaped():
    text = exposition([Metric("m", "A metric.", "gauge", [({"party": 'a"b\\c\nd'}, 1.0)])])
    assert text.endswith('m{party="a\\"b\\\\c\\nd"} 1\n')


def test_a_server_of_both_on_the_loopback_address():
    running = {"guard": True, "node": True}
    server = MetricsServer(lambda: of_processes(running, {"guard": 1, "node": 3}), Address("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server._server.server_address[1]}"
    try:
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as said:
            assert said.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert 'farthing_process_starts_total{process="node"} 3' in said.read().decode()
        with urllib.request.urlopen(f"{address}/healthz", timeout=60) as said:
            assert said.read() == b"running\n"
        for host in ("rebound.example", "127.0.0.1"):  # another name, and another port
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(urllib.request.Request(f"{address}/metrics", headers={"Host": host}))
            assert error.value.code == 421
            error.value.close()
        running["guard"] = False
        for path, status in (("/healthz", 503), ("/", 404), ("/../etc/passwd", 404)):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"{address}{path}", timeout=60)
            assert error.value.code == status
            error.value.close()
        with pytest.raises(InvalidValue, match="free address"):
            MetricsServer(lambda: of_processes({}, {}), Address("127.0.0.1", int(address.rpartition(":")[2])))
    finally:
        server.close()


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_units_and_services_run_commands_that_there_are(capsys):
    """Every ExecStart and every service of the compose file, as far as --help goes."""
    units = sorted((EXAMPLES / "deploy" / "systemd").glob("*.service"))
    starts = [re.search(r"^ExecStart=\S+/farthing (\w+) /etc/", unit.read_text(), re.M)[1] for unit in units]
    assert starts == ["guard", "join", "serve"]
    compose = (EXAMPLES / "deploy" / "compose.yaml").read_text()
    served = re.findall(r'command: \["(\w+)", "/data/\w+\.toml"\]', compose)
    assert served == ["serve", "join", "join", "join"]
    for command in {*starts, *served}:
        assert main([command, "--help"]) == 0
        assert "Usage" in capsys.readouterr().out


def test_the_folders_of_the_compose_file_are_complete(tmp_path, capsys):
    """Each holds what its machine needs, nothing of another's, and a party's policy is in order."""
    runpy.run_path(str(EXAMPLES / "deploy" / "prepare.py"))["main"](tmp_path)
    compose = (EXAMPLES / "deploy" / "compose.yaml").read_text()
    mounted = re.findall(r'volumes: \["\./(\w+):/data"\]', compose)
    assert sorted(mounted) == sorted(path.name for path in tmp_path.iterdir())
    run = tomllib.loads((tmp_path / "coordinator" / "run.toml").read_text())
    assert all((tmp_path / "coordinator" / card).exists() for card in run["parties"].values())
    for name in run["parties"]:
        assert [path.name for path in (tmp_path / name / "keys").iterdir()] == [name]
        assert ".." not in (tmp_path / name / "party.toml").read_text()
    assert main(["guard", str(tmp_path / "north" / "policy.toml"), "--check"]) == 0
    assert "is in order" in capsys.readouterr().err


def test_the_relay_is_a_flower_app():
    build = pytest.importorskip("flwr.cli.build", reason="Flower is not installed")
    project = (EXAMPLES / "flower-relay" / "pyproject.toml").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert build.build_fab_from_files({"pyproject.toml": project})[0]
    parts = tomllib.loads(project.decode())["tool"]["flwr"]["app"]["components"]
    ours = tomllib.loads(APP)["tool"]["flwr"]["app"]["components"]
    assert parts == ours
