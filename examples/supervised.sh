#!/usr/bin/env bash
# A run that survives its processes: torchrun starts all ranks again when one is lost, and --resume auto goes on from the
# last good checkpoint. Run it in an empty folder, with a configuration, a model and a text:
#
#   supervised.sh --deepspeed_config ds_config.json --model tiny --tokenizer train:2048 --train-file text.txt --epochs 5
#
# On several machines run it on each, with NODES (how many), NODE (0, 1, …), and MASTER=HOST:PORT of node 0. The folder
# `checkpoints` should be one that all machines share; with one replica each may have its own. "in_checkpoints": true in
# the configuration's "store" makes a restarted run's losses those of one that was never interrupted.
#
# The rendezvous is torchrun's static one: with --standalone and with c10d, whoever reaches its port can run programs
# here (docs/security.md).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
if [ -n "${MASTER:-}" ]; then
    where=(--nnodes "${NODES:?how many machines}" --node-rank "${NODE:?which of them, from 0}")
else
    where=(--nnodes 1 --node-rank 0)
    MASTER=127.0.0.1:$("$python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
exec "$python" -m torch.distributed.run "${where[@]}" --master-addr "${MASTER%:*}" --master-port "${MASTER##*:}" \
    --nproc-per-node "${PROCESSES:-2}" \
    --max-restarts "${MAX_RESTARTS:-10}" \
    "$here/../recipes/${RECIPE:-gpt2_wikitext2}/train.py" \
    --checkpoint checkpoints --save-every "${SAVE_EVERY:-100}" --resume auto "$@"
