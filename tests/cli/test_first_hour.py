"""The first hour at the command line: a sample, options from a file, what is said, and missing files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.linear.solvers import SolverMethod

SPEND = ("--epsilon", "1", "--delta", "1e-5")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sample_and_options_from_a_file(run: Any) -> None:
    assert run("sample").out == "people.csv\npeople.json\n"
    assert run("sample").code == 2  # they exist
    Path("run.toml").write_text(
        'table = "people.csv"\nschema = "people.json"\nepsilon = 9\ndelta = 1e-5\nout = "fit"\n'
        'method = "dpagd"\nset = ["splits=5"]\nholdout = 0.2\n'
    )
    done = run("train", "--config", "run.toml", "--epsilon", "3", "--verbose", "--json")
    assert done.code == 0, done.err
    told = done.json
    assert (told["guarantee"]["epsilon"], told["method"]) == (3.0, "dpagd")  # what is typed comes first
    assert told["settings"] == {"splits": 5}
    assert told["public"]["schema"]["checked_by"] == "farthing: the data are made up"
    assert told["model"] == "fit/model.npz"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epsilom = 1", "no option 'epsilom' (did you mean 'epsilon'?)"),
        ("epsilon = ", "is not a TOML file"),
        ("[epsilon]\na = 1", "'epsilon' must be a value or a list"),
        ('epsilon = "much"', "must be a number, got 'much'"),
        ("epsilon = [1, 2]", "must be a number, got [1, 2]"),
        ("\udcff", "is not a TOML file: it is not UTF-8 text"),
        (None, "--config 'run.toml' cannot be read"),
    ],
)
def test_a_wrong_file_of_options_is_one_sentence(run: Any, text: str | None, said: str) -> None:
    if text is not None:
        Path("run.toml").write_text(text, errors="surrogateescape")
    done = run("train", "adult", "--delta", "1e-5", "--config", "run.toml")
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_full_standard_output_is_one_sentence(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farthing.cli.doctor_command.emit_json", full)
    done = run("doctor", "--json")
    assert (done.code, done.err) == (
        1,
        "farthing: the result could not be written: No space left on device\n",
    )


def test_a_whole_number_beside_a_prediction_has_no_decimal_point(run: Any) -> None:
    run("sample")
    assert run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit").code == 0
    first = Path("people.csv").read_text().splitlines()[1].split(",")[0]
    assert run("predict", "fit", "people.csv", "--id", "age").out.splitlines()[1].startswith(f"{first},")


def test_a_training_begins_where_a_full_disk_left_an_empty_ledger(run: Any) -> None:
    run("sample")
    Path("fit").mkdir()
    for name in ("train.ledger", "train.ledger.head"):
        Path("fit", name).touch()
    done = run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit", "--json")
    assert (done.code, done.json["ledger"]) == (0, "fit/train.ledger")


def test_a_budget_that_hardly_protects_is_said_at_the_terminal(run: Any) -> None:
    assert run("sample").code == 0
    table = ("train", "people.csv", "--schema", "people.json", "--dry-run")
    assert run(*table, *SPEND).err == ""
    done = run(*table, "--epsilon", "1e9", "--delta", "0.1")
    assert done.code == 0
    assert "ε = 10⁹. ε above 10 is weak" in done.err
    assert "δ times the number of records is 300. That is too large." in done.err


def test_a_table_that_no_schema_fits_is_told_before_a_schema_is_asked_for(run: Any) -> None:
    Path("twice.csv").write_text("a,a,y\n1,2,no\n")
    done = run("train", "twice.csv", *SPEND, "--target", "y")
    assert (done.code, done.out) == (2, "")
    assert "'twice.csv' has two columns 'a'" in done.err
    done = run("train", ".", *SPEND)
    assert done.code == 2
    assert "'.' cannot be read: Is a directory" in done.err


def test_a_wrong_command_is_hinted_at_once(run: Any) -> None:
    assert run("trian").err.count("Did you mean 'train'?") == 1


def test_a_terminal_without_greek_letters_gets_another_letter() -> None:
    command = [sys.executable, "-m", "farthing", "audit", "gaussian", "--effort", "0.01"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    assert "? at least" in done.stdout


def test_the_name_of_a_missing_file_is_no_hint_at_itself(run: Any) -> None:
    Path("people.csv").symlink_to("nowhere")  # listed, but nothing is there
    done = run("train", "people.csv", *SPEND)
    assert (done.code, done.err) == (2, "farthing: there is no file 'people.csv'\n")


def test_a_missing_table_is_told_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from farthing.cli.main import main; "
        "code = main(['train', 'people.csv', '--epsilon', '1', '--delta', '1e-5']); "
        "assert not {'numpy', 'scipy', 'sklearn'} & {*sys.modules}; sys.exit(code)"
    )
    Path("peoples.csv").touch()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no file 'people.csv' (did you mean 'peoples.csv'?)" in done.stderr


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([3], "it yielded int"),
        ([ft.Step(1, np.zeros(2))], "w of its step 1 is ndarray, not a pair"),
        ([ft.Step(1, (np.zeros(5), 0.0))], r"has the shapes \(5,\) and \(\)"),
        (None, "it returned NoneType"),
    ],
)
def test_a_solver_of_ones_own_is_told_what_it_has_to_yield(steps: Any, said: str) -> None:
    model = ft.LogisticRegression(
        1.0,
        1e-5,
        solver=SolverMethod(lambda ledger, problem: steps if steps is None else iter(steps)),
        bounds=(0, 1),
        classes=(0, 1),
    )
    with pytest.raises(ft.InvalidValue, match=f"a solver must .*{said}"):
        model.fit(np.zeros((4, 2)), [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("records = 1.5", "must be a whole number, got 1.5"),
        ("records = true", "must be a whole number, got True"),
        ("delta = true", "must be a number, got True"),
        ("out = 3", "'out' must be a text, got 3"),
        ("strict = 7", "'strict' must be true or false, got 7"),
        ('json = "yes"', "'json' must be true or false, got 'yes'"),
        ('bounds = ["age=1:2", 3]', "'bounds' must be a text"),
        ('set = "tree=3"', "has no setting 'tree'"),
    ],
)
def test_values_of_another_type_in_a_config_are_refused_and_not_converted(run, line, says):
    run("sample")
    Path("run.toml").write_text(f'table = "people.csv"\nschema = "people.json"\n{line}\n')
    done = run("train", "--config", "run.toml", "--epsilon", "1", *(() if "delta" in line else SPEND[2:]))
    assert (done.code, done.out) == (2, "")
    assert says in done.err


@pytest.mark.parametrize("command", ["predict", "card", "report", "schema"])
@pytest.mark.parametrize("name", ["train.ledger", "train.ledger.head"])
def test_no_command_replaces_a_file_of_a_ledger(run, command, name):
    run("sample")
    assert run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit").code == 0
    Path("other").mkdir()
    assert run("ledger", "create", "other/train.ledger", "--epsilon", "1", "--delta", "1e-5").code == 0
    of = {
        "predict": ("predict", "fit", "people.csv"),
        "card": ("card", "fit"),
        "report": ("report", "fit/train.ledger"),
        "schema": ("schema", "people.csv", "--target", "income"),
    }[command]
    for folder in ("fit", "other"):
        place = Path(folder) / name
        before = place.read_bytes()
        done = run(*of, "--out", str(place), "--force")
        assert (done.code, done.out) == (2, "")
        assert "must be new" in done.err
        assert place.read_bytes() == before


def test_predictions_do_not_replace_the_model_they_are_of(run):
    run("sample")
    assert run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit").code == 0
    done = run("predict", "fit", "people.csv", "--out", "fit/model.npz", "--force")
    assert done.code == 2
    assert "is read by this command" in done.err
    assert run("predict", "fit", "people.csv").code == 0


def test_objects_of_all_commands_have_one_shape(run):
    """A format, and guarantees and budgets with the same fields wherever there are some."""
    run("sample")
    table = ("people.csv", "--schema", "people.json")
    commands = (
        ("train", *table, *SPEND, "--out", "fit", "--method", "majority"),
        ("train", *table, *SPEND, "--dry-run", "--method", "majority", "--out", "dry"),
        ("predict", "fit", "people.csv"),
        ("describe", *table, "--epsilon", "1"),
        ("simulate", *table, *SPEND, "--clients", "3", "--method", "sgd-pass"),
        ("simulate", *table, "--clients", "3", "--method", "nonprivate", "--rounds", "2"),
        ("report", "fit/train.ledger", "--privacy", "fit/privacy.json"),
        ("ledger", "create", "new.ledger", *SPEND),
        ("ledger", "show", "fit/train.ledger"),
        ("ledger", "verify", "fit/train.ledger"),
        ("account", "--noise-multiplier", "4", "--sampling-rate", "1", "--steps", "2", "--delta", "1e-5"),
        ("calibrate", *SPEND, "--sampling-rate", "1", "--steps", "3"),
        ("calibrate", *SPEND, "--sampling-rate", "1", "--menu", "30"),
        ("doctor",),
        ("keys", "keys", "--parties", "a"),
    )
    terms = {"epsilon", "delta", "adjacency", "unit", "observer"}
    for command in commands:
        told = run(*command, "--json").json
        assert next(iter(told)) == "format", command
        assert told["format"] == 1, command
        for name in {"guarantee", "spent"} & told.keys():
            if command[:1] != ("simulate",) or told["method"] != "nonprivate":
                assert told[name].keys() == terms | {"accountant", "theorem", "note"}, command
        for budget in [told["budget"]] if "budget" in told else []:
            assert budget.keys() == terms, command


def test_a_system_without_file_locks_is_refused_in_one_sentence():
    code = "import os, pathlib, typer, numpy; os.name = 'nt'; import farthing.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "use it inside the Windows Subsystem for Linux" in done.stderr


def test_an_empty_schema_is_no_embedded_one(run):
    run("sample")
    done = run("train", "people.csv", "--schema", "", *SPEND, "--out", "fit")
    assert (done.code, done.out) == (2, "")
    assert "--schema '' cannot be read" in done.err


def test_a_header_of_many_names_is_read_at_once(run):
    names = [f"c{place}" for place in range(50_000)]
    Path("wide.csv").write_text(",".join(names) + "\n")
    done = run("train", "wide.csv", "--target", "c5", *SPEND)
    assert (done.code, done.out.count('"name"')) == (2, len(names))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--epsilon", "1,5", "--delta", "1e-5"), "must be a number with a decimal point, got '1,5'"),
        ((*SPEND, "--schema", "swapped.json"), "must have low < high, got low 80 and high 18"),
        ((*SPEND, "--schema", "comma.json"), "must be JSON: line 4: remove the comma before ']'"),
    ],
)
def test_a_typical_slip_is_named(run: Any, options: tuple[str, ...], says: str) -> None:
    run("sample")
    schema = Path("people.json").read_text()
    Path("swapped.json").write_text(schema.replace('"low": 18, "high": 80', '"low": 80, "high": 18'))
    Path("comma.json").write_text(
        '{"checked_by": "me",\n "columns": [\n  {"name": "age",\n   "low": 1, "high": 2},\n ]}'
    )
    done = run("train", "people.csv", "--target", "income", *options)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_a_similar_column_is_the_only_hint(run: Any) -> None:
    run("sample")
    assert run("schema", "people.csv", "--target", "incom").err == (
        "farthing: 'people.csv' has no column 'incom' (did you mean 'income'?)\n"
    )
    assert "--delimiter" in run("schema", "people.csv", "--target", "salary").err


def test_a_draft_without_a_target_asks_for_one(run: Any) -> None:
    run("sample")
    assert "give --target COLUMN" in run("schema", "people.csv").err
    assert "give --target" not in run("schema", "people.csv", "--target", "income").err


def test_a_budget_below_its_own_noise_is_told(run: Any) -> None:
    run("sample")
    train = ("train", "people.csv", "--schema", "people.json", "--delta", "1e-5", "--dry-run", "--epsilon")
    assert "so the model is mostly noise" in run(*train, "1e-6").err
    assert run(*train, "0.1").err == ""


def test_a_schema_that_fits_few_records_is_told_by_held_out_ones(run: Any) -> None:
    run("sample")
    train = (
        "train",
        "people.csv",
        *SPEND,
        "--target",
        "income",
        "--bounds",
        "age=18:80",
        "--checked-by",
        "me",
    )
    done = run(*train, "--values", "income=0,1", "--holdout", "0.2", "--out", "wrong")
    assert "of about 600 held-out records count. The others have a label that" in done.err
    done = run(*train, "--values", "income=low,high", "--holdout", "0.2", "--out", "right")
    assert "records count" not in done.err
    assert "--holdout 0.2 measures" not in done.err
    done = run(*train, "--values", "income=low,high", "--out", "unmeasured")
    assert "test       none; --holdout 0.2 measures the model within the budget" in done.err


def test_a_model_of_another_version_is_refused(run: Any) -> None:
    run("sample")
    run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit")
    with np.load("fit/model.npz", allow_pickle=False) as file:
        found: dict[str, Any] = dict(file)
    newer = np.array(str(found["privacy"]).replace('"format": 1', '"format": 2'))
    np.savez("newer.npz", **{**found, "privacy": newer})
    done = run("predict", "newer.npz", "people.csv")
    assert (done.code, done.out) == (2, "")
    assert (
        f"has format 2, written by farthing {ft.__version__}, but this version of farthing reads" in done.err
    )
    np.savez("other.npz", **{**found, "kind": np.array("survival")})
    assert "holds a model of kind 'survival'" in run("predict", "other.npz", "people.csv").err


def test_a_folder_in_place_of_its_ledger_is_told_the_name(run: Any) -> None:
    Path("fit").mkdir()
    run("ledger", "create", "fit/a.ledger", *SPEND)
    assert "name the ledger file itself, such as 'fit/a.ledger'" in run("ledger", "show", "fit").err


def test_a_ledger_that_cannot_be_written_is_to_be_copied(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run("ledger", "create", "a.ledger", *SPEND)
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "a.ledger.head")
    done = run("ledger", "verify", "a.ledger")
    assert (done.code, done.out) == (2, "")
    assert "with all files that begin with a.ledger, into a folder that you can write to" in done.err


def test_a_report_without_room_is_paid_and_can_be_written_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farthing.cli import training
    from farthing.errors import FarthingError

    def full(path: Path, content: bytes) -> None:
        if path.name == "report.html":
            raise FarthingError("the result could not be written: 'fit/report.html': No space left on device")
        written(path, content)

    run("sample")
    written = training.write
    monkeypatch.setattr(training, "write", full)
    done = run("train", "people.csv", "--schema", "people.json", *SPEND, "--out", "fit")
    assert done.code == 1
    assert "charged to fit/train.ledger; written: fit/model.npz, fit/privacy.json" in done.err
    again = done.err.split("To write the report again: farthing ")[1].split()
    assert run(*again).code == 0
    assert Path("fit/report.html").exists()


def test_ctrl_c_while_the_command_is_imported_is_one_sentence() -> None:
    code = (
        "import sys; from farthing import __main__ as start; sys.modules['farthing.cli'] = Late(); "
        "sys.exit(start.main())"
    )
    late = "class Late:\n def __getattr__(self, name): raise KeyboardInterrupt\n"
    done = subprocess.run([sys.executable, "-c", late + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "farthing: interrupted\n")
