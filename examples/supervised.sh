#!/usr/bin/env bash
# A run that survives its processes: torchrun starts all ranks again when one is lost, and --resume auto goes on from the
# last good checkpoint. Run it in an empty folder, with a configuration, a model and a text:
#
#   supervised.sh --deepspeed_config ds_config.json --model tiny --tokenizer train:2048 --train-file text.txt --epochs 5
#
# On several machines run it on each, with NODES, and RENDEZVOUS=HOST:PORT of one of them. The folder `checkpoints` must be
# one that all machines share. "in_checkpoints": true in the configuration's "store" makes a restarted run's losses those
# of one that was never interrupted.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
where=(--standalone)
if [ -n "${RENDEZVOUS:-}" ]; then
    where=(--nnodes "${NODES:?how many machines}" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN:-run}")
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${where[@]}" --nproc-per-node "${PROCESSES:-2}" \
    --max-restarts "${MAX_RESTARTS:-10}" \
    "$here/../recipes/${RECIPE:-gpt2_wikitext2}/train.py" \
    --checkpoint checkpoints --save-every "${SAVE_EVERY:-100}" --resume auto "$@"
