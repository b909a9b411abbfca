#!/bin/sh
# Installs this part, then goes on with the plan: sh PART/run.sh [OPTION]... takes the options of `run`.
# QUARTET_LENT: where everything is kept (/tmp/quartet-lent). QUARTET_TARGET: a folder for the packages, instead of
# Python's own environment. QUARTET_SHM: size of /dev/shm, if the machine's is too small. PYTHON: the interpreter.
set -eu
began=$(date +%s)
part=$(cd "$(dirname "$0")" && pwd)
store=${QUARTET_LENT:-/tmp/quartet-lent} python=${PYTHON:-python3}
"$python" "$part/install.py" "$part" --store "$store" ${QUARTET_TARGET:+--target "$QUARTET_TARGET"}
[ -z "${QUARTET_SHM:-}" ] || mount -o "remount,size=$QUARTET_SHM" /dev/shm || echo "/dev/shm stays as it is" >&2
if [ ! -d "$store/project" ]; then
    echo "the project's archive has not come yet: it is in part 1" >&2
    exit 1
fi
# Figures of a machine that was given back, which lie beside this script, are gone on with.
if [ -e "$part/figures.jsonl" ] && [ ! -e "$store/run/figures.jsonl" ]; then
    mkdir -p "$store/run"
    cp "$part/figures.jsonl" "$store/run/figures.jsonl"
fi
PYTHONPATH=$store/project${QUARTET_TARGET:+:$QUARTET_TARGET}${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
cd "$store/project"
exec "$python" -m benchmarks.lent run --folder "$store/run" --spent $(($(date +%s) - began)) "$@"
