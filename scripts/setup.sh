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
[ -x "$venv/bin/python" ] || {
    echo "Making a virtual environment in $venv."
    "$python" -m venv "$venv" || {
        echo "Could not make a virtual environment; on Debian and Ubuntu install python3-venv first." >&2
        exit 1
    }
}
# Errors only. Bytecode is written when a module is first imported: of most installed modules never, and compiling all of
# them would take longer than everything else here.
install="$venv/bin/python -m pip --disable-pip-version-check -qq install --no-compile"

# While packages are installed on one core, the kernels are compiled on another.
"$venv/bin/python" kernels/build.py "$venv/kernels.so" >"$venv/kernels.log" 2>&1 &
kernels=$!
trap 'kill $kernels 2>/dev/null || :' EXIT

# Without a GPU the ordinary Linux build of torch brings several GB of CUDA packages that nothing would use.
if "$venv/bin/python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11))' 2>/dev/null; then
    echo "Keeping the torch that is installed."
    $install setuptools
elif [ "$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then
    echo "Installing the CPU build of torch $torch_version, as there is no NVIDIA GPU."
    $install setuptools "torch==$torch_version+cpu" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} 2>"$venv/torch.log" || {
        echo "No CPU build of torch $torch_version among the configured package indexes; taking the ordinary one (several GB)."
        echo "To avoid that: make setup TORCH_INDEX_URL=<the CPU wheel index that PyTorch's installation page names>"
        $install setuptools "torch==$torch_version"
    }
else
    echo "Installing torch $torch_version."
    $install setuptools "torch==$torch_version"
fi
echo "Installing pipecomp's dependencies, and pipecomp with its compiled kernels."
if wait $kernels; then
    export BUILT_KERNELS="$(cd "$venv" && pwd)/kernels.so"
fi
$install --no-build-isolation -e ".[dev]"
echo "Importing them for the first time."
DS_ACCELERATOR=cpu "$venv/bin/python" -c 'import torch, deepspeed, transformers; print(f"Ready: torch {torch.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}")' 2>"$venv/import.log" || {
    cat "$venv/import.log" >&2
    exit 1
}
touch "$venv/.ready"
