"""Claims about `gallery run`: strict before it starts, and every way a run can end, with real kernels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from runner_factory import (
    PARAMETERS,
    REPOSITORY,
    add_notebook,
    alive,
    environment,
    make_gallery,
    read_until,
    runs,
    start,
)

from helpers.runner import batch, cli
from helpers.runner.processes import end_all

KERNEL = ["--kernel", "python3"]

# A cell that starts two ranks of its own, says their process ids, and waits for ever. The second ignores polite
# requests and has left the kernel's session, as a careless launcher's would.
RANKS = """
import subprocess, sys, os, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
ranks = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]),
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True),
]
print("pids", os.getpid(), *[rank.pid for rank in ranks], flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path):
    return make_gallery(tmp_path)


@pytest.fixture
def gallery(root, monkeypatch, capfd):
    """Run the command line here; returns (exit code, what it wrote)."""
    for name, value in environment(root).items():
        monkeypatch.setenv(name, value)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        written = capfd.readouterr()
        return ended.value.code or 0, written.out + written.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2"], "recipe '2' is unknown"),
        (["01_dmeo"], "recipe '01_dmeo' is unknown. Did you mean '01_demo'?"),
        (["1", "--profile", "smok"], "'smok' is unknown. Did you mean 'smoke'? Known: smoke, big."),
        (["1", "-p", "learnig_rate", "0.1"], "01_demo: parameter 'learnig_rate' is unknown. Did you mean"),
        (["1", "-p", "steps", "few"], "parameter steps='few' is str: it takes int or None"),
        (["1", "-p", "steps"], "write `-p NAME VALUE`"),
        (["1", "--profile", "big", "-p", "profile", "smoke"], "differ: give one"),
        (["1", "--timeout", "0"], "--timeout 0.0 is not a time limit"),
        (["1", "-f", "absent.yaml"], "parameter file absent.yaml cannot be read"),
        (["1", "--kernel", "pyhton3"], "kernel 'pyhton3' is unknown. Did you mean 'python3'?"),
        (["1", "--since", "nowhere"], "--since 'nowhere' is not a git revision"),
        (["1"], "environment demo has no lock notebooks/locks/demo.txt. Run `gallery lock demo`."),
        (["1", "--no-such-option"], "No such option"),
    ],
)  # fmt: skip
def test_bad_input_ends_with_2_and_the_nearest_right_name_before_anything_starts(gallery, root, arguments, message):
    add_notebook(root)
    code, output = gallery("run", *arguments)
    assert (code, message in output) == (2, True), output
    assert runs(root) == []
    assert not (root / ".envs").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": None}, "no cell is tagged `parameters`"),
        ({"parameters": "steps: int = 1"}, "the first parameter must be `profile`"),
        ({"metadata": {"environment": ""}}, "metadata gallery.environment is missing"),
        ({"metadata": {"profiles": {"smoke": {"minutes": 1}}}}, "profile 'smoke' needs hardware"),
    ],
)
def test_a_notebook_that_could_not_be_run_strictly_is_bad_input(gallery, root, changes, message):
    add_notebook(root, **changes)
    code, output = gallery("run", "1", *KERNEL)
    assert (code, message in output) == (2, True), output
    assert runs(root) == []


def test_one_bad_recipe_of_several_stops_all_before_the_first_starts(gallery, root):
    add_notebook(root)
    add_notebook(root, name="02_other", parameters=None)
    code, output = gallery("run", "all", *KERNEL)
    assert (code, "02_other: no cell is tagged" in output) == (2, True), output
    assert runs(root) == []


