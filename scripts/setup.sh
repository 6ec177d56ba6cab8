#!/bin/sh
# Make the virtual environment $1 with everything that pipecomp and its tests need; safe to run again.
set -eu
venv=$1
python=${PYTHON:-python3}
torch_version=2.13.0
steps=4 number=0 work= kernels=

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "pipecomp needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Try: make PYTHON=python3.12" >&2
    exit 1
fi

# What is asked to run in the background must end with this script.
trap 'kill $work $kernels 2>/dev/null || :' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# begin TEXT COMMAND…: run it with its output in a file. A line says for how long already, and what pip said last; in a
# log file it is written every 15 seconds.
begin() {
    text=$1 log=$venv/setup-$number.log began=$(date +%s)
    shift
    [ -t 1 ] || echo "[$number/$steps] $text"
    "$@" >"$log" 2>&1 &
    work=$! shown=0
    while kill -0 "$work" 2>/dev/null; do
        sleep 1
        spent=$(($(date +%s) - began))
        [ -t 1 ] || [ $((spent - shown)) -ge 15 ] || continue
        shown=$spent
        last=$(grep -E '^ *(Collecting|Downloading|Using cached|Installing|Building)' "$log" | tail -n 1 | tr -s ' ')
        if [ -t 1 ]; then
            printf '\r\033[K%s' "$(echo "[$number/$steps] $text: $spent s  $last" | cut -c1-79)"
        else
            echo "      $spent s  $last" | cut -c1-79
        fi
    done
    status=0
    wait "$work" || status=$?
    work=
    [ ! -t 1 ] || printf '\r\033[K'
}

# run TEXT COMMAND…: the next step; if it fails, the end of what it said, and this script ends.
run() {
    number=$((number + 1))
    begin "$@"
    finish
}

finish() {
    if [ "$status" != 0 ]; then
        tail -n 30 "$log" >&2
        echo "[$number/$steps] $text: failed with status $status; all of its output is in $log" >&2
        exit 1
    fi
    echo "[$number/$steps] $text: done in $(($(date +%s) - began)) s"
}

# Bytecode is written when a module is first imported: of most installed modules never, and compiling all of them would
# take longer than everything else here. The last step imports what each rank will; where nobody may write bytecode, as
# in many containers, a rank would take ten seconds longer without.
unset PYTHONDONTWRITEBYTECODE

# (exec: this runs in the background, and is what the trap must end.)
pip() {
    exec "$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --progress-bar off "$@"
}

make_venv() {
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
        echo "Could not make a virtual environment; on Debian and Ubuntu install python3-venv first."
        return 1
    }
}

# Where its making was interrupted, or python3-venv was missing, there is a Python without pip; where the Python is gone
# that it was made of, there is none: both are made anew.
[ ! -f "$venv/pyvenv.cfg" ] || "$venv/bin/python" -m pip --version >/dev/null 2>&1 || rm -rf "$venv"
mkdir -p "$venv"
run "A virtual environment in $venv" make_venv

# While packages are installed on one core, the kernels are compiled on another.
"$venv/bin/python" kernels/build.py "$venv/kernels.so" >"$venv/kernels.log" 2>&1 &
kernels=$!

# In a container the GPU may be there without its tools, under Windows (WSL) without this device.
has_gpu() {
    [ -e /dev/nvidiactl ] || nvidia-smi >/dev/null 2>&1
}

# Where torch sees a GPU, DeepSpeed is not installed without CUDA's compiler, whose version it asks for.
export DS_ACCELERATOR=cpu

# Without a GPU the ordinary Linux build of torch brings several GB of CUDA packages that nothing would use.
if "$venv/bin/python" -c 'import sys, torch; sys.exit(tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 11))' 2>/dev/null; then
    run "The torch that is there stays" pip "setuptools>=77"
elif [ "$(uname -s)" = Linux ] && ! has_gpu; then
    number=$((number + 1))
    begin "The CPU build of torch $torch_version, as there is no NVIDIA GPU" \
        pip "setuptools>=77" "torch==$torch_version+cpu" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
    if [ "$status" != 0 ]; then
        echo "      None of the configured package indexes has it. To save several GB: make setup"
        echo "      TORCH_INDEX_URL=<the CPU wheel index that PyTorch's installation page names>"
        begin "The ordinary build of torch $torch_version, several GB" pip "setuptools>=77" "torch==$torch_version"
    fi
    finish
else
    # An index for another CUDA than that of the ordinary build: for GPUs or drivers that are older.
    run "torch $torch_version" pip "setuptools>=77" "torch==$torch_version" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
fi

if wait $kernels; then
    export BUILT_KERNELS="$(cd "$venv" && pwd)/kernels.so"
else
    echo "      No C++ compiler made the kernels ($venv/kernels.log): PyTorch will do the work, more slowly."
fi
kernels=
run "pipecomp with its kernels, and the packages that it needs" pip --no-build-isolation -e ".[dev]"

run "Importing them for the first time" "$venv/bin/python" -c '
import torch, deepspeed, transformers
import deepspeed.runtime.zero.muon.muon_optimizer, pytest, setuptools._distutils.core
import pipecomp.cli.commands, pipecomp.netlab.lab, pipecomp.recipes.run, pipecomp.trainer
print(f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, transformers {transformers.__version__}")'
echo "Ready: $(grep '^torch ' "$log" | tail -n 1)"
touch "$venv/.ready"
