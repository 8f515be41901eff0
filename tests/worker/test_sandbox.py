"""What a body may read by name."""

import subprocess
import sys

CODE = """
import sys
sys.path.append(sys.argv[1])
from overwinter.worker.sandbox import Limits, Shelter
shelter = Shelter()
shelter.close_in(None, Limits(4 << 30, 1 << 30, 1 << 20), [])
import package_of_a_user
print(package_of_a_user.answer)
"""


def test_packages_outside_of_pythons_directory_can_be_imported(tmp_path):
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "package_of_a_user.py").write_text("answer = 42")
    run = subprocess.run([sys.executable, "-c", CODE, str(place)], capture_output=True, text=True, check=False)
    assert run.stdout == "42\n", run.stderr