def test_a_passing_run_leaves_notebook_page_record_and_versions_and_points_latest_at_them(gallery, root):
    """Also: parameters arrive with their types, the kernel knows its run folder, progress bars stay one line."""
    add_notebook(
        root,
        """
import os, sys
assert (learning_rate, steps, profile) == (0.001, 7, "big"), (learning_rate, steps, profile)
print("folder", os.environ["GALLERY_RUN_DIR"])
for step in range(50):
    print(f"\\rstep {step}", end="", file=sys.stderr, flush=True)
    if step % 10 == 0:
        print("line", step, flush=True)  # a bar between lines of output
print(file=sys.stderr)
""",
    )
    (root / "p.yaml").write_text("steps: 3\nlearning_rate: 1e-3\n")
    code, output = gallery("run", "01", "--profile", "big", "-f", str(root / "p.yaml"), "-p", "steps", "7", *KERNEL)
    assert code == 0, output
    (folder,) = runs(root)
    assert f"folder {folder}" in output
    assert (folder.parent / "latest").resolve() == folder
    assert {path.name for path in folder.iterdir()} >= {
        "01_demo.ipynb", "01_demo.html", "record.json", "environment.txt", "logs",
    }  # fmt: skip

    record = json.loads((folder / "record.json").read_text())
    assert record["metrics"] == {"accuracy": 0.97, "baseline": 0.5}
    assert [claim["holds"] for claim in record["claims"]] == [True, True]
    assert (record["profile"], record["parameters"]["steps"], record["result"]) == ("big", 7, "passed")
    assert len(record["cells"]) == 4  # parameters, injected parameters, the cell above, record
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["papermill"] == "2.7.0"

    page = (folder / "01_demo.html").read_text()
    assert "step 49" in page
    assert "step 48" not in page
    assert "step 49" in output
    assert "step 48" not in output  # not a terminal: one line
    assert 'src="http' not in page
    assert "accuracy &gt;= 0.95 holds" in page
    for column in ("recipe", "profile", "result", "seconds", "accuracy 0.97", "01_demo.html"):
        assert column in output


def test_a_failing_cell_shows_its_source_the_end_of_its_error_and_the_partial_notebook(gallery, root):
    add_notebook(
        root,
        "print('fine')",
        """
def deep(n):
    return deep(n - 1) if n else 1 / 0
print(deep(40))
""",
    )
    code, output = gallery("run", "1", *KERNEL)
    assert code == 1, output
    assert "return deep(n - 1) if n else 1 / 0" in output
    assert "ZeroDivisionError: division by zero" in output
    assert "partial notebook: " in output
    assert "PapermillExecutionError" not in output
    assert len(output.splitlines()) < 50, output
    (folder,) = runs(root)
    notebook = nbformat.read(folder / "01_demo.ipynb", as_version=4)
    assert any("fine" in str(cell.get("outputs")) for cell in notebook.cells)
    record = json.loads((folder / "record.json").read_text())
    assert (record["result"], record["exit_code"]) == ("failed", 1)
    assert "ZeroDivisionError" in (folder / "01_demo.html").read_text()


def test_a_claim_that_does_not_hold_ends_with_3_and_names_value_and_bound(gallery, root):
    record = 'from helpers import record\nrecord({"accuracy": 0.9}, ["accuracy >= 0.95"])'
    add_notebook(root, record=record)
    code, output = gallery("run", "1", *KERNEL)
    assert (code, "does not hold: accuracy >= 0.95 (0.9 against 0.95)" in output) == (3, True), output


def test_a_claim_is_judged_by_the_runner_and_not_by_the_notebook(gallery, root):
    """A notebook that swallows ClaimFailed, or writes `holds` itself, does not pass."""
    add_notebook(
        root,
        record="""
from IPython.display import display
claim = {"claim": "accuracy >= 0.95", "value": 1, "bound": 0.95, "holds": True}
bundle = {"schema": 1, "metrics": {"accuracy": 0.9}, "claims": [claim]}
display({"application/vnd.ddp-gallery.record+json": bundle, "text/plain": "all is well"}, raw=True)
""",
    )
    code, output = gallery("run", "1", *KERNEL)
    assert (code, "accuracy >= 0.95 (0.9 against 0.95)" in output) == (3, True), output


def test_a_later_record_does_not_take_back_a_claim_that_did_not_hold(gallery, root):
    earlier = """
from helpers import record
try:
    record({"accuracy": 0.1}, ["accuracy >= 0.95"])
except AssertionError:
    pass
"""
    add_notebook(root, earlier)
    code, output = gallery("run", "1", *KERNEL)
    assert (code, "accuracy >= 0.95 (0.1 against 0.95)" in output) == (3, True), output


def test_a_notebook_that_records_nothing_has_proven_nothing_and_ends_with_3(gallery, root):
    add_notebook(root, "x = 1", record="")
    code, output = gallery("run", "1", *KERNEL)
    assert (code, "the notebook recorded nothing" in output) == (3, True), output


def test_a_kernel_that_dies_is_a_failed_notebook(gallery, root):
    add_notebook(root, "import os\nos._exit(7)")
    code, output = gallery("run", "1", *KERNEL)
    assert (code, "DeadKernelError" in output, "os._exit(7)" in output) == (1, True, True), output


def test_the_time_limit_ends_the_kernel_and_every_process_it_started(gallery, root):
    add_notebook(root, RANKS)
    begun = time.monotonic()
    code, output = gallery("run", "1", "--timeout", "0.1", *KERNEL)
    assert code == 1, output
    assert "time limit: not finished after 0.1 minutes" in output
    assert time.monotonic() - begun < 40
    pids = [int(word) for word in output.split("pids ")[1].splitlines()[0].split()]
    assert len(pids) == 3
    assert alive(pids) == []
    assert json.loads((runs(root)[0] / "record.json").read_text())["result"] == "time limit"


