"""What the adapters need is theirs to need: nothing of it is imported by anything else."""

import subprocess
import sys

import pytest


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_package_of_adapters_imports_none_of_their_libraries():
    code = "import sys, metrale_numba.engines; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert run_python(code).returncode == 0


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_together_with_the_extra(missing):
    pytest.importorskip("torch", reason="without both, the first one is named")
    code = f"import sys; sys.modules['{missing}'] = None; import metrale_numba.engines.transformers"
    message = run_python(code).stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: {missing}")
    assert message.endswith("install it with: pip install 'metrale-numba[transformers]'")


def test_a_release_of_transformers_that_is_too_old_is_refused():
    pytest.importorskip("transformers", reason="there is none to be too old")
    code = "import transformers; transformers.__version__ = '5.9.1'; import metrale_numba.engines.transformers"
    assert (
        "ImportError: transformers 5.9.1 is too old; update it with: pip install --upgrade" in run_python(code).stderr
    )


def test_without_any_of_them_the_extra_is_named():
    code = "import sys; sys.modules['torch'] = None; import metrale_numba.engines.transformers"
    assert "pip install 'metrale-numba[transformers]'" in run_python(code).stderr
