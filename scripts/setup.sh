#!/bin/sh
# Make the virtual environment $1 with everything that pipecomp and its tests need; safe to run again.
set -eu
venv=$1
python=${PYTHON:-python3}
torch_version=2.13.0

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "pipecomp needs Python 3.10 or newer; '$python' is $("$python" --version 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "Could not make a virtual environment; on Debian and Ubuntu install python3-venv first." >&2
    exit 1
}
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"

# Without a GPU the ordinary Linux build of torch brings several GB of CUDA packages that nothing would use.
if "$venv/bin/python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11))' 2>/dev/null; then
    echo "Keeping the torch that is installed."
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
    echo "No NVIDIA GPU found: installing the CPU build of torch."
    $pip install "torch==$torch_version+cpu" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} 2>"$venv/torch.log" || {
        echo "No CPU build of torch $torch_version among the configured package indexes; taking the ordinary one (several GB)."
        echo "To avoid that: make setup TORCH_INDEX_URL=<the CPU wheel index that PyTorch's installation page names>"
        $pip install "torch==$torch_version"
    }
else
    $pip install "torch==$torch_version"
fi
echo "Installing pipecomp and its dependencies."
$pip install setuptools wheel
$pip install --no-build-isolation -e ".[dev]"
touch "$venv/.ready"
DS_ACCELERATOR=cpu "$venv/bin/python" -c 'import torch, deepspeed, transformers; print(f"Ready: torch {torch.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}")' 2>/dev/null
