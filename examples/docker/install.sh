#!/bin/sh
# Install pipecomp from a source tree into a new virtual environment:
#
#   install.sh SOURCE FOLDER
#
# TORCH_INDEX_URL, if it is set, is searched for torch before the configured package indexes. Needs Python 3.11 or newer
# with venv, and a C++ compiler for fast CPU kernels. The Dockerfile runs it; it works without Docker just as well.
set -eu
source=$1 folder=$2
python3 -m venv "$folder"
pip="$folder/bin/pip --disable-pip-version-check --no-cache-dir -q"
# Where torch sees a GPU, DeepSpeed is not installed without CUDA's compiler, whose version it asks for.
export DS_ACCELERATOR=cpu
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    $pip install --index-url "$TORCH_INDEX_URL" torch
fi
$pip install "$source"
# The kernels come compiled, or the image would quantize dozens of times slower without a word.
# -I: what was installed is looked at, and not the checkout in which this may be started.
"$folder/bin/python" -I - <<'CHECK'
import sys

from pipecomp.kernels import dispatch

(cpu,) = (status for status in dispatch.status() if status.device == "cpu")
sys.exit(None if cpu.backend == "native" else f"kernels on the CPU: {cpu.backend} ({cpu.reason})")
CHECK
