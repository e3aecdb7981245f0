#!/usr/bin/env bash
# Everything that needs a CUDA device, checks first and the tables last:  tests/gpu/run_all.sh [FOLDER for the logs]
# With --long the comparison of limits runs over 20 minutes of stream, as in the README.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-gpu_results}
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD/tests:$PWD/examples${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=110
python=${PYTHON:-python3}
minutes=2
[ "${2:-}" = --long ] && minutes=20
"$python" -m pytest tests/gpu --ignore tests/gpu/test_metal_gpu.py -o addopts= -o asyncio_mode=auto -q --import-mode=importlib > "$out/tests.txt" 2>&1
status=$?
tail -15 "$out/tests.txt"
for script in tests/gpu/speed.py tests/gpu/sosfilt_speed.py "tests/gpu/metal_on_cuda.py --out $out" "tests/gpu/scaler_speed.py --out $out" "tests/gpu/bus.py --out $out" "tests/gpu/peers.py --out $out" examples/cache_behaviour.py "examples/transformer_shapes.py --full" \
    "examples/compare_cache_limits.py --minutes $minutes --stall-every 300 --plot $out/limits.png --json $out/limits.json"; do
    name=$(basename "${script%%.py*}")
    # shellcheck disable=SC2086
    "$python" $script > "$out/$name.txt" 2>&1 || { status=1; echo "$name failed:"; tail -5 "$out/$name.txt"; }
done
cat "$out"/{bus,transformer_shapes,cache_behaviour,compare_cache_limits,metal_on_cuda,peers,scaler_speed,sosfilt_speed,speed}.txt
exit $status
