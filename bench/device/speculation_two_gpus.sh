#!/usr/bin/env bash
# What drafts are worth where a Llama-70B shape is divided over two GPUs: without drafts, with a head that is divided, too,
# with one on the leader alone, with a draft model there. Needs two GPUs of one host and no network.
#
#     bash bench/device/speculation_two_gpus.sh [--budget-s 260] [PART ...]
#
# bench/device/speculation.sh with another shape: see there for what it reads, writes and prints.
exec bash "$(dirname "${BASH_SOURCE[0]}")/speculation.sh" --shape llama-70b --size 2 --budget-s 260 "$@"
