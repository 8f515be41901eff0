"""`overwinter doctor` says what the machine lacks, without a node and without PyTorch."""

import json
import subprocess
import sys

from tests.cli.conftest import Run


def test_each_check_is_a_line_and_its_remedy_ends_a_line(local: Run, tmp_path) -> None:
    where = ("--data", str(tmp_path / "data"), "--host-store", "/dev/shm")
    results = json.loads(local("doctor", *where, "--json").stdout)
    lines = local("doctor", *where).stdout.splitlines()
    for check in results:
        assert any(line.startswith(check["level"]) and check["what"] in line for line in lines)
        assert not check["remedy"] or any(line.endswith(check["remedy"]) for line in lines)


def test_doctor_fails_where_no_node_can_run(local: Run, tmp_path) -> None:
    result = local("doctor", "--data", str(tmp_path), "--host-store", str(tmp_path / "none"), exit_code=1)
    assert str(tmp_path / "none") in result.stdout


def test_pytorch_is_checked_but_not_imported() -> None:
    code = (
        "import sys\n"
        "from overwinter.cli.main import main\n"
        "try:\n"
        "    main(['doctor'])\n"
        "except SystemExit:\n"
        "    print([name for name in ('torch', 'numpy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyTorch" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
