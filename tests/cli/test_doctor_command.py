"""``farthing doctor``: it says what is there, what is missing and what to install, and changes nothing."""

import os
import subprocess
import sys

import pytest

from farthing.cli import doctor_command
from farthing.noise import native


def test_it_finds_this_machine_in_order_and_leaves_nothing_behind(run, tmp_path):
    done = run("doctor", "--folder", tmp_path, "--json")
    assert done.code == 0
    found = {check["name"]: check for check in done.json["checks"]}
    assert found["numpy"]["state"] == "ok"
    assert "durable commit" in found["disk"]["text"]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_fails(run, tmp_path):
    done = run("doctor", "--folder", tmp_path / "nowhere")
    assert done.code == 1
    assert "failed   disk" in done.out
    assert "cannot be written to: No such file or directory" in done.out


def test_what_is_missing_is_named_with_the_extra_that_installs_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_command, "find_spec", lambda name: None)
    done = run("doctor", "--folder", tmp_path)
    assert done.code == 0
    assert "pip install torch" in done.out
    assert "pip install pyarrow" in done.out


def test_without_a_compiler_it_says_so(run, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "kernels", lambda work=0: None)
    assert "missing  C kernels" in run("doctor", "--folder", tmp_path).out


@pytest.mark.parametrize(("seconds", "said"), [(0.5, "larger blocks"), (1e-6, "power cut")])
def test_a_strange_disk_is_a_warning(run, monkeypatch, tmp_path, seconds, said):
    monkeypatch.setattr(doctor_command, "_commit", lambda file: seconds)
    done = run("doctor", "--folder", tmp_path)
    assert done.code == 0
    assert "warning  disk" in done.out
    assert said in done.out


def test_python_m_farthing_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "farthing", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("farthing ")


def test_where_files_cannot_be_locked_one_sentence_says_so():
    code = "import os; os.name = 'nt'; import farthing.ledger"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: farthing needs a POSIX system")
    assert os.name == "posix"
