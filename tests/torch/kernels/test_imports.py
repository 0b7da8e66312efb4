"""A run without a GPU needs no Triton."""

import subprocess
import sys


def test_a_run_on_a_cpu_does_not_import_triton() -> None:
    code = (
        "import sys, ifbbench.torch.kernels, ifbbench.torch.build, ifbbench.torch.model_executor\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'triton'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