@pytest.fixture
def started(root):
    """Starts `gallery` processes; should a test fail, nothing of theirs outlives it."""
    processes = []

    def run(*arguments):
        processes.append(start(root, *arguments))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()
    for folder in runs(root):
        end_all(folder)


def test_a_signal_to_gallery_run_ends_its_kernel_and_ranks_and_nobody_elses(root, started):
    """Two runs at the same time; Ctrl-C ends the first, SIGTERM the second."""
    add_notebook(root, RANKS)
    processes = [started("run", "1", *KERNEL) for _ in range(2)]
    ranks = [[int(word) for word in read_until(process, "pids ").split()[1:]] for process in processes]
    assert len(alive([*ranks[0], *ranks[1]])) == 6
    for process, pids, number, expected in zip(
        processes, ranks, (signal.SIGINT, signal.SIGTERM), (130, 143), strict=True
    ):
        assert len(alive(pids)) == 3  # the other run's end was not theirs
        process.send_signal(number)
        time.sleep(1)
        process.send_signal(number)  # impatience
        output, _ = process.communicate(timeout=60)
        assert process.returncode == expected, output
        assert alive(pids) == []
        assert "interrupted" in output
    folders = runs(root)
    assert len(folders) == 2
    codes = {json.loads((folder / "record.json").read_text())["exit_code"] for folder in folders}
    assert codes == {130, 143}
    assert (folders[0].parent / "latest").resolve() in folders


def test_all_runs_every_recipe_and_ends_with_a_table_and_the_first_failures_code(gallery, root):
    add_notebook(root, name="01_good")
    add_notebook(root, "raise ValueError('no data')", name="02_bad")
    add_notebook(
        root,
        name="03_long",
        metadata={"profiles": {"smoke": {"hardware": "cpu", "minutes": 99, "ran": True}}},
    )
    code, output = gallery("run", "all", "--budget", "50", *KERNEL)
    assert code == 1, output
    table = output[output.rindex("headline metric") :]
    assert "01_good  smoke    passed" in table
    assert "02_bad   smoke    failed" in table
    assert "NOT RUN: 03_long: it takes about 99 min" in table


def test_recipes_changed_since_a_revision_run_first(root):
    from helpers.runner import batch, catalog

    for name in ("01_a", "02_b", "03_c"):
        add_notebook(root, name=name)
    git = f"git -C {root} -c user.name=a -c user.email=a@b "
    assert os.system(f"git init -q {root} && {git} add -A && {git} commit -qm one") == 0
    add_notebook(root, "x = 1", name="03_c")
    ordered = batch.changed_first(root, catalog.recipes(root), "HEAD")
    assert [recipe.name for recipe in ordered] == ["03_c", "01_a", "02_b"]


def test_list_and_show_tell_what_a_recipe_is(gallery, root):
    add_notebook(root)
    code, output = gallery("list")
    assert (code, "smoke (1), big (30)" in output) == (0, True), output
    code, output = gallery("show", "1")
    assert code == 0
    for line in PARAMETERS.strip().splitlines():
        assert line.split("#")[1].strip() in output


def test_the_command_line_needs_no_torch():
    """A runner that imports torch cannot start on a fresh machine, and takes seconds where it can."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import helpers.runner.cli, helpers.runner.batch, helpers.runner.engine, helpers.runner.check\n"
        "import helpers.runner.doctor, helpers.runner.clean, helpers.records, helpers.kernel"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(REPOSITORY), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_file_of_the_runner_is_short():
    files = [*(REPOSITORY / "helpers" / "runner").glob("*.py")]
    assert {file.name: n for file in files if (n := len(file.read_text().splitlines())) >= 300} == {}


@pytest.mark.parametrize(("wanted", "told"), [("8xH100", True), ("2x8xA10", True), ("2 CPU processes", False)])
def test_a_profile_for_gpus_on_a_machine_without_any_is_announced_before_it_starts(monkeypatch, wanted, told):
    monkeypatch.setattr(batch.hardware, "gpus", list)
    assert (f"written for {wanted}; this machine has no GPU" in batch.lacking_gpus(wanted)) is told
    monkeypatch.setattr(batch.hardware, "gpus", lambda: [{"name": "H100"}] * 8)
    assert batch.lacking_gpus(wanted) == ""
