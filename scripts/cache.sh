#!/usr/bin/env bash
# Caches prompted tasks with seqio_cache_tasks, as T0's README does:
#
#   bash scripts/cache.sh                                     # the embedded demo
#   MODULE=t0repro.tasks.examples.small MIXTURE=small_train,small_eval_score_eval bash scripts/cache.sh
#   MODULE=t0repro.tasks.local TASKS='super_glue_rte_.*' bash scripts/cache.sh
#
# Variables: CACHE_DIR, the output folder (runs/<MODULE's last name>/cache); PROCESSES, which share the tasks;
# MIN_SHARDS, the minimum number of files per split. Further arguments go to seqio_cache_tasks. Cached tasks are
# kept; partial ones are cached again. The demo takes about a minute on two cores; `t0repro cache` writes the
# same examples in seconds.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PATH="$root/.venv/bin:$PATH"
if [[ " $* " == *" --help "* ]]; then
  sed -n '/^#!/d; s/^# \{0,1\}//p; /^set /q' "${BASH_SOURCE[0]}"
  exit
fi
if ! command -v seqio_cache_tasks >/dev/null; then
  echo "cache: seqio_cache_tasks is not installed: bash $root/scripts/setup.sh" >&2
  exit 2
fi

MODULE=${MODULE:-t0repro.tasks.demo}
if [[ -z ${MIXTURE:-} && -z ${TASKS:-} ]]; then
  MIXTURE=demo_train,demo_eval_score_eval
fi
IFS=, read -ra modules <<< "$MODULE"
CACHE_DIR=${CACHE_DIR:-runs/${modules[0]##*.}/cache}
MIN_SHARDS=${MIN_SHARDS:-4}
# Beam runs one thread a process here, and each holds about 1 GB.
cores=$(getconf _NPROCESSORS_ONLN)
PROCESSES=${PROCESSES:-$((cores < 4 ? cores : 4))}

# TensorFlow's and Beam's messages go to the logs; nothing here needs an accelerator or the network.
# Several writers cannot share a folder of a bucket, so one command writes there.
if [[ $CACHE_DIR == *://* ]]; then
  exec t0repro cache --module_import="$MODULE" --output_cache_dir="$CACHE_DIR" \
    ${MIXTURE:+--mixture="$MIXTURE"} ${TASKS:+--tasks="$TASKS"} --min_shards="$MIN_SHARDS" \
    --workers="$PROCESSES" "$@"
fi

export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2} TF_ENABLE_ONEDNN_OPTS=0 GRPC_VERBOSITY=NONE
export CUDA_VISIBLE_DEVICES=
started=$SECONDS
logs=$CACHE_DIR/logs
plan=$(mktemp)
trap 'rm -f "$plan"; jobs -p | xargs -r kill 2>/dev/null || true' EXIT

# The lock of `t0repro cache`, so that neither command removes what the other is writing. The workers inherit
# it, so it is held until the last of them ends, even if this script is killed. Large processes take a few
# seconds to die.
mkdir -p "$CACHE_DIR"
exec 9>"$CACHE_DIR/.t0repro.lock"
# A refused run may have removed the file together with the folder that it had created; then it locks nothing.
if ! flock --timeout 10 9 || [[ ! /dev/fd/9 -ef $CACHE_DIR/.t0repro.lock ]]; then
  echo "cache: another run is caching into $CACHE_DIR; wait for it, or set CACHE_DIR to another folder" >&2
  exit 2
fi

# A count with its noun, as in "1 task" and "2 tasks".
counted() { if (($1 == 1)); then echo "$1 $2"; else echo "$1 ${3:-$2s}"; fi; }
say() { echo "  $1 [$((SECONDS - started)) s]"; }
say "reading the list of tasks of $MODULE"
# -P keeps the repository's folder gin/ from shadowing the library. Progress goes to stderr.
status=0
python -P -W ignore -m t0repro.tasks.prompt_cache.seqio_plan --module_import="$MODULE" \
  --mixtures="${MIXTURE:-}" --tasks="${TASKS:-}" --output_cache_dir="$CACHE_DIR" \
  --processes="$PROCESSES" >"$plan" || status=$?
if ((status)); then exit "$status"; fi

planned=$(tr ',' '\n' <"$plan" | grep -c . || true)
if ((planned)); then
  processes_planned=$(counted "$(wc -l <"$plan")" process processes)
  say "caching $(counted "$planned" task) in $processes_planned of seqio_cache_tasks; logs: $logs"
  say "they import TensorFlow and Beam first, which takes 10 to 30 s"
fi
# DirectRunner first asks the network for another runner; the one that it falls back to is named.
processes=()
number=0
mkdir -p "$logs"
rm -f "$logs"/*.log
while read -r tasks; do
  number=$((number + 1))
  seqio_cache_tasks --tasks="$tasks" --output_cache_dir="$CACHE_DIR" \
    "${modules[@]/#/--module_import=}" --min_shards="$MIN_SHARDS" \
    --pipeline_options=--runner=FnApiRunner,--no_pipeline_type_check "$@" \
    >"$logs/$number.log" 2>&1 </dev/null &
  processes+=($!)
done <"$plan"

# Beam writes a task's files only at the end. Until then, print how many splits it has begun to read. A log
# that grows shows that a process is alive.
count() { find "$CACHE_DIR" -mindepth 2 -maxdepth 2 -name COMPLETED 2>/dev/null | wc -l || true; }
begun() { cat "$logs"/*.log | grep -c 'Processing shard' || true; }
last=0
while jobs -rp | grep -q .; do
  sleep 1
  if ((SECONDS - started >= last + 5)); then
    last=$((SECONDS - started))
    if (($(begun))); then
      say "$(counted "$(begun)" split) read, $(counted "$(count)" task) cached"
    else
      say "still importing: $(cat "$logs"/*.log | wc -l) lines in the logs"
    fi
  fi
done

for index in "${!processes[@]}"; do
  log=$logs/$((index + 1)).log
  wait "${processes[$index]}" || {
    status=$?
    echo "seqio_cache_tasks failed; the end of $log:" >&2
    tail -n 15 "$log" >&2
  }
done
if ((status)); then exit "$status"; fi
echo "$(counted "$(count)" task) cached in $CACHE_DIR ($((SECONDS - started)) s)"
