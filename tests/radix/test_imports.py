import subprocess
import sys


def test_radix_needs_no_torch() -> None:
    code = (
        "import sys, hisparse_sgl.radix.gate; "
        "sys.exit(sorted({'torch', 'triton'} & {name.split('.')[0] for name in sys.modules}) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
